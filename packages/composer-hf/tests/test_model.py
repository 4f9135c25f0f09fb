import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
import torchmetrics
from transformers import BatchEncoding, BertConfig, BertForPreTraining

from composer_hf import HuggingFaceModel
from composer_models import LanguageCrossEntropy


def test_the_loss_is_the_one_of_the_model(make_model, batch, architectures):
    for name in architectures:
        model = make_model(name)
        labels = torch.tensor([0, 2, 1]) if name == "bert classifier" else batch["labels"]
        wrapped = HuggingFaceModel(model)
        given = {**batch, "labels": labels, "of_no_use": 3}
        expected = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss

        assert torch.equal(wrapped.loss(wrapped(given), given), expected), name


def test_the_metric_of_a_causal_model_equals_its_loss_also_with_padding(make_model, batch):
    model = HuggingFaceModel(make_model("llama"), use_logits=True, metrics=[LanguageCrossEntropy()])
    batch["labels"][0, 5:] = -100
    batch["labels"][2, :2] = -100
    metric = model.get_metrics(is_train=False)["LanguageCrossEntropy"]

    model.update_metric(batch, model.eval_forward(batch), metric)

    torch.testing.assert_close(metric.compute(), model(batch)["loss"].detach())


def test_evaluation_leaves_the_batch_as_it_was(make_model, batch):
    model = HuggingFaceModel(make_model("gpt2"), use_logits=True)
    before = copy.deepcopy(batch)

    model.eval_forward(batch)

    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_labels_are_those_of_the_next_token_for_causal_models_alone(make_model, batch):
    causal = HuggingFaceModel(make_model("gpt2"), use_logits=True)
    masked = HuggingFaceModel(make_model("bert"), use_logits=True)

    causal.eval_forward(batch)
    masked.eval_forward(batch)

    assert causal.labels[:, :-1].tolist() == batch["labels"][:, 1:].tolist()
    assert set(causal.labels[:, -1].tolist()) == {-100}
    assert torch.equal(masked.labels, batch["labels"])


def test_outputs_that_are_at_hand_are_not_computed_again(make_model, batch):
    model = HuggingFaceModel(make_model("gpt2"), use_logits=True)
    outputs = model(batch)

    assert model.eval_forward(batch, outputs) is outputs.logits


def test_without_use_logits_metrics_see_the_whole_output(make_model, batch):
    assert HuggingFaceModel(make_model("gpt2")).eval_forward(batch).keys() >= {"loss", "logits"}


def test_outputs_without_logits_are_told(batch):
    config = BertConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = HuggingFaceModel(BertForPreTraining(config), use_logits=True)
    with pytest.raises(ValueError, match=r"no 'logits', but .*prediction_logits.*use_logits=False"):
        model.eval_forward(batch)


def test_a_cache_for_generation_is_kept_in_evaluation_and_where_it_is_asked_for(make_model, batch):
    for name in ("gpt2", "llama", "t5"):
        model = HuggingFaceModel(make_model(name))
        assert model(batch).past_key_values is not None, name
        model.train()
        assert model(batch).past_key_values is None, name
        model.model_forward_args |= {"use_cache"}
        assert model({**batch, "use_cache": True}).past_key_values is not None, name


def test_a_regression_has_one_number_for_each_sample(make_model, batch):
    model = HuggingFaceModel(make_model("bert classifier", num_labels=1), use_logits=True)

    logits = model.eval_forward({**batch, "labels": torch.rand(3)})

    assert logits.shape == (3,)


def test_the_decoders_inputs_are_made_of_the_labels(make_model, batch):
    model = make_model("t5")
    expected = model(**batch).logits

    assert torch.equal(HuggingFaceModel(model, use_logits=True).eval_forward(batch), expected)


def test_a_batch_of_a_tokenizer_is_taken(make_model, batch):
    model = HuggingFaceModel(make_model("gpt2"))

    assert model(BatchEncoding(batch)).logits.shape == (3, 9, 300)


def test_another_batch_is_refused(make_model, batch):
    with pytest.raises(ValueError, match="Unexpected batch type tuple"):
        HuggingFaceModel(make_model("gpt2"))((batch["input_ids"],))


def test_a_batch_without_labels_has_no_loss(make_model, batch):
    model = HuggingFaceModel(make_model("gpt2"))
    del batch["labels"]

    with pytest.raises(ValueError, match="Put 'labels' into it"):
        model.loss(model(batch), batch)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_generation_in_evaluation_gives_the_continuations_alone(name, make_model, tokenizer):
    model = HuggingFaceModel(make_model(name), tokenizer)
    prompts = tokenizer(["the quick", "to be or"], return_tensors="pt", padding=True, padding_side="left")
    prompts.pop("token_type_ids", None)
    settings = {"max_new_tokens": 5, "do_sample": False}
    tokens = model.model.generate(**prompts, **settings, pad_token_id=tokenizer.pad_token_id)
    start = prompts["input_ids"].shape[1] if name == "gpt2" else 0
    texts = tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True)
    # This tokenizer has no token for " a" as a whole, so the first space is put back.
    expected = texts if len(tokenizer(" a", add_special_tokens=False)["input_ids"]) == 1 else [f" {t}" for t in texts]

    found = model.eval_forward({**prompts, "mode": "generate", "generation_kwargs": settings, "labels": ["a", "b"]})

    assert found == expected
    assert model.labels == ["a", "b"]


