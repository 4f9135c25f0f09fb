"""SpeedMonitor against counts and rates worked out by hand."""

import datetime
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from composer import Trainer
from composer.callbacks import SpeedMonitor
from composer.callbacks._speed import GPU_AVAILABLE_FLOPS, find_device, get_gpu_flops_available
from composer.core import Precision, State, Timestamp
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerClassifier, ComposerModel

SAMPLES = 24
BATCH_SIZE = 2


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch[1])


class CountingModel(Model):
    def flops_per_batch(self, batch):
        return 6 * 8 * len(batch[0])


class MisdeclaredModel(Model):
    flops_per_batch = 3.0


class Kept(LoggerDestination):
    def __init__(self):
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append(dict(metrics))

    def of(self, name):
        return [metrics[name] for metrics in self.metrics if name in metrics]


def train(model, monitor, **arguments):
    kept = Kept()
    with make_trainer(model, monitor, kept, **arguments) as trainer:
        trainer.fit()
    return kept


def make_trainer(model, monitor, kept, **arguments):
    data = TensorDataset(torch.randn(SAMPLES, 3), torch.zeros(SAMPLES, dtype=torch.long))
    settings = {
        "train_dataloader": DataLoader(data, batch_size=BATCH_SIZE),
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "max_duration": "1ep",
        "progress_bar": False,
        "device": "cpu",
    }
    return Trainer(model, callbacks=monitor, loggers=kept, **settings | arguments)


def at(monitor, seconds, samples=0, tokens=0, model=None):
    """Let the monitor see the end of a batch at a time of its own."""
    state = State(model=model or Model(), rank_zero_seed=0, run_name="run", device="cpu")
    state.timestamp = state.timestamp.to_next_batch(
        samples=samples, tokens=tokens, duration=datetime.timedelta(seconds=seconds)
    )
    state.batch = (torch.zeros(BATCH_SIZE, 3), torch.zeros(BATCH_SIZE))
    kept = Kept()
    monitor.batch_end(state, Logger(state, kept))
    return kept.metrics[-1]


@pytest.mark.parametrize("window_size", [1, 5])
def test_speed_is_logged_once_the_window_is_full_and_time_at_every_batch(window_size):
    monitor = SpeedMonitor(window_size=window_size)
    kept = train(CountingModel(), monitor)
    batches = SAMPLES // BATCH_SIZE
    for name in ("batches_per_sec", "samples_per_sec", "flops_per_sec"):
        assert len(kept.of(f"throughput/{name}")) == batches - window_size
        assert len(kept.of(f"throughput/device/{name}")) == batches - window_size
    for name in ("time/train", "time/val", "time/total"):
        assert len(kept.of(name)) == batches
    assert kept.of("throughput/tokens_per_sec") == []
    assert len(monitor.history_samples) == window_size + 1


def test_rates_are_those_of_the_window():
    monitor = SpeedMonitor(window_size=2, gpu_flops_available=960.0, time_unit="minutes")
    model = CountingModel()
    at(monitor, seconds=10, samples=100, tokens=1000, model=model)
    at(monitor, seconds=11, samples=104, tokens=1040, model=model)
    metrics = at(monitor, seconds=14, samples=120, tokens=1100, model=model)
    assert metrics["throughput/batches_per_sec"] == 2 / 4
    assert metrics["throughput/samples_per_sec"] == 20 / 4
    assert metrics["throughput/tokens_per_sec"] == 100 / 4
    assert metrics["throughput/flops_per_sec"] == 2 * 96 / 4  # two batches of 6 * 8 * 2 operations
    assert metrics["throughput/device/mfu"] == 48 / 960
    assert metrics["time/train"] == pytest.approx(14 / 60)


def test_evaluation_counts_as_time_but_not_as_training():
    monitor = SpeedMonitor(window_size=1, time_unit="seconds")
    monitor.load_state_dict({"total_eval_wct": 5.0})
    metrics = at(monitor, seconds=10)
    assert (metrics["time/train"], metrics["time/val"], metrics["time/total"]) == (10, 5, 15)
    assert monitor.state_dict() == {"total_eval_wct": 5.0}


def test_a_model_whose_flops_are_no_function_is_refused():
    with pytest.raises(TypeError, match=r"flops_per_batch=3\.0 of MisdeclaredModel must be a function"):
        train(MisdeclaredModel(), SpeedMonitor())


def test_flops_are_those_of_the_users_own_model_also_where_that_has_a_module():
    class CountingClassifier(ComposerClassifier):
        def flops_per_batch(self, batch):
            return 6 * 8 * len(batch[0])

    kept = train(CountingClassifier(torch.nn.Linear(3, 2), num_classes=2), SpeedMonitor(window_size=2))
    assert len(kept.of("throughput/flops_per_sec")) == SAMPLES // BATCH_SIZE - 2


