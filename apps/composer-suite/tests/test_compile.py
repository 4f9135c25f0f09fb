"""Compiled models train as they do uncompiled, under the names that they have."""

import copy
import logging

import pytest
import torch
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms import AttentionWindowWarmup, SeqLengthWarmup
from composer.loggers import InMemoryLogger
from composer.models import ComposerGPT
from composer.trainer import _strategies
from composer.trainer._regions import find_regions
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_dist.wrapping import canonical_name
from composer_models import GPTBlock

BACKEND = "eager"  # what dynamo makes of the model is run as it is: no compiler of the machine's is needed


@pytest.fixture(autouse=True)
def _dynamo_forgets():
    yield
    torch.compiler.reset()


def count_calls(calls):
    def backend(graph, inputs):
        def run(*arguments):
            calls.append(len(arguments))
            return graph(*arguments)

        return run

    return backend


def train(make_trainer, **settings):
    trainer = make_trainer(max_duration="4ba", **settings)
    trainer.fit()
    return trainer


@pytest.fixture
def weights(make_trainer):
    return {name: value.clone() for name, value in train(make_trainer).state.model.state_dict().items()}


@pytest.mark.parametrize("config", [{"backend": BACKEND}, {"backend": "aot_eager", "dynamic": False}], ids=str)
def test_compiled_training_gives_the_same_weights_under_the_same_names(make_trainer, weights, config):
    trainer = train(make_trainer, compile_config=config)
    found = trainer.state.model.state_dict()
    assert list(found) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value)


def test_hooks_of_a_model_run_though_another_model_of_its_class_was_compiled_before(make_trainer, make_model):
    """Compiled code was shared, and hooks of methods such as QKNorm did not run."""

    def train_with_hooks(**settings):
        model = make_model()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda module, inputs, outputs: outputs.tanh() / 10)
        return train(make_trainer, model=model, **settings).state.model.state_dict()

    expected = train_with_hooks()
    train(make_trainer, compile_config={"backend": BACKEND})
    for name, value in train_with_hooks(compile_config={"backend": BACKEND}).items():
        torch.testing.assert_close(value, expected[name])


def test_the_model_runs_compiled(make_trainer):
    calls = []
    trainer = train(make_trainer, compile_config={"backend": count_calls(calls)})
    assert len(calls) == 4
    trainer.eval(trainer.state.train_dataloader)
    trainer.predict(trainer.state.train_dataloader)
    assert len(calls) > 4


def test_a_model_that_is_compiled_already_is_taken_as_it_is(make_trainer, make_model, weights, caplog):
    calls = []
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=count_calls(calls))
    with caplog.at_level(logging.WARNING, "composer"):
        trainer = train(make_trainer, model=compiled, optimizers=optimizer, compile_config={"backend": "inductor"})
    assert "`model` is already compiled with `torch.compile`" in caplog.text
    assert trainer.state.model is model
    assert len(calls) == 4
    for name, value in trainer.state.model.state_dict().items():
        torch.testing.assert_close(value, weights[name])


def test_a_checkpoint_of_a_compiled_model_loads_into_one_that_is_not(make_trainer, tmp_path):
    compiled = train(make_trainer, compile_config={"backend": BACKEND})
    path = compiled.save_checkpoint(str(tmp_path / "model.pt"))
    plain = make_trainer(load_path=path)
    for name, value in compiled.state.model.state_dict().items():
        assert torch.equal(plain.state.model.state_dict()[name], value)


def test_a_copy_of_a_compiled_model_is_not_compiled(make_trainer):
    calls = []
    trainer = train(make_trainer, compile_config={"backend": count_calls(calls)})
    calls.clear()
    copy.deepcopy(trainer.state.model)(next(iter(trainer.state.train_dataloader)))
    assert calls == []


def test_hyperparameters_say_whether_the_model_is_compiled(make_trainer):
    assert make_trainer(auto_log_hparams=True).local_hparams["is_model_compiled"] is False
    compiled = make_trainer(auto_log_hparams=True, compile_config={"backend": BACKEND})
    assert compiled.local_hparams["is_model_compiled"] is True
    assert compiled.local_hparams["compile_config"] == {"backend": BACKEND}


def test_a_compiled_model_of_another_kind_is_refused(make_trainer):
    with pytest.raises(ValueError, match="Provided model must be a subclass of ComposerModel"):
        make_trainer(model=torch.compile(torch.nn.Linear(2, 2), backend=BACKEND))


@pytest.mark.parametrize(
    ("config", "said"),
    [("fast", "compile_config='fast' .*must be a mapping"), ({"modus": "fast"}, "compile_config=.*argument 'modus'")],
)
def test_settings_that_torch_compile_does_not_know(make_trainer, config, said):
    with pytest.raises(TypeError, match=said):
        make_trainer(compile_config=config)


