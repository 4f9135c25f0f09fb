"""SystemMetricsMonitor against what psutil tells, and what the driver of a GPU would."""

import copy
import os
import pickle
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from composer.callbacks import SystemMetricsMonitor
from composer.core import State
from composer.loggers import InMemoryLogger, Logger
from composer.utils import MissingConditionalImportError
from composer.utils import dist as composer_dist


class Driver:
    """NVIDIA's management library for one GPU."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self):
        self.uuid = "GPU-1234"
        self.has_begun = False
        self.num_readings = 0

    def nvmlInit(self):
        self.has_begun = True

    class NVMLError_NotFound(Exception):
        pass

    class NVMLError_NotSupported(Exception):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.has_begun
        if uuid != self.uuid:
            raise self.NVMLError_NotFound
        return "instance" if uuid.startswith("MIG") else "handle"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return {"instance": "handle"}[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        if self.uuid.startswith("MIG"):
            raise self.NVMLError_NotSupported
        self.num_readings += 1
        return SimpleNamespace(gpu=80, memory=35)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert handle == "handle"
        return 61

    def nvmlDeviceGetPowerUsage(self, handle):
        return 412_500  # milliwatts


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    return driver


def logged_by(monitor):
    state = State(torch.nn.Linear(1, 1), rank_zero_seed=0, run_name="run", device="cpu")
    kept = InMemoryLogger()
    kept.init(state, None)
    monitor.batch_start(state, Logger(state, kept))
    return kept.most_recent_values


def test_every_field_of_the_computer_is_logged():
    psutil = pytest.importorskip("psutil")
    fields = {
        "cpu_memory": psutil.virtual_memory()._fields,
        "disk_memory": psutil.disk_usage(os.sep)._fields,
        "network": psutil.net_io_counters()._fields,
    }
    values = logged_by(SystemMetricsMonitor())
    assert values.keys() >= {f"{group}_{name}" for group, names in fields.items() for name in names}
    assert 0 <= values["cpu_percentage"] <= 100
    assert values["cpu_memory_total"] == psutil.virtual_memory().total


def test_batches_of_training_evaluation_and_prediction_are_logged(make_trainer, make_loader):
    pytest.importorskip("psutil")
    kept = InMemoryLogger()
    trainer = make_trainer(callbacks=SystemMetricsMonitor(), loggers=kept, max_duration="1ep")
    trainer.fit()
    assert len(kept.data["cpu_percentage"]) == 2
    trainer.eval(make_loader(6, 2))
    assert len(kept.data["cpu_percentage"]) == 2 + 3
    trainer.predict(make_loader(4, 2))
    assert len(kept.data["cpu_percentage"]) == 2 + 3 + 2


def test_the_least_and_the_most_of_all_gpus_say_whose_they_are(driver, monkeypatch):
    pytest.importorskip("psutil")
    other = {"gpu_percentage": 30, "memory_percentage": 60, "gpu_temperature_C": 70, "gpu_power_usage_W": 80.0}
    monkeypatch.setattr(composer_dist, "all_gather_object", lambda own: [own, other])
    values = logged_by(SystemMetricsMonitor())
    of_gpus = {name: value for name, value in values.items() if "_rank_" in name}
    assert of_gpus == {
        "min_gpu_percentage_rank_1": 30,
        "max_gpu_percentage_rank_0": 80,
        "min_memory_percentage_rank_0": 35,
        "max_memory_percentage_rank_1": 60,
        "min_gpu_temperature_C_rank_0": 61,
        "max_gpu_temperature_C_rank_1": 70,
        "min_gpu_power_usage_W_rank_1": 80.0,
        "max_gpu_power_usage_W_rank_0": 412.5,
    }


def test_all_gpus_are_logged_when_asked_for(driver):
    pytest.importorskip("psutil")
    values = logged_by(SystemMetricsMonitor(log_all_data=True))
    assert {name: value for name, value in values.items() if name.endswith("_rank_0")} == {
        "gpu_percentage_rank_0": 80,
        "memory_percentage_rank_0": 35,
        "gpu_temperature_C_rank_0": 61,
        "gpu_power_usage_W_rank_0": 412.5,
    }


def test_an_instance_of_a_gpu_has_no_utilization_but_the_temperature_of_the_whole(driver):
    """The driver did not find the instance under the name of a GPU."""
    pytest.importorskip("psutil")
    driver.uuid = "MIG-1234"
    values = logged_by(SystemMetricsMonitor(log_all_data=True))
    assert {name: value for name, value in values.items() if name.endswith("_rank_0")} == {
        "gpu_temperature_C_rank_0": 61,
        "gpu_power_usage_W_rank_0": 412.5,
    }


def test_batches_do_not_ask_the_machine(driver):
    pytest.importorskip("psutil")
    monitor, began_s = SystemMetricsMonitor(), time.monotonic()
    asked_after_one = "cpu_percentage" in logged_by(monitor)
    for _ in range(20):
        logged_by(monitor)
    assert asked_after_one
    # The first one, the thread's first, one that may have begun just now, and one for each second that this took.
    assert driver.num_readings <= 3 + int(time.monotonic() - began_s)
    monitor.close(None, None)


@pytest.mark.parametrize(("module", "package"), [("psutil", "psutil"), ("pynvml", "nvidia-ml-py")])
def test_a_package_that_is_missing_names_the_extra(driver, monkeypatch, module, package):
    if module != "psutil":
        pytest.importorskip("psutil")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingConditionalImportError, match=rf"{package} is not installed.*composer-suite\[system\]"):
        SystemMetricsMonitor()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_tells_its_temperature():
    pytest.importorskip("psutil")
    pytest.importorskip("pynvml")
    assert 0 < logged_by(SystemMetricsMonitor())["min_gpu_temperature_C_rank_0"] < 120


@pytest.mark.parametrize("copied", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy], ids=["pickle", "copy"])
def test_a_copy_of_a_monitor_at_work_reads_for_itself(copied, driver):
    pytest.importorskip("psutil")
    monitor = SystemMetricsMonitor(log_all_data=True)
    monitor.of_a_user = ["kept"]
    logged_by(monitor)
    same = copied(monitor)
    monitor.close(None, None)
    num_readings = driver.num_readings
    assert logged_by(same)["gpu_percentage_rank_0"] == 80
    assert driver.num_readings > num_readings
    assert same.of_a_user == ["kept"]
    same.close(None, None)