@pytest.mark.parametrize("flops", [None, "many"])
def test_flops_that_are_no_number_are_refused(flops):
    model = CountingModel()
    model.flops_per_batch = lambda batch: flops
    with pytest.raises(TypeError, match=f"flops_per_batch returned {flops!r} for a batch"):
        at(SpeedMonitor(), seconds=1, model=model)


@pytest.mark.parametrize(("arguments", "said"), [({"time_unit": "weeks"}, "'weeks'"), ({"window_size": 0}, "=0 ")])
def test_settings_that_make_no_sense_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        SpeedMonitor(**arguments)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM2e", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla V100-SXM2-32GB", "v100-sxm"),
        ("Tesla V100S-PCIE-32GB", "v100s-pcie"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-max"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX A4000", None),  # no A40
        ("NVIDIA RTX A1000", None),  # no A10
        ("NVIDIA T400 4GB", None),  # no T4
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_devices_are_known_by_the_names_that_drivers_give_them(name, key):
    assert find_device(name) == key


def test_of_a_trainium_the_peak_of_one_core_is_known():
    state = SimpleNamespace(device=SimpleNamespace(name="neuron"), precision=Precision.AMP_BF16)
    assert get_gpu_flops_available(state) == 190e12 / 2


def test_every_peak_in_eight_bits_is_twice_that_in_sixteen():
    for name, peaks in GPU_AVAILABLE_FLOPS.items():
        if "fp8" in peaks:
            assert peaks["amp_fp8"] == pytest.approx(2 * peaks["amp_bf16"], rel=0.02), name


def test_a_device_of_ones_own_can_be_added(monkeypatch):
    monkeypatch.setitem(GPU_AVAILABLE_FLOPS, "gtx-1080", {"fp32": 8.9e12})
    assert find_device("NVIDIA GeForce GTX 1080") == "gtx-1080"


def test_a_training_that_begins_anew_has_a_speed_of_its_own():
    model, monitor = Model(), SpeedMonitor(window_size=2, time_unit="seconds")
    monitor.eval_end(SimpleNamespace(eval_timestamp=Timestamp().copy(total_wct=datetime.timedelta(seconds=7))), None)
    for seconds, samples in ((10, 100), (20, 200), (30, 300)):
        assert at(monitor, seconds=seconds, samples=samples, model=model)["time/val"] == 7
    assert "throughput/samples_per_sec" not in at(monitor, seconds=1, samples=4, model=model)
    at(monitor, seconds=2, samples=8, model=model)
    metrics = at(monitor, seconds=3, samples=12, model=model)
    assert metrics["throughput/samples_per_sec"] == 4
    assert (metrics["time/val"], metrics["time/total"]) == (0, 3)


def test_a_training_that_begins_anew_has_a_speed_of_its_own_also_where_its_first_batch_takes_long():
    class Slow(CountingModel):
        delay_s = 0.0

        def forward(self, batch):
            time.sleep(self.delay_s)
            return super().forward(batch)

    model, kept = Slow(), Kept()
    with make_trainer(model, SpeedMonitor(window_size=2), kept, max_duration="4ba") as trainer:
        trainer.fit()
        kept.metrics.clear()
        model.delay_s = 0.2  # longer than all of the former training
        trainer.fit(duration="4ba", reset_time=True)
    speeds = kept.of("throughput/samples_per_sec")
    assert len(speeds) == 2
    assert min(speeds) > 0


def test_the_monitor_keeps_no_model_and_sees_what_a_model_learns_to_count_between_trainings():
    model, monitor, kept = Model(), SpeedMonitor(window_size=2), Kept()
    with make_trainer(model, monitor, kept, max_duration="4ba") as trainer:
        trainer.fit()
        assert not any(value is model for value in vars(monitor).values())
        model.flops_per_batch = lambda batch: 96
        trainer.fit(duration="4ba")
    assert len(kept.of("throughput/flops_per_sec")) == 2


def test_evaluations_of_a_training_are_timed():
    class Slow(Model):
        def eval_forward(self, batch, outputs=None):
            time.sleep(0.01)
            return self(batch)

        def get_metrics(self, is_train=False):
            return {} if is_train else {"Mean": MeanMetric()}

        def update_metric(self, batch, outputs, metric):
            metric.update(outputs)

    data = TensorDataset(torch.randn(6, 3), torch.zeros(6, dtype=torch.long))
    kept = train(
        Slow(), SpeedMonitor(time_unit="seconds"), eval_dataloader=DataLoader(data, batch_size=2), eval_interval="4ba"
    )
    spent_s = kept.of("time/val")
    assert spent_s[3] == 0  # the first evaluation follows this batch
    assert spent_s[4] >= 3 * 0.01
    assert spent_s[8] >= 2 * 3 * 0.01
