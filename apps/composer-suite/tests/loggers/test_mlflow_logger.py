"""Runs of MLflow: in a database of this machine, and on a server of this machine that goes away."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from importlib.util import find_spec

import pytest
import torch

from composer.core import Callback
from composer.loggers import InMemoryLogger, MLFlowLogger

pytestmark = [
    pytest.mark.skipif(find_spec("mlflow") is None, reason="needs the extra 'mlflow'"),
    pytest.mark.filterwarnings("ignore::UserWarning:mlflow"),
]


@pytest.fixture
def make_logger(database, tmp_path):
    """Make a logger to an experiment of the test's own, whose files are in the test's own folder."""

    def make(**settings):
        import mlflow

        name = settings.setdefault("experiment_name", tmp_path.name)
        mlflow.set_tracking_uri(database)
        if mlflow.get_experiment_by_name(name) is None:
            mlflow.create_experiment(name, artifact_location=(tmp_path / "artifacts").as_uri())
        return MLFlowLogger(**{"tracking_uri": database, "log_system_metrics": False, **settings})

    yield make
    import mlflow

    while mlflow.active_run() is not None:
        mlflow.end_run()


def run_of(logger):
    return logger.client.get_run(logger.run_id)


def points(logger, name):
    return [(metric.step, metric.value) for metric in logger.client.get_metric_history(logger.run_id, name)]


def test_the_points_of_a_training_are_those_that_were_logged(make_trainer, make_logger):
    import mlflow

    logger, memory = make_logger(), InMemoryLogger()
    trainer = make_trainer(max_duration="3ba", loggers=[logger, memory], run_name="plum")
    assert mlflow.active_run().info.run_id == logger.run_id
    trainer.fit()
    trainer.close()
    assert mlflow.active_run() is None
    expected = [(int(stamp.batch), float(value)) for stamp, value in memory.data["loss/train/total"]]
    assert points(logger, "loss/train/total") == expected
    run = run_of(logger)
    assert (run.info.run_name, run.info.status, run.data.tags["run_name"]) == ("plum", "FINISHED", "plum")


def test_the_settings_of_a_plain_run(make_trainer, make_logger):
    logger = make_logger()
    trainer = make_trainer(max_duration="1ba", loggers=logger)
    trainer.fit()
    trainer.close()
    params = run_of(logger).data.params
    assert set(params) == {
        "composer_version",
        "composer_commit_hash",
        "num_nodes",
        "num_cpus_per_node",
        "node_name",
        "rank_zero_seed",
        "mlflow_experiment_id",
        "mlflow_run_id",
    }
    assert (params["rank_zero_seed"], params["mlflow_run_id"]) == ("3", logger.run_id)


def test_what_is_renamed_and_what_is_left_out(begun, make_logger):
    logger = make_logger(
        rename_metrics={"loss": "my_loss"}, ignore_metrics=["time/*", "loss_*"], ignore_hyperparameters=["secret*"]
    )
    engine = begun(logger)
    engine.logger.log_metrics({"loss": torch.tensor(0.5), "time/batch": 1, "loss_2": 2, "text": "so"}, step=1)
    engine.logger.log_hyperparameters({"lr": 0.25, "secret_key": 1, "nested": {"a": 1}})
    engine.close()
    assert run_of(logger).data.metrics == {"my_loss": 0.5}
    assert run_of(logger).data.params == {"lr": "0.25", "nested/a": "1"}


def test_a_value_that_stays_is_logged_only_now_and_then(begun, make_logger):
    logger = make_logger(log_duplicated_metric_every_n_steps=10)
    engine = begun(logger)
    for step in range(25):
        engine.logger.log_metrics({"same": torch.tensor(1.0), "other": step}, step=step)
    engine.close()
    assert points(logger, "same") == [(0, 1.0), (10, 1.0), (20, 1.0)]
    assert len(points(logger, "other")) == 25


def test_values_are_sent_together(begun, make_logger, monkeypatch):
    from mlflow import MlflowClient

    sent, log_batch = [], MlflowClient.log_batch
    monkeypatch.setattr(
        MlflowClient, "log_batch", lambda self, run_id, **kw: sent.append(kw) or log_batch(self, run_id, **kw)
    )
    engine = begun(make_logger(logging_buffer_seconds=60))
    for step in range(10):
        engine.logger.log_metrics({"loss": step, "accuracy": -step}, step=step)
    engine.close()
    assert [len(kw["metrics"]) for kw in sent if kw.get("metrics")] == [20]


def test_a_name_that_mlflow_does_not_take_costs_one_warning_and_no_other_metric(begun, make_logger):
    logger = make_logger(logging_buffer_seconds=60)
    engine = begun(logger)
    for step in range(2):
        engine.logger.log_metrics({"loss": step, "top@5 (%)": 1.0, "accuracy": -step}, step=step)
    with pytest.warns(RuntimeWarning, match=r"MLFlowLogger did not take what was logged.*top@5") as warned:
        engine.close()
    assert len(warned) == 1
    assert points(logger, "loss") == [(0, 0.0), (1, 1.0)]
    assert points(logger, "accuracy") == [(0, 0.0), (1, -1.0)]


def test_a_table_is_an_artifact(begun, make_logger):
    import mlflow

    logger = make_logger()
    engine = begun(logger)
    engine.logger.log_table(["a", "b"], [[1, "x"], [2, "y"]], name="mine")
    engine.close()
    path = mlflow.artifacts.download_artifacts(run_id=logger.run_id, artifact_path="mine.json")
    with open(path) as file:
        assert json.load(file) == {"columns": ["a", "b"], "data": [[1, "x"], [2, "y"]]}


def test_each_image_is_two_files(begun, make_logger, tmp_path):
    logger = make_logger()
    engine = begun(logger)
    engine.logger.log_images(torch.rand(3, 3, 8, 8), name="mine", step=4)
    engine.close()
    assert len(list((tmp_path / "artifacts").rglob("images/mine_*"))) == 2 * 3


def test_images_that_mlflow_cannot_show(begun, make_logger):
    engine = begun(make_logger())
    with pytest.raises(ValueError, match=r"the images 'mine' have 8 channels.*channels_last"):
        engine.logger.log_images(torch.rand(8, 6, 3), name="mine")
    with pytest.warns(UserWarning, match="masks and mask_class_labels of the images 'mine' are left out"):
        engine.logger.log_images(torch.rand(1, 3, 8, 8), name="mine", masks={"a": torch.zeros(1, 8, 8)})


def test_a_run_that_raises_ends_as_failed(make_trainer, make_logger):
    class Fail(Callback):
        def batch_end(self, state, logger):
            raise ArithmeticError("no more")

    logger = make_logger()
    with (
        pytest.raises(ArithmeticError, match="no more"),
        make_trainer(max_duration="2ba", loggers=logger, callbacks=Fail()) as trainer,
    ):
        trainer.fit()
    assert run_of(logger).info.status == "FAILED"
    assert points(logger, "loss/train/total")


def test_a_resumed_run_goes_on(begun, make_logger):
    first = make_logger()
    begun(first, run_name="plum").close()
    other, resumed = make_logger(), make_logger(resume=True)
    begun(other, run_name="pear").close()
    engine = begun(resumed, run_name="plum")
    engine.logger.log_metrics({"loss": 1}, step=5)
    engine.close()
    assert resumed.run_id == first.run_id
    assert other.run_id != first.run_id
    assert points(first, "loss") == [(5, 1.0)]


def test_a_setting_that_has_changed_costs_a_warning_and_no_other(begun, make_logger):
    first = make_logger()
    engine = begun(first)
    engine.logger.log_hyperparameters({"lr": 0.25})
    engine.close()
    engine = begun(make_logger(resume=True))
    engine.logger.log_hyperparameters({"lr": 0.5, "new": 1})
    with pytest.warns(RuntimeWarning, match=r"MLFlowLogger did not take what was logged.*lr") as warned:
        engine.close()
    assert len(warned) == 1
    assert run_of(first).data.params == {"lr": "0.25", "new": "1"}


def test_the_names_come_from_the_environment_where_they_are_not_given(begun, make_logger, monkeypatch):
    assert MLFlowLogger(log_system_metrics=False).experiment_name == "my-mlflow-experiment"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-the-environment")
    monkeypatch.setenv("RUN_NAME", "job-17")
    logger = MLFlowLogger(log_system_metrics=False)
    assert logger.experiment_name == "from-the-environment"
    tagged = make_logger(tags={"team": "fruit"}, run_group="all")
    begun(tagged).close()
    tags = run_of(tagged).data.tags
    assert (tags["run_name"], tags["team"], tags["run_group"]) == ("job-17", "fruit", "all")


def test_the_machine_is_measured_as_often_as_is_asked_for(monkeypatch):
    interval, number = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING"
    monkeypatch.setenv(interval, "60")  # what the user has set stays
    monkeypatch.setenv(number, "")
    monkeypatch.delenv(number)
    MLFlowLogger(log_system_metrics=False)
    assert number not in os.environ
    MLFlowLogger()
    assert (os.environ[interval], os.environ[number]) == ("60", "6")


def test_a_model_is_registered_under_the_prefix(begun, make_logger, tmp_path):
    logger = make_logger(model_registry_prefix="fruit")
    begun(logger)
    for number in (1, 2):
        version = logger.register_model_with_run_id((tmp_path / "model").as_uri(), tmp_path.name)
        assert (version.name, int(version.version), version.run_id) == (f"fruit.{tmp_path.name}", number, logger.run_id)


@pytest.mark.parametrize("prefix", ["", "one", "one.two.three"])
def test_unity_catalog_needs_a_catalog_and_a_schema(prefix):
    with pytest.raises(ValueError, match="When registering to Unity Catalog"):
        MLFlowLogger(model_registry_uri="databricks-uc", model_registry_prefix=prefix)


def test_only_models_of_transformers_are_saved(make_logger):
    with pytest.raises(NotImplementedError, match="flavor='keras' cannot be saved"):
        make_logger().save_model("keras")


class Server:
    """An MLflow server on this machine."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{(port := free.getsockname()[1])}"
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--workers",
            "1",
        ]
        command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        command += ["--artifacts-destination", f"{folder}/artifacts"]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that its worker ends with it
        )

    def wait(self):
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                assert self.process.poll() is None, "the server has ended"
                time.sleep(0.2)
        raise TimeoutError(self.url)

    def signal(self, number):
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def stop(self):
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait()


