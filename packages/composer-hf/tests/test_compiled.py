"""Models that the user has compiled before they are wrapped."""

import copy
import pickle

import pytest
import torch

from composer_hf import HuggingFaceModel
from composer_hf import write_huggingface_pretrained_from_composer_checkpoint as write_folder

# Where a model of transformers logs, PyTorch 2.11 cuts the graph, and looks at the `grad` of what it carries over.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class CountedBackend:
    """Runs what it compiles as it is, and counts the graphs and their calls."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def call(*arguments):
            self.calls += 1
            return graph(*arguments)

        return call


@pytest.fixture
def backend():
    torch.compiler.reset()
    yield CountedBackend()
    torch.compiler.reset()


def test_a_compiled_model_trains_as_the_one_that_is_written_and_runs_compiled(make_model, batch, backend):
    plain = HuggingFaceModel(make_model("llama"))
    model = HuggingFaceModel(torch.compile(copy.deepcopy(plain.model), backend=backend))
    ran = []

    for trained in (plain, model):
        trained.train()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained.loss(trained({**batch, "of_no_argument": 1}), batch).backward()
        optimizer.step()
        ran.append(backend.calls)

    assert ran[0] == 0 < ran[1]
    assert model.model_forward_args == plain.model_forward_args
    assert model.shift_labels
    for (name, weight), (other_name, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(weight, other)  # what backends reorder is none of ours


def test_a_compiled_model_becomes_the_folder_that_the_plain_one_becomes(make_model, batch, save, tmp_path, backend):
    plain = make_model("gpt2")
    model = HuggingFaceModel(torch.compile(plain, backend=backend))
    logits = model(batch).logits

    folder = write_folder(save(model), tmp_path / "out")
    loaded = type(plain).from_pretrained(folder)

    assert list(model.state_dict()) == [f"model.{name}" for name in plain.state_dict()]
    torch.testing.assert_close(loaded.eval()(**batch).logits, logits)


def test_a_compiled_model_is_evaluated(make_model, batch, backend):
    plain = HuggingFaceModel(make_model("gpt2"), use_logits=True)
    model = HuggingFaceModel(torch.compile(plain.model, backend=backend), use_logits=True)

    torch.testing.assert_close(model.eval_forward(batch), plain.eval_forward(batch))
    assert torch.equal(model.labels[:, :-1], batch["labels"][:, 1:])


def test_generation_compiles_no_graph_for_each_length(make_model, batch, tokenizer, backend):
    plain = make_model("gpt2")
    expected = HuggingFaceModel(plain, tokenizer).generate(batch["input_ids"], max_new_tokens=5, do_sample=False)
    model = HuggingFaceModel(torch.compile(plain, backend=backend), tokenizer)
    model(batch)
    graphs = backend.graphs

    generated = model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False)
    model(batch)

    assert torch.equal(generated, expected)
    assert backend.graphs == graphs > 0
    assert backend.calls == 2 * graphs


def test_a_copy_of_a_compiled_model_is_not_compiled(make_model, batch, backend):
    model = HuggingFaceModel(torch.compile(make_model("gpt2"), backend=backend))

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        logits = other(batch).logits
        assert backend.calls == 0
        assert torch.equal(other(batch).logits, logits)


def test_a_model_that_is_compiled_in_place_generates_as_its_user_has_compiled_it(make_model, batch, backend):
    plain = make_model("gpt2")
    plain.compile(backend=backend)

    HuggingFaceModel(plain).generate(batch["input_ids"], max_new_tokens=2, pad_token_id=0)

    assert backend.calls > 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("is_adapted_before", [True, False])
def test_an_adapter_is_compiled_with_the_model(is_adapted_before, make_model, batch, save, tmp_path, backend):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    plain = HuggingFaceModel(copy.deepcopy(base := make_model("gpt2")), peft_config=config)
    given = peft.get_peft_model(base, config) if is_adapted_before else base

    model = HuggingFaceModel(
        torch.compile(given, backend=backend), peft_config=None if is_adapted_before else config
    ).eval()
    logits = model(batch).logits

    assert backend.calls > 0
    assert model.using_peft
    assert list(model.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(logits, plain.eval()(batch).logits)
    assert (write_folder(save(model), tmp_path / "out") / "adapter_config.json").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_around_a_compiled_model_is_refused(make_model, backend):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(torch.compile(make_model("gpt2"), backend=backend), config)

    with pytest.raises(ValueError, match=r"OptimizedModule, which torch\.compile .*compile_config=\{\}"):
        HuggingFaceModel(adapted)
