"""The page of real runs: the units of logged values, and how the time of steps was spent."""

import json

import pytest
import torch

from composer import Trainer
from composer.callbacks import RuntimeEstimator, SpeedMonitor
from composer.models import ComposerModel
from composer.profiler import EventRecorder, Profiler, cyclic_schedule
from composer.report import RunRecorder
from composer.report.runs import describe_runs

SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


def train(folder, **more):
    data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long)) for _ in range(4)]
    model = ComposerModel.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
    settings = {
        "train_dataloader": data,
        "device_train_microbatch_size": 4,
        "max_duration": "2ep",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": "cpu",
        "progress_bar": False,
        "loggers": RunRecorder(f"{folder}/run", page=False),
    }
    with Trainer(model, **settings | more) as trainer:
        trainer.fit()
    return folder / "run"


@pytest.mark.parametrize("time_unit", SECONDS)
def test_times_are_in_the_units_that_the_callbacks_were_told(tmp_path, time_unit):
    others = {"seconds": "minutes"}.get(time_unit, "seconds")
    callbacks = [SpeedMonitor(window_size=1, time_unit=time_unit), RuntimeEstimator(time_unit=others)]
    [run] = describe_runs([train(tmp_path, callbacks=callbacks)])["runs"]
    units, curves = run["units"], run["curves"]
    assert {name: units[name] for name in ("time/train", "time/val", "time/total")} == dict.fromkeys(
        ("time/train", "time/val", "time/total"), time_unit
    )
    train_s = [value * SECONDS[time_unit] for value in curves["time/train"]["values"]]
    assert train_s == pytest.approx(curves["time/train"]["time_s"])
    assert units["time/remaining_estimate"] == others
    assert (units["time/batch"], units["time/sample_in_epoch"]) == ("batches", "samples")
    assert units["throughput/device/batches_per_sec"] == "batches/s per device"
    assert {"loss/train/total", "lr-SGD/group0"}.isdisjoint(units)


def test_a_profiled_run_says_how_the_time_of_its_steps_was_spent(tmp_path):
    off = {"sys_prof_cpu": False, "torch_prof_profile_memory": False, "torch_prof_with_flops": False}
    profiler = Profiler(cyclic_schedule(warmup=0, active=4), EventRecorder(), **off)
    with pytest.warns(UserWarning, match="The profiler is enabled"):
        folder = train(tmp_path, profiler=profiler)
    rows = {row["name"]: row for row in json.loads((folder / "times.json").read_text())["profiler"]}
    batch, epoch = rows["event/batch"], rows["event/epoch"]
    assert batch["count"] == 8
    assert 0 < batch["median_s"] <= batch["p95_s"] <= batch["longest_s"] <= batch["total_s"]
    assert 0 < rows["event/forward"]["share_of_steps"] < batch["share_of_steps"] < 1
    assert epoch["share_of_steps"] is None
    around = ("before_dataloader", "after_dataloader", "batch_start", "batch_end")
    parts = [
        row["share_of_steps"]
        for name, row in rows.items()
        if name in ("event/batch", "event/dataloader") or ("/event/" in name and name.endswith(around))
    ]
    assert sum(parts) == pytest.approx(1)