@pytest.mark.slow
def test_a_server_that_hangs_and_goes_away_costs_warnings_and_no_step(make_trainer, tmp_path, monkeypatch):
    class Watch(Callback):
        def batch_end(self, state, logger):
            if int(state.timestamp.batch) == 2:
                server.signal(signal.SIGSTOP)  # it takes connections still, and never answers

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    server = Server(tmp_path)
    try:
        server.wait()
        logger = MLFlowLogger(tracking_uri=server.url, log_system_metrics=False, logging_buffer_seconds=0)
        trainer = make_trainer(max_duration="1ba", loggers=logger)
        trainer.fit()
        trainer.close()
        assert points(logger, "loss/train/total")[0][0] == 0
        assert run_of(logger).info.status == "FINISHED"

        second = MLFlowLogger(tracking_uri=server.url, log_system_metrics=False, flush_interval=1)
        second.logging_buffer_seconds = 0
        trainer = make_trainer(max_duration="200ba", loggers=second, callbacks=Watch())
        second._outbox.patience_s = 3  # not for the beginning, for which a slow machine has its time
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        with pytest.warns(RuntimeWarning, match=r"MLFlowLogger is not done after 3 s|MLFlowLogger did not take"):
            trainer.fit()
        trainer.close()  # the server has not answered since, so nobody has waited for it
        assert server.process.poll() is None
        assert trainer.state.timestamp.batch == 200
    finally:
        # What still waits fails here: later, it would warn into the log of another test.
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        server.stop()
        for thread in threading.enumerate():
            if thread.name == "composer-MLFlowLogger":
                thread.join(60)


def test_a_server_that_is_away_costs_one_warning_and_no_step(make_trainer, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        logger = MLFlowLogger(tracking_uri=f"http://127.0.0.1:{closed.getsockname()[1]}", log_system_metrics=False)
        with pytest.warns(RuntimeWarning, match="MLFlowLogger cannot be reached, so nothing is logged there") as warned:
            trainer = make_trainer(max_duration="2ba", loggers=logger)
        trainer.fit()
        trainer.close()
    assert trainer.state.timestamp.batch == 2
    assert len(warned) == 1
    assert logger.run_id is None


def test_asking_a_server_again_draws_nothing_that_training_would_draw(monkeypatch, drawing):
    import mlflow

    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        logger = MLFlowLogger(tracking_uri=f"http://127.0.0.1:{closed.getsockname()[1]}", log_system_metrics=False)
        with pytest.raises(mlflow.exceptions.MlflowException, match="Max retries exceeded"):
            mlflow.MlflowClient(logger.tracking_uri).search_experiments()
    assert threading.current_thread().name not in drawing
