"""The progress of a run, as the controller of Kubeflow gets it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from kubeflow_trainer_api.models import TrainerV1alpha1TrainerStatus
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.callbacks import KubeflowProgress
from composer.models import ComposerModel

TOKEN = "a secret\n"


@pytest.fixture
def server():
    """A server that keeps what it gets."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    got = []
    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/apis/status", got
        running.shutdown()
        thread.join()


def train(callback):
    model = ComposerModel.from_module(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="4ba",
        callbacks=callback,
        progress_bar=False,
        device="cpu",
    ) as trainer:
        trainer.fit(duration="2ba")
        trainer.fit(duration="2ba")
        return int(trainer.state.timestamp.batch)


def test_progress_is_sent_in_the_form_that_kubeflow_reads(server, tmp_path, monkeypatch):
    url, got = server
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    assert train(KubeflowProgress(interval_s=0)) == 4
    assert {(path, token) for path, token, _ in got} == {("/apis/status", "Bearer a secret")}
    statuses = [body.pop("trainerStatus") for *_, body in got]
    for status in statuses:
        TrainerV1alpha1TrainerStatus.model_validate(status)
    assert statuses[-1]["progressPercentage"] == 100
    assert statuses[-1]["estimatedRemainingSeconds"] == 0
    assert {"name": "batch", "value": "4"} in statuses[-1]["metrics"]


def test_training_goes_on_where_kubeflow_cannot_be_reached(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "none"))
    assert train(KubeflowProgress(interval_s=0)) == 4
    assert [record.message for record in caplog.records if "Kubeflow" in record.message][0:] == [
        f"Kubeflow does not get the progress: FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/none'"
    ]


def test_nothing_is_sent_outside_of_a_trainjob(server, monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    train(KubeflowProgress(interval_s=0))
    assert not server[1]
