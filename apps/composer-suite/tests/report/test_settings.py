"""What a run's settings are on the page, where runs of a sweep are to be told apart by them."""

import math
import subprocess
from types import SimpleNamespace

import numpy
import pytest
import torch

from composer import Trainer
from composer.algorithms import EMA, SWA, LabelSmoothing, LowPrecisionLayerNorm, MixUp
from composer.callbacks import LRMonitor
from composer.core import Algorithm, Evaluator, Time
from composer.models import ComposerModel
from composer.optim import ConstantScheduler, LinearScheduler, Schedule
from composer.report import RunRecorder, read_run
from composer.report._settings import fit_settings, script_facts, typed_settings
from composer.report.runs import describe_runs
from composer_dist import get_global_rank
from composer_dist.testing import run_ranks


def train(folder, run_name, *, lr=0.1, alpha=0.2, half_life="10ba", batch_size=4, max_duration="1ep", **more):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
    model = more.pop("model", None) or ComposerModel.from_module(
        torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy
    )
    settings = {
        "train_dataloader": torch.utils.data.DataLoader(data, batch_size=batch_size),
        "max_duration": max_duration,
        "optimizers": torch.optim.Adam(model.parameters(), lr=lr),
        "algorithms": [MixUp(alpha), EMA(half_life)],
        "device": "cpu",
        "progress_bar": False,
        "loggers": RunRecorder(f"{folder}/{{run_name}}", page=False),
        "run_name": run_name,
    }
    with Trainer(model, **settings | more) as trainer:
        trainer.fit()


def typed(*, optimizers=(), algorithms=()):
    return typed_settings(SimpleNamespace(optimizers=optimizers, algorithms=algorithms))


def weights(count=1):
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


@pytest.mark.parametrize("auto_log_hparams", [False, True])
def test_runs_of_a_sweep_differ_on_the_page_by_what_was_swept(tmp_path, auto_log_hparams):
    train(tmp_path, "one", auto_log_hparams=auto_log_hparams)
    other = {"lr": 0.01, "alpha": 0.5, "half_life": "20ba", "batch_size": 2, "max_duration": "3ba"}
    train(tmp_path, "two", **other, auto_log_hparams=auto_log_hparams)
    one, two = (run["config"] for run in describe_runs([tmp_path / "one", tmp_path / "two"])["runs"])
    differing = {name: (one[name], two[name]) for name in one if one[name] != two.get(name)}
    wanted = {
        "optimizer/lr": ("0.1", "0.01"),
        "algorithms/MixUp/alpha": ("0.2", "0.5"),
        "algorithms/EMA/half_life": ("10ba", "20ba"),
        "train_dataloader/batch_size": ("4", "2"),
        "max_duration": ("1ep", "3ba"),
    }
    assert {name: differing.get(name) for name in wanted} == wanted
    assert (one["optimizer"], one["optimizer/betas"], one["precision"]) == ("Adam", "[0.9, 0.999]", "fp32")
    assert "algorithms/MixUp/mixing" not in one  # what is drawn for a batch is no setting


def test_the_record_says_what_was_trained_on_what_and_how(tmp_path):
    frozen = torch.nn.Linear(3, 2)
    frozen.bias.requires_grad = False
    model = ComposerModel.from_module(frozen, torch.nn.functional.cross_entropy)
    data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
    train(
        tmp_path,
        "run",
        model=model,
        optimizers=torch.optim.SGD([frozen.weight], lr=0.1),
        schedulers=[LinearScheduler(alpha_f=0.5), ConstantScheduler(), Schedule("MixUp.alpha", ConstantScheduler(0.5))],
        eval_dataloader=Evaluator(label="held_out", dataloader=torch.utils.data.DataLoader(data, batch_size=8)),
        callbacks=[LRMonitor()],
    )
    config = read_run(tmp_path / "run").config
    assert {name: config.get(name) for name in WANTED} == WANTED


WANTED = {
    "model/module": "Linear",
    "model/num_parameters": 8,
    "model/num_trainable_parameters": 6,
    "train_dataloader/dataset": "TensorDataset",
    "train_dataloader/num_samples": 8,
    "train_dataloader/num_batches": 2,
    "train_dataloader/num_workers": 0,
    "evaluators/held_out/batch_size": 8,
    "evaluators/held_out/num_samples": 8,
    "scheduler": "LinearScheduler",
    "scheduler/alpha_f": 0.5,
    "scheduler-2": "ConstantScheduler",
    "scheduler-3": "Schedule",
    "scheduler-3/target": "MixUp.alpha",
    "scheduler-3/curve": "ConstantScheduler",
    "scheduler-3/curve/alpha": 0.5,
    "algorithms": "MixUp, EMA",
    "callbacks": "LRMonitor",
    "loggers": "RunRecorder",
    "parallelism": "none",
    "parallelism/world_size": 1,
    "precision": "fp32",
}