@pytest.mark.parametrize(
    ("config", "overwrites"),
    [
        ({}, False),
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "cudagraphs"}, True),
        ({"backend": BACKEND}, False),
    ],
)
def test_gradients_in_a_cuda_graph_are_copied_before_the_next_replay(
    make_trainer, make_model, monkeypatch, config, overwrites
):
    """The second microbatch overwrote the gradients of the first."""
    assert _strategies.uses_cuda_graphs(config, make_model()) == overwrites
    assert _strategies.uses_cuda_graphs(None, torch.compile(make_model(), **config)) == overwrites
    in_part, in_place = make_model(), make_model()
    in_part.module = torch.compile(in_part.module, **config)
    in_place.module.compile(**config)
    assert _strategies.uses_cuda_graphs(None, in_part) == _strategies.uses_cuda_graphs(None, in_place) == overwrites
    assert not _strategies.uses_cuda_graphs(None, make_model())

    monkeypatch.setattr(_strategies, "uses_cuda_graphs", lambda config, model: overwrites)
    model, places = make_model(), []
    weight = next(model.parameters())
    weight.register_post_accumulate_grad_hook(lambda weight: places.append(weight.grad.data_ptr()))
    make_trainer(model=model, device_train_microbatch_size=1, max_duration="1ba").fit()
    assert (places[0] != places[1]) == overwrites
    assert places[1] == places[2] == places[3], "copied more than once"


SIZES = {"d_model": 8, "n_heads": 2, "vocab_size": 32, "max_seq_len": 16}


def train_gpt(n_layers=2, length=16, algorithms=(), **settings):
    torch.manual_seed(0)
    model = ComposerGPT({**SIZES, "n_layers": n_layers, "init_std": 0.2})
    tokens = torch.randint(32, (8, length), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": one, "labels": one} for one in tokens]
    trainer = Trainer(
        model,
        train_dataloader=DataLoader(samples, batch_size=2, sampler=dist.get_sampler(samples)),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ep",
        algorithms=algorithms,
        progress_bar=False,
        **settings,
    )
    trainer.fit()
    return trainer


def graphs_of(graphs):
    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return backend


# PyTorch reads `.grad` of the inputs of a region.
OF_DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@OF_DYNAMO
@pytest.mark.parametrize("regions", [{}, {"regions": "auto"}, {"regions": [GPTBlock]}], ids=str)
def test_blocks_of_one_class_share_a_graph_at_any_depth(regions):
    for n_layers in (2, 5):
        graphs = []
        trainer = train_gpt(n_layers, compile_config={**regions, "backend": graphs_of(graphs)})
        assert len(graphs) == 1  # for all blocks and all batches
        expected = train_gpt(n_layers).state.model.state_dict()
        assert list(trainer.state.model.state_dict()) == list(expected)
        torch.testing.assert_close(trainer.state.model.state_dict(), expected)
        torch.compiler.reset()


@OF_DYNAMO
def test_recompilations_are_counted_and_logged_with_their_cause(caplog):
    caplog.set_level(logging.WARNING, "composer.trainer.trainer")
    logged = InMemoryLogger()
    warmup = SeqLengthWarmup(duration=1.0, min_seq_length=4, max_seq_length=16, step_size=4)
    config = {"regions": "auto", "backend": BACKEND}
    train_gpt(algorithms=warmup, compile_config=config, loggers=logged)
    (message,) = [record.getMessage() for record in caplog.records if "Recompilations" in record.getMessage()]
    assert "size mismatch" in message
    assert "'input_ids': (2, 4)" in message
    assert "SeqLengthWarmup" in message
    assert logged.get_timeseries("compile/recompilations")["compile/recompilations"].tolist() == [1]


@OF_DYNAMO
def test_recompilations_by_the_window_of_attention_name_it(caplog):
    caplog.set_level(logging.WARNING, "composer.trainer.trainer")
    warmup = AttentionWindowWarmup("1dur", initial_window=4, final_window=16, num_windows=2)
    train_gpt(algorithms=warmup, compile_config={"backend": BACKEND, "regions": False})
    assert "Algorithms that may change batches or the model: AttentionWindowWarmup." in caplog.text


@pytest.mark.parametrize(
    ("regions", "message"),
    [("blocks", "must be 'auto'"), ([torch.nn.Conv2d], r"no module of class Conv2d\. It has .*GPTBlock")],
)
def test_regions_that_are_not_in_the_model_are_refused(regions, message):
    with pytest.raises(ValueError, match=message):
        train_gpt(compile_config={"regions": regions, "backend": BACKEND})


def test_without_repeated_blocks_the_whole_model_is_compiled(make_trainer):
    graphs = []
    train(make_trainer, compile_config={"backend": graphs_of(graphs)})
    assert graphs


def blocks_of(*widths):
    return torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 8)) for width in widths]
    )


def test_blocks_are_regions_if_their_class_always_has_the_same_parameters():
    alike, other = blocks_of(4, 4, 4), blocks_of(4, 6, 4)
    assert find_regions(torch.nn.ModuleDict({"a": alike}), "auto") == list(alike)
    assert find_regions(torch.nn.ModuleDict({"a": alike, "b": other}), "auto") == []  # each size would be a graph
    frozen = copy.deepcopy(alike)
    frozen[0].requires_grad_(False)
    assert find_regions(torch.nn.ModuleDict({"a": frozen}), "auto") == []


def gpt_on_ranks():
    settings = {"compile_config": {"regions": "auto", "backend": BACKEND}, "parallelism_config": {"fsdp": {}}}
    sharded = train_gpt(**settings).state.model
    whole = {canonical_name(name): each.full_tensor() for name, each in sharded.named_parameters()}
    return whole, dict(train_gpt().state.model.module.named_parameters())


def test_sharded_and_compiled_blocks_train_as_others_under_ddp(tmp_path):
    for actual, expected in run_ranks(gpt_on_ranks, store=tmp_path / "store"):
        torch.testing.assert_close(actual, expected)
