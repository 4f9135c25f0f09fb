"""What holds for every destination."""

import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from composer import loggers
from composer.core import Callback


def needs(library):
    return pytest.mark.skipif(find_spec(library) is None, reason=f"needs the library {library!r}")


MAKERS = {
    "console": lambda folder, database: loggers.ConsoleLogger(stream="stdout"),
    "file": lambda folder, database: loggers.FileLogger(overwrite=True),
    "memory": lambda folder, database: loggers.InMemoryLogger(),
    "progress bar": lambda folder, database: loggers.ProgressBarLogger("stdout"),
    "comet": lambda folder, database: loggers.CometMLLogger(exp_kwargs={"online": False, "log_env_details": False}),
    "mlflow": lambda folder, database: loggers.MLFlowLogger(tracking_uri=database, log_system_metrics=False),
    "neptune": lambda folder, database: loggers.NeptuneLogger(mode="debug"),
    "tensorboard": lambda folder, database: loggers.TensorboardLogger(),
    "wandb": lambda folder, database: loggers.WandBLogger(init_kwargs={"mode": "offline", "dir": str(folder)}),
}
LIBRARIES = {
    "comet": "comet_ml",
    "mlflow": "mlflow",
    "neptune": "neptune",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
ON_THREADS = ["comet", "mlflow", "neptune", "tensorboard", "wandb"]
ALL = [pytest.param(name, marks=needs(LIBRARIES[name]) if name in LIBRARIES else ()) for name in MAKERS]
pytestmark = pytest.mark.filterwarnings("ignore:Info \\(NVML\\)", "ignore::UserWarning:mlflow")


class LogEverything(Callback):
    def batch_end(self, state, logger):
        logger.log_metrics({"a": torch.tensor(1.0), "b": 2, "c": 0.5, "several": torch.ones(3)})
        logger.log_hyperparameters({"nested": {"lr": 0.1}, "sizes": [1, 2], "none": None})
        logger.log_table(["a", "b"], [[1, "x"]], name="table")
        logger.log_images(torch.rand(2, 3, 8, 8), name="images")
        logger.log_traces({"trace": 1})


@pytest.mark.parametrize("name", ALL)
def test_a_logger_takes_all_that_is_logged_in_several_fits(make_trainer, make_loader, tmp_path, database, name):
    trainer = make_trainer(
        max_duration="1ep",
        loggers=MAKERS[name](tmp_path, database),
        callbacks=LogEverything(),
        eval_dataloader=make_loader(4, 2),
        auto_log_hparams=True,
    )
    trainer.fit()
    trainer.fit(duration="1ep")
    trainer.close()
    trainer.close()
    assert trainer.state.timestamp.epoch == 2


class Watched(torch.Tensor):
    """A number that remembers which threads have read it."""

    readers: set = set()  # noqa: RUF012  (shared by all copies on purpose)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in ("item", "tolist", "__float__", "numpy"):
            cls.readers.add(threading.current_thread())
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(LIBRARIES[name])) for name in ON_THREADS])
def test_the_thread_that_trains_reads_no_number(begun, tmp_path, database, name):
    Watched.readers.clear()
    engine = begun(MAKERS[name](tmp_path, database))
    engine.logger.log_metrics({"loss": torch.tensor(0.5).as_subclass(Watched)}, step=1)
    engine.close()
    assert Watched.readers
    assert threading.current_thread() not in Watched.readers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", [parameter for parameter in ALL if parameter.values[0] not in ("console", "progress bar")]
)
def test_logging_waits_for_no_device(begun, tmp_path, database, name):
    engine = begun(MAKERS[name](tmp_path, database))
    loss = torch.rand((), device="cuda")
    engine.logger.log_metrics({"warm": loss}, step=0)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.logger.log_metrics({"loss": loss}, step=1)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    engine.close()


def test_a_value_is_as_it_was_when_it_was_logged(begun, tmp_path):
    memory, file = loggers.InMemoryLogger(), loggers.FileLogger(capture_stdout=False, capture_stderr=False)
    engine = begun(memory, file)
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * 2).sum()  # part of a graph, which nobody may keep alive
    engine.logger.log_metrics({"loss": loss, "weight": weight}, step=0)
    with torch.no_grad():
        weight += 1
    engine.close()
    assert memory.data["weight"][0][1].item() == 1
    assert memory.data["loss"][0][1].grad_fn is None
    assert "weight: 1.0000" in Path(file.filename).read_text()
