"""A checkpoint goes into a model with another head, without what optimizers and averages had of the old one."""

import copy
import logging
import os

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import EMA, SAM, SWA
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW
from composer_dist import dist
from composer_dist.testing import run_ranks

CLASSES, SAVED_AT = 3, 2
HEAD = ("module.2.weight", "module.2.bias")
OPTIMIZERS = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "DecoupledAdamW": lambda parameters: DecoupledAdamW(parameters, lr=0.1),
}


def delete_head(content):
    for name in HEAD:
        del content["state"]["model"][name]


def make_trainer(num_outputs, optimizer="Adam", algorithms=None, **settings):
    torch.set_num_threads(1)
    torch.manual_seed(num_outputs)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, num_outputs))
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % CLASSES)
    loader = DataLoader(data, 4 // dist.get_world_size(), sampler=dist.get_sampler(data))
    return Trainer(
        model=ComposerClassifier(network, num_classes=num_outputs),
        train_dataloader=loader,
        max_duration="2ep",
        optimizers=OPTIMIZERS[optimizer](network.parameters()),
        algorithms=algorithms,
        device="cpu",
        progress_bar=False,
        seed=5,
        **settings,
    )


def train_and_save(folder, **settings):
    name = "ba{batch}-{rank}.pt" if settings.pop("is_local", False) else "ba{batch}.pt"
    with make_trainer(CLASSES, save_folder=folder, save_filename=name, save_interval="1ba", **settings) as trainer:
        trainer.fit(duration=f"{SAVED_AT}ba")
        return optimizer_state(trainer)


def optimizer_state(trainer):
    """Return each parameter's state by name, whole tensors."""
    state = trainer.state
    if state.deepspeed_enabled:
        saved = trainer.strategy.optimizer_state_dict(state.model, state.optimizers[0])["state"]
        found = {name: saved.get(i, {}) for i, (name, _) in enumerate(state.model.module.named_parameters())}
    else:
        named = {parameter: name for name, parameter in state.model.named_parameters()}
        found = {name: state.optimizers[0].state.get(parameter, {}) for parameter, name in named.items()}
    return {
        name.removeprefix("module.") if name.startswith("module.module.") else name: {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in values.items()
            if value is not None
        }
        for name, values in found.items()
    }


MAKE = {"EMA": lambda: EMA(half_life="1ba"), "SWA": lambda: SWA("0.0dur", "0.9dur", "1ba"), "SAM": SAM, "alone": list}
ALL = ["state/model/module.2.*"]


@pytest.mark.parametrize(
    ("optimizer", "algorithm", "ignore_keys", "left_out"),
    [
        *(pytest.param(optimizer, "alone", ALL, HEAD, id=optimizer) for optimizer in OPTIMIZERS),
        *(pytest.param("Adam", algorithm, ALL, HEAD, id=algorithm) for algorithm in ("EMA", "SWA", "SAM")),
        pytest.param("Adam", "EMA", ["state/model/module.2.weight"], HEAD[:1], id="one weight"),
        pytest.param("Adam", "EMA", delete_head, HEAD, id="a function"),
    ],
)
def test_the_state_of_weights_that_are_left_out_is_left_out(
    tmp_path, caplog, optimizer, algorithm, ignore_keys, left_out
):
    """The first step failed on the old head's state, "The size of tensor a (3) must match b (5)", or took it in."""
    saved = train_and_save(str(tmp_path), optimizer=optimizer, algorithms=MAKE[algorithm]())
    for num_outputs in (CLASSES, CLASSES + 2) if left_out == HEAD else (CLASSES,):
        caplog.clear()
        with make_trainer(
            num_outputs,
            optimizer,
            MAKE[algorithm](),
            load_path=str(tmp_path / f"ba{SAVED_AT}.pt"),
            load_ignore_keys=ignore_keys,
        ) as trainer:
            loaded = optimizer_state(trainer)
            assert [name for name, values in loaded.items() if not values] == sorted(left_out, key=HEAD.index)
            for name in loaded.keys() - {*left_out}:
                for key, value in loaded[name].items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved[name][key])), (name, key)
            (told,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "keep of them" in text]
            assert all(name.removeprefix("module.") in told for name in left_out)
            if algorithm == "EMA":
                average = trainer.state.algorithms[0].ema_model.named_parameters_dict
                weights = dict(trainer.state.model.named_parameters())
                assert all(torch.equal(average[name], weights[name]) for name in left_out)
            trainer.fit()


KINDS = {
    "ddp": {},
    "full": {"parallelism_config": {"fsdp": {"state_dict_type": "full"}}},
    "rank 0 reads": {
        "parallelism_config": {
            "fsdp": {"state_dict_type": "full", "load_monolith_rank0_only": True, "sync_module_states": True}
        }
    },
    "sharded": {"parallelism_config": {"fsdp": {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "ba{batch}"}}},
    "local": {"parallelism_config": {"fsdp": {"state_dict_type": "local"}}},
    "deepspeed 0": {"deepspeed_config": {"zero_optimization": {"stage": 0}}},
    "deepspeed 2": {"deepspeed_config": {"zero_optimization": {"stage": 2}}},
}


def load_into_another_head(kind, folder):
    """Return what the optimizer had of each weight when it was saved, loaded, and one batch later, for two heads."""
    is_local = kind == "local"
    saved = train_and_save(folder, is_local=is_local, **KINDS[kind])
    dist.barrier()
    name = {"sharded": f"ba{SAVED_AT}", "local": f"ba{SAVED_AT}-{{rank}}.pt"}.get(kind, f"ba{SAVED_AT}.pt")
    found = []
    for num_outputs in (CLASSES, CLASSES + 2):
        with make_trainer(
            num_outputs,
            load_path=os.path.join(folder, name),
            load_ignore_keys=["state/model/module.2.*"],
            load_strict_model_weights=False,
            **KINDS[kind],
        ) as trainer:
            loaded = copy.deepcopy(optimizer_state(trainer))
            trainer.fit(duration="1ba")
            found.append((loaded, optimizer_state(trainer)))
    return saved, found


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_weights_that_are_left_out_is_left_out_on_every_rank(tmp_path, kind):
    """Torch's own loading of sharded optimizers refused a checkpoint without the state of a weight."""
    if kind.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    arguments = (kind, str(tmp_path / "run"))
    for saved, found in run_ranks(load_into_another_head, *arguments, store=tmp_path / "store", timeout_s=300):
        for loaded, trained in found:
            for name in loaded.keys() - {*HEAD}:
                assert torch.equal(loaded[name]["exp_avg"], saved[name]["exp_avg"]), name
                assert int(trained[name]["step"]) == SAVED_AT + 1
            for name in HEAD:
                # ZeRO has one tensor of each kind for all weights, and one count.
                assert not loaded[name] or (kind == "deepspeed 2" and not loaded[name]["exp_avg"].any())
                assert int(trained[name]["step"]) == (SAVED_AT + 1 if kind == "deepspeed 2" else 1)
