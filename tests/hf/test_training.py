"""The Trainer with Hugging Face models, in one process."""

import json
import os

import pytest
import torch
import transformers

from composer import Callback, Trainer
from composer.callbacks import HuggingFaceCheckpointer
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint
from composer_models import LanguageCrossEntropy, MaskedAccuracy

VOCABULARY, LENGTH = 64, 8
_LAYERS = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def loader():
    return torch.utils.data.DataLoader(Tokens(), batch_size=4)


def make_model(kind="gpt2", **options):
    torch.manual_seed(5)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **_LAYERS))
    else:
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config)
    metrics = [LanguageCrossEntropy(), MaskedAccuracy()]
    return HuggingFaceModel(model, use_logits=True, metrics=metrics, **options)


def make_trainer(model, **options):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    defaults = {"train_dataloader": loader(), "max_duration": "4ba", "progress_bar": False, "seed": 3}
    return Trainer(model=model, optimizers=optimizer, **{**defaults, **options})


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_a_model_is_trained_evaluated_and_asked(kind):
    model = make_model(kind)
    before = model.model.get_input_embeddings().weight.detach().clone()
    trainer = make_trainer(model, eval_dataloader=loader(), device_train_microbatch_size=2)

    trainer.fit()
    predictions = trainer.predict(loader(), subset_num_batches=1)

    assert not torch.equal(model.model.get_input_embeddings().weight, before)
    assert trainer.state.eval_metric_values["LanguageCrossEntropy"] > 0
    assert trainer.state.train_metric_values["LanguageCrossEntropy"] > 0
    assert predictions[0]["logits"].shape == (4, LENGTH, VOCABULARY)
    trainer.close()


def test_the_evaluated_loss_is_the_one_of_the_model():
    model = make_model("gpt2")
    trainer = make_trainer(model)

    trainer.eval(eval_dataloader=loader())

    model.eval()
    with torch.no_grad():
        losses = [model.model(**batch).loss for batch in loader()]
    torch.testing.assert_close(trainer.state.eval_metric_values["LanguageCrossEntropy"], torch.stack(losses).mean())
    trainer.close()


def test_a_checkpoint_goes_on_and_becomes_a_folder(tmp_path):
    whole = make_trainer(make_model(), max_duration="4ba")
    whole.fit()
    first = make_trainer(make_model(), max_duration="2ba", save_folder=str(tmp_path), save_interval="1ba")
    first.fit()
    first.close()
    again = make_trainer(make_model(), max_duration="4ba", load_path=str(tmp_path / "latest-rank0.pt"))
    again.fit()

    for name, weight in whole.state.model.state_dict().items():
        assert torch.equal(weight, again.state.model.state_dict()[name]), name
    path = again.save_checkpoint(str(tmp_path / "last.pt"))
    folder = write_huggingface_pretrained_from_composer_checkpoint(path, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in again.state.model.model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    whole.close()
    again.close()


# Where a model of transformers logs, PyTorch 2.11 cuts the graph, and looks at the `grad` of what it carries over.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("compile_config", [None, {"backend": "eager"}], ids=["alone", "within compile_config"])
def test_a_compiled_model_has_the_checkpoints_of_the_plain_one_and_goes_on_from_them(compile_config, tmp_path):
    torch.compiler.reset()
    whole = make_trainer(make_model("bert"), max_duration="4ba", eval_dataloader=loader())
    whole.fit()
    first = make_trainer(make_model("bert"), max_duration="2ba", save_folder=str(tmp_path), save_interval="1ba")
    first.fit()
    model = HuggingFaceModel(
        torch.compile(make_model("bert").model, backend="eager"), use_logits=True, metrics=[LanguageCrossEntropy()]
    )
    again = make_trainer(
        model,
        max_duration="4ba",
        load_path=str(tmp_path / "latest-rank0.pt"),
        compile_config=compile_config,
        eval_dataloader=loader(),
    )

    again.fit()

    for name, weight in whole.state.model.state_dict().items():
        torch.testing.assert_close(again.state.model.state_dict()[name], weight)
    torch.testing.assert_close(
        again.state.eval_metric_values["LanguageCrossEntropy"], whole.state.eval_metric_values["LanguageCrossEntropy"]
    )
    path = again.save_checkpoint(str(tmp_path / "last.pt"))
    folder = write_huggingface_pretrained_from_composer_checkpoint(path, tmp_path / "out")
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    assert torch.equal(loaded.get_input_embeddings().weight, model.model.get_input_embeddings().weight)
    for trainer in (whole, first, again):
        trainer.close()
    torch.compiler.reset()


def test_folders_are_written_while_training_goes_on(tmp_path):
    checkpointer = HuggingFaceCheckpointer(str(tmp_path), save_interval="1ba", precision="bfloat16")
    model = make_model()
    seen = {}

    class Watch(Callback):
        def batch_end(self, state, logger):
            seen[int(state.timestamp.batch)] = model.model.transformer.wte.weight.detach().clone()

    trainer = make_trainer(model, callbacks=[checkpointer, Watch()], max_duration="3ba")
    trainer.fit()
    trainer.close()

    folder = tmp_path / "huggingface"
    assert sorted(os.listdir(folder)) == ["ba1", "ba2", "ba3"]
    for batch, weight in seen.items():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / f"ba{batch}", dtype=torch.bfloat16)
        assert torch.equal(loaded.transformer.wte.weight, weight.to(torch.bfloat16))
        assert torch.equal(loaded.lm_head.weight, weight.to(torch.bfloat16))