def train_on_ranks(folder, **more):
    torch.manual_seed(0)
    data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long)) for _ in range(2)]
    train(folder, "run", train_dataloader=data, device_train_microbatch_size=4, algorithms=None, **more)
    return read_run(f"{folder}/run").config if get_global_rank() == 0 else None


def train_sharded(folder):
    model = ComposerModel.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
    sharding = {"fsdp": {"state_dict_type": "sharded"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_on_ranks(folder, model=model, optimizers=optimizer, parallelism_config=sharding)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [(train_on_ranks, {"": "DDP"}), (train_sharded, {"": "FSDP", "/state_dict_type": "sharded"})],
    ids=["ddp", "fsdp"],
)
def test_parallelism_is_recorded_and_the_model_is_counted_whole(tmp_path, body, wanted):
    config, _ = run_ranks(body, str(tmp_path), store=tmp_path / "store")
    wanted |= {"/world_size": 2, "/num_nodes": 1}
    found = {name.removeprefix("parallelism"): value for name, value in config.items() if "parallelism" in name}
    assert found == wanted
    assert config["model/num_parameters"] == 8


def test_a_pytorch_scheduler_is_named(tmp_path):
    weight = weights()
    optimizer = torch.optim.SGD(weight, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    assert fit_settings(SimpleNamespace(schedulers=[scheduler]))["scheduler"] == "CosineAnnealingLR"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return the path of a script in a folder of its own, as the one that is running."""
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text("pass\n")
    monkeypatch.setattr("sys.argv", [str(path), "--lr", "0.1"])
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    return path


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_the_script_is_known(script):
    assert script_facts() == {"script/path": str(script)}
    git(script.parent, "init")
    git(script.parent, "add", "train.py")
    git(script.parent, "commit", "-m", "first")
    commit = {"script/path": str(script), "script/git_commit": git(script.parent, "rev-parse", "HEAD")}
    commit["script/git_branch"] = "main"
    assert script_facts() == commit | {"script/has_uncommitted_changes": False}
    script.write_text("fail\n")
    assert script_facts() == commit | {"script/has_uncommitted_changes": True}


@pytest.mark.parametrize("program", ["#!/bin/sh\nexec sleep 60\n", "#!/bin/sh\nexit 1\n", None])
def test_a_git_that_hangs_fails_or_is_missing_costs_no_run(script, tmp_path, monkeypatch, program):
    tools = tmp_path / "bin"
    tools.mkdir()
    if program is not None:
        (tools / "git").write_text(program)
        (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin" if program else str(tools))
    monkeypatch.setattr("composer.report._settings._GIT_TIMEOUT_S", 0.2)
    assert script_facts() == {"script/path": str(script)}
    train(tmp_path, "run")
    assert read_run(tmp_path / "run").status["status"] == "finished"


def test_what_a_script_logs_itself_stays_as_it_logs_it(tmp_path):
    class LogsItself(Algorithm):
        def match(self, event, state):
            return event.value == "fit_start"

        def apply(self, event, state, logger):
            logger.log_hyperparameters({"optimizer": "my own", "max_duration": "long", "optimizer/lr": "much"})

    train(tmp_path, "run", algorithms=LogsItself())
    config = read_run(tmp_path / "run").config
    assert (config["optimizer"], config["max_duration"], config["optimizer/lr"]) == ("my own", "long", "much")
    assert config["optimizer/eps"] == 1e-8


def test_groups_that_differ_are_shown_by_what_differs():
    first, second = weights(2)
    groups = [{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2, "own": "x"}]
    found = typed(optimizers=[torch.optim.SGD(groups, weight_decay=0.01)])
    assert found["optimizer"] == "SGD"
    assert found["optimizer/weight_decay"] == 0.01
    assert (found["optimizer/group0/lr"], found["optimizer/group1/lr"]) == (0.1, 0.2)
    assert found["optimizer/group1/own"] == "x"
    assert not {"optimizer/lr", "optimizer/group0/own", "optimizer/params"} & found.keys()


def test_several_optimizers_and_algorithms_of_one_class_have_numbers():
    found = typed(
        optimizers=[torch.optim.SGD(weights(), lr=0.1), torch.optim.Adam(weights(), lr=0.2)],
        algorithms=[LabelSmoothing(0.1), LabelSmoothing(0.2)],
    )
    assert (found["optimizer"], found["optimizer-2"]) == ("SGD", "Adam")
    assert (found["optimizer/lr"], found["optimizer-2/lr"]) == (0.1, 0.2)
    assert found["algorithms/LabelSmoothing/smoothing"] == 0.1
    assert found["algorithms/LabelSmoothing-2/smoothing"] == 0.2


def test_names_of_weights_are_no_settings():
    found = typed(optimizers=[torch.optim.SGD(torch.nn.Linear(2, 2).named_parameters(), lr=0.1)])
    assert not [name for name in found if "param" in name]


def test_times_and_members_of_enums_are_text():
    found = typed(algorithms=[SWA("0.5dur", Time(0.75, "dur"), "2ep"), LowPrecisionLayerNorm()])
    assert found["algorithms/SWA/swa_start"] == "0.5dur"
    assert found["algorithms/SWA/swa_end"] == "0.75dur"
    assert found["algorithms/SWA/update_interval"] == "2ep"
    assert found["algorithms/LowPrecisionLayerNorm/apply_at"] == "init"


class Own:
    """An algorithm of the user's, who keeps arguments under other names."""

    count = property(lambda self: 1 / 0)

    def __init__(self, rate, width, *more, **named):
        self.strength, self._width, self._hidden = rate, width, 3


class Raises:
    def __float__(self):
        raise ZeroDivisionError

    __str__ = __repr__ = __eq__ = __iter__ = __bool__ = __float__
    __hash__ = None
    batch_size = property(__float__)


def test_arguments_that_are_kept_under_other_names_are_there_all_the_same():
    found = typed(algorithms=[Own(0.5, 7)])
    assert found == {"algorithms/Own/width": 7, "algorithms/Own/strength": 0.5}


def test_only_plain_values_are_settings_and_none_raises():
    circular = []
    circular.append(circular)
    own = Own(0.5, 7)
    own.__dict__ |= {
        "numpy": numpy.float32(0.5), "integer": numpy.int64(3), "infinite": math.inf, "huge": 10**5000,
        "pair": (1, (2.5, "x")), "array": numpy.ones(3), "odd": Raises(), "odds": (1, Raises()), "circular": circular,
        "long": tuple(range(10_000)), "function": math.sin, "mapping": {"a": 1}, "tensors": [torch.ones(1)],
        "elsewhere": torch.ones((), device="meta"), "several": torch.ones(2), "here": torch.tensor(0.25),
        "weight": torch.nn.Parameter(torch.tensor(0.5)), "nothing": None, "flag": True,
    }  # fmt: skip
    found = {name.rpartition("/")[2]: value for name, value in typed(algorithms=[own]).items()}
    assert found == {
        "width": 7, "strength": 0.5, "numpy": 0.5, "integer": 3, "infinite": "inf", "pair": [1, [2.5, "x"]],
        "here": 0.25, "weight": 0.5, "nothing": None, "flag": True,
    }  # fmt: skip
    assert found["flag"] is True
    typed_settings(SimpleNamespace(optimizers=Raises(), algorithms=[Raises(), 3, None]))
    typed_settings(SimpleNamespace(optimizers=[Raises(), SimpleNamespace(param_groups=[3, {4: 5}])], algorithms=None))
    assert typed_settings(SimpleNamespace()) == fit_settings(SimpleNamespace()) == {}
    assert fit_settings(SimpleNamespace(train_dataloader=Raises(), max_duration=Raises(), precision=Raises())) == {}


def test_a_learning_rate_that_is_a_tensor_is_read_on_the_cpu_only():
    on_cpu = torch.optim.Adam(weights(), lr=torch.tensor(0.5))
    assert typed(optimizers=[on_cpu])["optimizer/lr"] == 0.5
    on_cpu.param_groups[0]["lr"] = torch.ones((), device="meta")
    assert "optimizer/lr" not in typed(optimizers=[on_cpu])


def test_the_batch_size_of_a_batch_sampler_counts():
    sampler = torch.utils.data.BatchSampler(range(8), batch_size=2, drop_last=False)
    loader = torch.utils.data.DataLoader(range(8), batch_sampler=sampler)
    assert fit_settings(SimpleNamespace(train_dataloader=loader))["train_dataloader/batch_size"] == 2


def test_settings_are_read_without_drawing():
    before = torch.get_rng_state()
    typed(optimizers=[torch.optim.Adam(weights())], algorithms=[MixUp(0.2), EMA()])
    assert torch.equal(torch.get_rng_state(), before)
