"""MemorySnapshot and OOMObserver on a history of the allocator that is written down here.

What only CUDA can do (to record, to take a snapshot, to say that memory ran out) is put in its place; all that is made
of it is real.
"""

import json
import pickle
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from composer import Trainer
from composer.callbacks import MemorySnapshot, OOMObserver
from composer.callbacks.oom_observer import SnapshotFileNameConfig
from composer.core import State
from composer.loggers import Logger, LoggerDestination, RemoteUploaderDownloader
from composer.models import ComposerClassifier
from composer_dist.devices import DeviceCPU

KiB = 1024
SNAPSHOT = "rank0.3.memory_snapshot"
OOM_FILES = [
    "rank0_oom_memory_flamegraph.svg",
    "rank0_oom_segment_flamegraph.svg",
    "rank0_oom_segment_plot.html",
    "rank0_oom_snapshot.pickle",
    "rank0_oom_trace_plot.html",
]


def frames(*names):
    return [{"filename": "/src/net.py", "line": line, "name": name} for line, name in enumerate(names, 1)]


# The weights are older than the record. An activation is allocated and freed, a second takes its place, and a third,
# in a segment of its own, has no room.
HISTORY = {
    "segments": [
        {
            "device": 0,
            "address": 1000 * KiB,
            "total_size": 8 * KiB,
            "stream": 0,
            "blocks": [
                {"size": 2 * KiB, "requested_size": 2 * KiB, "state": "active_allocated", "frames": frames("weights")},
                {
                    "size": 4 * KiB,
                    "requested_size": 4 * KiB,
                    "state": "active_allocated",
                    "frames": frames("relu", "run"),
                },
                {"size": 2 * KiB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "alloc", "addr": 1002 * KiB, "size": 1 * KiB, "frames": frames("</script>", "run")},
            {"action": "free_requested", "addr": 1002 * KiB, "size": 1 * KiB, "frames": []},
            {"action": "free_completed", "addr": 1002 * KiB, "size": 1 * KiB, "frames": []},
            {"action": "alloc", "addr": 1002 * KiB, "size": 4 * KiB, "frames": frames("relu", "run")},
            {"action": "oom", "size": 9 * KiB, "device_free": 0, "frames": frames("conv")},
        ]
    ],
}


class Allocator:
    """CUDA's allocator as far as the callbacks know it."""

    def __init__(self):
        self.history = HISTORY
        self.calls = []
        self.observers = []

    def record(self, enabled="all", max_entries=None):
        self.calls.append((enabled, max_entries))

    def snapshot(self):
        return self.history

    def run_out_of_memory(self):
        for observer in self.observers:
            observer(0, 9 * KiB, 16 * KiB, 0)


class Keeper(LoggerDestination):
    def __init__(self):
        self.names = []

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        assert file_path.exists()
        self.names.append(remote_file_name)


@pytest.fixture
def allocator(monkeypatch):
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", allocator.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocator.snapshot)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", allocator.observers.append, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return allocator


class CudaDevice(DeviceCPU):
    """A device that only says that it is CUDA's."""

    torch_device = torch.device("cuda")


class Run:
    """A run of which only the batches are counted; its weights are on the CPU, as before they are sharded."""

    def __init__(self, callback, *loggers):
        model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
        self.state = State(model, rank_zero_seed=0, run_name="plum", device=CudaDevice(), callbacks=callback)
        self.logger = Logger(self.state, loggers)
        self.callback = callback
        callback.init(self.state, self.logger)

    def batches(self, count):
        for _ in range(count):
            self.callback.batch_start(self.state, self.logger)
            self.state.timestamp = self.state.timestamp.to_next_batch(samples=1)
            self.callback.batch_end(self.state, self.logger)
        return self


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def data_of(page):
    return json.loads(re.search(r'id="composer-data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture
def pages(allocator, tmp_path):
    observer = OOMObserver(folder=str(tmp_path))
    run = Run(observer)
    allocator.run_out_of_memory()
    observer.close(run.state, run.logger)
    return {path.name.removeprefix("rank0_oom_"): path for path in tmp_path.iterdir()}


def test_batches_are_recorded_after_those_to_skip_and_kept_as_two_files(allocator, tmp_path):
    keeper = Keeper()
    snapshot = MemorySnapshot(skip_batches=1, interval="2ba", max_entries=77, folder=str(tmp_path / "{run_name}"))
    run = Run(snapshot, keeper)
    run.batches(1)
    assert allocator.calls == []
    run.batches(2)
    assert allocator.calls == [("all", 77), (None, None)]
    assert files_in(tmp_path / "plum") == [f"{SNAPSHOT}.html", f"{SNAPSHOT}.pickle"]
    assert pickle.loads((tmp_path / "plum" / f"{SNAPSHOT}.pickle").read_bytes()) == HISTORY
    assert keeper.names == [
        f"plum/torch_memory_traces/{SNAPSHOT}.pickle",
        f"plum/torch_memory_traces/{SNAPSHOT}.html",
    ]
    run.batches(5)
    assert len(allocator.calls) == 2  # once is enough


def test_where_nothing_was_recorded_nothing_is_kept(allocator, tmp_path):
    allocator.history = {"segments": [], "device_traces": [[], []]}
    Run(MemorySnapshot(folder=str(tmp_path))).batches(6)
    assert files_in(tmp_path) == []
    assert allocator.calls[-1] == (None, None)


def test_a_snapshot_that_fails_does_not_end_training(allocator, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(allocator, "snapshot", lambda: 1 / 0)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocator.snapshot)
    Run(MemorySnapshot(folder=str(tmp_path))).batches(6)
    assert "No snapshot of the memory could be taken." in caplog.text


def test_training_that_ends_while_memory_is_recorded_stops_it(allocator, tmp_path):
    run = Run(MemorySnapshot(skip_batches=0, interval="9ba", folder=str(tmp_path))).batches(2)
    run.callback.close(run.state, run.logger)
    run.callback.close(run.state, run.logger)
    assert allocator.calls == [("all", 100000), (None, None)]


@pytest.mark.parametrize("kind", [MemorySnapshot, OOMObserver])
def test_a_folder_with_files_is_refused_unless_they_may_be_replaced(allocator, tmp_path, kind):
    (tmp_path / "older.html").touch()
    with pytest.raises(FileExistsError, match=r"older\.html"):
        Run(kind(folder=str(tmp_path)))
    Run(kind(folder=str(tmp_path), overwrite=True))


def test_when_memory_runs_out_five_files_are_kept(allocator, tmp_path):
    keeper = Keeper()
    run = Run(OOMObserver(folder=str(tmp_path), max_entries=5), keeper)
    assert allocator.calls == [("all", 5)]
    allocator.run_out_of_memory()
    assert files_in(tmp_path) == OOM_FILES
    assert sorted(keeper.names) == [f"{run.state.run_name}/oom_traces/rank0_oom/{name}" for name in OOM_FILES]


def test_when_memory_runs_out_again_the_newer_files_take_the_place_of_the_older(allocator, tmp_path):
    class Replaces(Keeper):
        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            assert overwrite == (remote_file_name in self.names)
            super().upload_file(state, remote_file_name, file_path, overwrite=overwrite)

    keeper = Replaces()
    run = Run(OOMObserver(folder=str(tmp_path)), keeper)
    allocator.run_out_of_memory()
    allocator.run_out_of_memory()
    assert len(keeper.names) == 10
    run.callback.close(run.state, run.logger)


def test_the_names_of_the_files_are_known_beforehand():
    names = SnapshotFileNameConfig.from_file_name("rank0_oom")
    assert sorted(names.list_filenames()) == OOM_FILES


def test_one_file_that_fails_leaves_the_others(allocator, tmp_path, caplog):
    (tmp_path / "rank0_oom_trace_plot.html").mkdir()
    run = Run(OOMObserver(folder=str(tmp_path)))
    allocator.run_out_of_memory()
    assert files_in(tmp_path) == OOM_FILES
    run.callback.close(run.state, run.logger)
    assert "rank0_oom_trace_plot.html could not be written" in caplog.text


def test_what_is_closed_or_gone_observes_no_more(allocator, tmp_path):
    closed = Run(OOMObserver(folder=str(tmp_path / "closed")))
    closed.callback.close(closed.state, closed.logger)
    assert allocator.calls[-1] == (None, None)
    gone = Run(OOMObserver(folder=str(tmp_path / "gone")))
    del gone
    allocator.run_out_of_memory()
    assert files_in(tmp_path / "closed") == files_in(tmp_path / "gone") == []


def test_an_address_is_uploaded_to_by_a_logger_of_its_own(allocator, tmp_path):
    callback = MemorySnapshot(folder=str(tmp_path / "here"), remote_file_name="memory://bucket/{run_name}/traces")
    run = Run(callback)
    (uploader,) = run.logger.destinations
    assert isinstance(uploader, RemoteUploaderDownloader)
    assert uploader in run.state.callbacks
    run.batches(6)
    uploader.fit_end(run.state, run.logger)
    name = "plum/traces/rank0.4.memory_snapshot"
    assert uploader.remote_backend.get_object_size(f"{name}.pickle") == len(pickle.dumps(HISTORY))
    uploader.close(run.state, run.logger)
    uploader.post_close()


def test_a_second_one_uploads_by_the_same_logger(allocator, tmp_path):
    snapshot = MemorySnapshot(folder=str(tmp_path / "a"), remote_file_name="memory://bucket/a")
    run = Run(snapshot)
    OOMObserver(folder=str(tmp_path / "b"), remote_file_name="memory://bucket/b").init(run.state, run.logger)
    assert len(run.logger.destinations) == 1


def test_the_timeline_shows_each_allocation_from_its_begin_to_its_end(pages):
    data = data_of(pages["trace_plot.html"].read_text())
    (plot,) = data["plots"]
    boxes = {
        (left, right, bottom, top): data["stacks"][stack].split(": ")[1].split("\n")[0]
        for left, right, bottom, top, stack in plot["boxes"]
    }
    assert boxes == {
        (0, 5, 0, 2 * KiB): "weights",
        (0, 2, 2 * KiB, 3 * KiB): "</script>",
        (3, 5, 2 * KiB, 6 * KiB): "relu",
    }
    assert plot["marks"] == [4]
    assert "6.0 KiB in use at most" in plot["title"]


def test_the_segments_show_their_blocks(pages):
    data = data_of(pages["segment_plot.html"].read_text())
    (plot,) = data["plots"]
    assert [box[:4] for box in plot["boxes"]] == [[0, 2048, 0, 1], [2048, 6144, 0, 1], [6144, 8192, 0, 1]]
    assert plot["notes"][2] == "inactive, 2.0 KiB in segment 0xfa000"


@pytest.mark.parametrize("name", ["memory_flamegraph.svg", "segment_flamegraph.svg"])
def test_the_flame_graph_is_as_wide_as_the_bytes_that_each_line_holds(pages, name):
    svg = ET.fromstring(pages[name].read_text())
    title, rect = "{http://www.w3.org/2000/svg}title", "{http://www.w3.org/2000/svg}rect"
    widths = {group.find(title).text: float(group.find(rect).get("width")) for group in svg}
    assert widths["all: 8.0 KiB"] == 1200
    assert widths["net.py:1:weights: 2.0 KiB"] == pytest.approx(1200 / 4)
    assert widths["net.py:1:relu: 4.0 KiB"] == widths["net.py:2:run: 4.0 KiB"] == pytest.approx(1200 / 2)


def test_no_file_needs_a_network(pages):
    for path in pages.values():
        assert not re.search(rb'(src|href|from|import)\s*[=(]?\s*["\']?https?:', path.read_bytes())


@pytest.mark.parametrize(
    ("kind", "said"), [(MemorySnapshot, "The memory snapshot only works"), (OOMObserver, "The oom observer only works")]
)
def test_where_no_cuda_is_training_goes_on_without(make_trainer, tmp_path, kind, said):
    callback = kind(folder=str(tmp_path / "traces"))
    with pytest.warns(UserWarning, match=f"{said} on CUDA devices, but the model is on cpu"):
        trainer = make_trainer(callbacks=callback, max_duration="6ba")
    trainer.fit()
    assert not (tmp_path / "traces").exists()


@pytest.mark.parametrize("settings", [{"skip_batches": -1}, {"interval": "0ba"}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        MemorySnapshot(**settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_running_out_of_memory_on_a_gpu_leaves_its_files(make_loader, make_model, tmp_path):
    class Greedy(ComposerClassifier):
        def forward(self, batch):
            torch.empty(2**50, device="cuda")
            return super().forward(batch)

    observer = OOMObserver(folder=str(tmp_path / "oom"), remote_file_name=None)
    snapshot = MemorySnapshot(skip_batches=0, interval="1ba", folder=str(tmp_path / "all"), remote_file_name=None)
    model = make_model()
    settings = {"train_dataloader": make_loader(8, 4), "max_duration": "2ba", "device": "gpu"}
    settings["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(model, **settings, callbacks=snapshot) as trainer:
        trainer.fit()
    assert len(files_in(tmp_path / "all")) == 2
    greedy = Greedy(torch.nn.Linear(2, 2), num_classes=2)
    settings["optimizers"] = torch.optim.SGD(greedy.parameters(), lr=0.1)
    with Trainer(greedy, **settings, callbacks=observer) as trainer, pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit()
    assert files_in(tmp_path / "oom") == OOM_FILES