def test_writing_folders_changes_nothing_of_the_training(tmp_path):
    weights = []
    for callbacks in ([], [HuggingFaceCheckpointer(str(tmp_path), save_interval="1ba")]):
        trainer = make_trainer(make_model(), callbacks=callbacks)
        trainer.fit()
        trainer.close()
        weights.append(trainer.state.model.state_dict())

    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_what_cannot_be_written_is_raised_by_the_end_of_fit(tmp_path):
    (tmp_path / "huggingface").write_text("in the way")
    trainer = make_trainer(make_model(), callbacks=HuggingFaceCheckpointer(str(tmp_path), save_interval="4ba"))

    with pytest.raises(OSError, match="huggingface"):
        trainer.fit()
    trainer.close()


def test_a_folder_that_exists_is_left_alone_without_overwrite(tmp_path):
    (tmp_path / "huggingface" / "ba2").mkdir(parents=True)
    (tmp_path / "huggingface" / "ba2" / "notes.txt").write_text("mine")
    checkpointer = HuggingFaceCheckpointer(str(tmp_path), save_interval="1ba", overwrite=False)
    trainer = make_trainer(make_model(), callbacks=checkpointer)

    with pytest.raises(FileExistsError, match=r"ba2 exists, and overwrite=False. Choose another save_folder"):
        trainer.fit()
    trainer.close()
    assert os.listdir(tmp_path / "huggingface" / "ba2") == ["notes.txt"]
    assert (tmp_path / "huggingface" / "ba1" / "config.json").is_file()


# peft 0.21 asks models of transformers 5 by an older name of the property.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_trained_and_saved_alone(tmp_path):
    peft = pytest.importorskip("peft")
    model = make_model(
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    )
    checkpointer = HuggingFaceCheckpointer(str(tmp_path), save_interval="1dur")
    trainer = make_trainer(model, callbacks=checkpointer)
    trainer.fit()
    trainer.close()

    base = make_model().model
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "huggingface" / "ba4")
    batch = next(iter(loader()))
    model.eval()
    adapted.eval()
    with torch.no_grad():
        assert torch.equal(adapted(**batch).logits, model(batch).logits)


def test_another_model_is_refused_at_once(tmp_path):
    from composer.models import ComposerClassifier

    plain = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.raises(ValueError, match="`HuggingFaceCheckpointer` is only compatible with"):
        make_trainer(
            plain,
            train_dataloader=None,
            max_duration=None,
            callbacks=HuggingFaceCheckpointer(str(tmp_path), save_interval="1ep"),
        )


def test_folders_go_to_a_store():
    fsspec = pytest.importorskip("fsspec")
    checkpointer = HuggingFaceCheckpointer("memory://hub/run", save_interval="4ba")
    trainer = make_trainer(make_model(), callbacks=checkpointer)
    trainer.fit()
    trainer.close()

    found = fsspec.filesystem("memory").ls("/hub/run/huggingface/ba4", detail=False)
    assert {os.path.basename(path) for path in found} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_the_modular_checkpoint_describes_the_model(tmp_path):
    from composer.checkpoint import load_checkpoint, save_checkpoint_to_disk
    from composer_checkpoint.modular import CheckpointLoadOptions

    trainer = make_trainer(make_model())
    trainer.fit()
    folder = save_checkpoint_to_disk(str(tmp_path / "modular"), trainer.state)

    metadata = json.loads(next((tmp_path / "modular").rglob("composer_metadata.json")).read_text())
    assert metadata["huggingface"]["model"]["config"]["content"]["model_type"] == "gpt2"
    fresh = make_model()
    load_checkpoint(folder, CheckpointLoadOptions(load_optimizer=False, load_resumption_state=False), fresh)
    assert all(torch.equal(v, fresh.state_dict()[k]) for k, v in trainer.state.model.state_dict().items())
    trainer.close()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch.export.load of torch 2.11
def test_a_model_is_exported_for_inference(tmp_path):
    from composer.utils import export_for_inference

    model = make_model("bert")
    batch = {name: value for name, value in next(iter(loader())).items() if name != "labels"}
    export_for_inference(model, save_format="export", save_path=str(tmp_path / "model.pt2"), sample_input=(batch, {}))

    exported = torch.export.load(str(tmp_path / "model.pt2")).module()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(exported(batch)["logits"], model(batch).logits)


def test_a_misspelt_placeholder_of_the_folders_is_told():
    with pytest.warns(UserWarning, match=r"save_folder='\{run_nme\}' .* Did you mean \{run_name\}\?"):
        HuggingFaceCheckpointer("{run_nme}", "1ep")


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
@pytest.mark.parametrize("compile_config", [None, {"backend": "eager"}], ids=["as it is", "compiled"])
@pytest.mark.parametrize("setting", [True, "selective"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_blocks_that_are_computed_again_train_to_the_same_weights(kind, compile_config, setting):
    trained = []
    for activation_checkpointing in (False, setting):
        model = make_model(kind)
        for module in model.modules():  # the backend for debugging computes again with other random numbers
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        trainer = make_trainer(
            model, max_duration="2ba", activation_checkpointing=activation_checkpointing, compile_config=compile_config
        )
        trainer.fit()
        trainer.close()
        trained.append(model.state_dict())
    plain, again = trained
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