def test_generation_needs_a_tokenizer(make_model, batch):
    with pytest.raises(ValueError, match="Generation eval cannot be used without providing a tokenizer"):
        HuggingFaceModel(make_model("gpt2")).eval_forward({**batch, "mode": "generate"})


def test_metrics_of_evaluation_are_copies_or_their_own(make_model):
    accuracy = torchmetrics.classification.MulticlassAccuracy(3)
    shared = HuggingFaceModel(make_model("gpt2"), metrics=[LanguageCrossEntropy()])
    apart = HuggingFaceModel(make_model("gpt2"), metrics=[LanguageCrossEntropy()], eval_metrics=[accuracy])

    train, evaluation = shared.get_metrics(is_train=True), shared.get_metrics(is_train=False)
    assert train.keys() == evaluation.keys() == {"LanguageCrossEntropy"}
    assert train["LanguageCrossEntropy"] is not evaluation["LanguageCrossEntropy"]
    assert apart.get_metrics(is_train=False) == {"MulticlassAccuracy": accuracy}
    assert HuggingFaceModel(make_model("gpt2")).get_metrics() == {}


def test_more_tokens_than_embeddings_are_refused_or_make_them_grow(make_model, tokenizer, caplog):
    tokenizer.add_tokens([f"<{number}>" for number in range(7)])
    beginning = "The number of tokens in the tokenizer is greater than the number of tokens in the model"

    with pytest.raises(ValueError, match=beginning):
        HuggingFaceModel(make_model("gpt2"), tokenizer)
    model = HuggingFaceModel(make_model("gpt2"), tokenizer, allow_embedding_resizing=True)

    assert beginning in caplog.text
    assert model.model.get_input_embeddings().num_embeddings == len(tokenizer)


def test_what_may_be_a_mistake_is_told(make_model, caplog):
    HuggingFaceModel(make_model("gpt2"), shift_labels=False)

    assert "The tokenizer was not provided." in caplog.text
    assert (
        "shift_labels argument was set to False but the model is an instance of a HuggingFace Causal LM" in caplog.text
    )


def test_a_model_is_copied_and_pickled(make_model, batch):
    model = HuggingFaceModel(make_model("gpt2"))

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(batch).logits, model(batch).logits)


def test_blocks_are_what_is_sharded(make_model, architectures):
    expected = {"gpt2": "GPT2Block", "t5": "T5Block", "mixtral": "MixtralDecoderLayer"}
    for name in architectures:
        block = expected.get(name, "BertLayer" if "bert" in name else "LlamaDecoderLayer")
        model = HuggingFaceModel(make_model(name)).model
        found = {type(module).__name__ for module in model.modules() if model.fsdp_wrap_fn(module)}

        assert found == {block}, name


class Words:
    """What of a tokenizer the wrapper and its checkpoints ask for."""

    def __len__(self):
        return 300

    def save_pretrained(self, folder, **_):
        (Path(folder) / "vocab.txt").write_text("a")


def test_a_tokenizer_is_whatever_has_a_length_and_can_be_saved(make_model):
    model = HuggingFaceModel(make_model("bert"), Words())

    assert model.get_metadata()["tokenizer"].keys() == {"vocab.txt"}


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ("gpt2", r"tokenizer='gpt2' must be a tokenizer with len\(\) and save_pretrained"),
        (Path("gpt2"), r"tokenizer=PosixPath\('gpt2'\) .*AutoTokenizer\.from_pretrained"),
        (Words, r"tokenizer=<class .*Words'> .*not a name or a class"),
        (["a", "b"], r"tokenizer=\['a', 'b'\] must be a tokenizer"),
        (300, "tokenizer=300 must be a tokenizer"),
    ],
    ids=str,
)
def test_what_no_checkpoint_could_keep_is_refused_as_a_tokenizer(make_model, tokenizer, said):
    with pytest.raises(TypeError, match=said):
        HuggingFaceModel(make_model("bert"), tokenizer)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (torch.nn.Linear(2, 3), r"model=Linear\(.*out_features=3.*with a `config`.*ComposerModel\.from_module"),
        ("gpt2", r"model='gpt2' .*not a name or a class.*AutoModelForCausalLM\.from_pretrained"),
        (BertForPreTraining, r"model=<class .*BertForPreTraining'> .*not a name or a class"),
        (None, "model=None must be a module.*PreTrainedModel"),
    ],
    ids=["module", "name", "class", "none"],
)
@pytest.mark.parametrize("tokenizer", [None, Words()], ids=["alone", "with tokenizer"])
def test_what_is_no_model_of_transformers_is_refused(model, tokenizer, said):
    with pytest.raises(TypeError, match=said):
        HuggingFaceModel(model, tokenizer)


def test_a_long_model_is_not_written_out():
    with pytest.raises(TypeError) as error:
        HuggingFaceModel(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(100))))

    assert len(str(error.value)) < 700


def test_a_module_with_the_configuration_of_transformers_is_taken(make_model, batch):
    class Around(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, input_ids, labels=None):
            return self.inner(input_ids=input_ids, labels=labels)

    assert HuggingFaceModel(Around(make_model("gpt2")))(batch).logits.shape == (3, 9, 300)


def test_logging_is_left_to_the_user():
    assert not logging.getLogger("composer_hf").handlers
