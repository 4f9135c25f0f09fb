"""What users' guides say about logging, run as they say it."""

import subprocess
import sys
from pathlib import Path

import pytest

from composer.report import read_run

TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.loggers import FileLogger
from composer.models import ComposerClassifier
from composer.utils import dist

data = TensorDataset(torch.randn(16, 2), torch.zeros(16, dtype=torch.long))
model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=4, sampler=dist.get_sampler(data)),
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    max_duration="1ep",
    run_name="plum",
    device="cpu",
    {arguments}
)
print("rank", dist.get_global_rank(), "begins")
trainer.fit()
trainer.close()
"""


def run(folder, arguments, *launcher):
    script = folder / "train.py"
    script.write_text(TRAINING.replace("{arguments}", arguments))
    command = [sys.executable, *launcher, str(script)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=300)


def test_in_the_background_the_progress_bar_is_added(tmp_path):
    # "In the background, we automatically add the ProgressBarLogger to log training progress to the console."
    assert "2/2" not in run(tmp_path, "progress_bar=False").stderr
    assert "train epoch 1/1, loss=" in run(tmp_path, "").stderr


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Run the script in two processes; its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("launched")
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("COMPOSER_RUNS", raising=False)
        return folder, run(folder, "loggers=FileLogger()", "-m", "composer", "-n", "2").stdout


def test_the_file_logger_saves_the_output_of_each_process(launched):
    # "By default, the STDOUT of the non-local-rank-zero processes is discarded; instead, use the FileLogger within
    # Composer. This logger captures and saves the STDOUT of each process."
    folder, printed = launched
    assert "rank 0 begins" in printed
    assert "rank 1 begins" not in printed
    for rank in (0, 1):
        lines = Path(folder / f"plum/logs-rank{rank}.txt").read_text().splitlines()
        assert f"[stdout]: rank {rank} begins" in lines
        assert sum(": loss/train/total: " in line for line in lines) == 2


def test_a_script_that_is_launched_leaves_a_folder_of_its_run(launched):
    recorded = read_run(launched[0] / "runs" / "plum")
    assert recorded.config["environment"]["world_size"] == 2
    assert recorded.curves["loss/train/total"].at["batch"] == [0, 1]
    assert recorded.status["status"] == "finished"


def test_a_launched_script_that_is_to_leave_no_folder_leaves_none(tmp_path):
    run(tmp_path, "progress_bar=False", "-m", "composer", "-n", "1", "--no_runs")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
