import json
import subprocess
import sys

import pytest

from composer_dist import error_file

PROGRAM = """
from composer_dist import error_file
error_file.install()
error_file.install()
{body}
"""


@pytest.fixture
def run(tmp_path, environ):
    """Return a function that runs a program that has installed the hook, and returns its file and stderr."""

    def program(body, variable="COMPOSER_ERROR_FILE"):
        path = tmp_path / "error.json"
        environ.update({variable: str(path), "RANK": "3", "LOCAL_RANK": "1"})
        end = subprocess.run([sys.executable, "-c", PROGRAM.format(body=body)], capture_output=True, text=True)
        return json.loads(path.read_text()) if path.exists() else None, end.stderr

    return program


@pytest.mark.parametrize("variable", ["COMPOSER_ERROR_FILE", "TORCHELASTIC_ERROR_FILE"])
def test_the_exception_that_ends_a_process_is_written(run, variable):
    found, err = run("try:\n    {}['k']\nexcept KeyError:\n    raise ValueError('boom')", variable)
    assert found["message"] == "ValueError: boom"
    assert found["exception_type"] == "ValueError"
    assert found["traceback"] == err
    assert (found["rank"], found["local_rank"]) == (3, 1)
    assert found["pid"] > 0
    assert isinstance(found["timestamp"], float)
    assert "KeyError" in found["extraInfo"]["py_callstack"]
    assert int(found["extraInfo"]["timestamp"]) == int(found["timestamp"])


def test_torch_reads_what_is_written(run, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    found, _ = run("raise ValueError('boom')")
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert (failure.message, failure.timestamp) == ("ValueError: boom", int(found["timestamp"]))


def test_notes_and_the_event_are_written(run):
    found, _ = run("error = OSError('full')\nerror.event = 'batch_end'\nerror.add_note('in EMA')\nraise error")
    assert (found["event"], found["notes"]) == ("batch_end", ["in EMA"])


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.exit(1)",
        "raise KeyboardInterrupt",
        "import os\nif os.fork() == 0:\n    raise ValueError('in a child')\nos.wait()",
    ],
)
def test_what_is_no_failure_of_the_rank_is_not_written(run, body):
    assert run(body)[0] is None


def test_a_folder_that_is_gone_does_not_hide_the_exception(tmp_path, environ):
    environ["COMPOSER_ERROR_FILE"] = str(tmp_path / "gone" / "error.json")
    program = PROGRAM.format(body="raise ValueError('boom')")
    end = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert end.stderr.endswith("ValueError: boom\n")
    assert "could not be written" in end.stderr


def test_without_a_launcher_nothing_changes(monkeypatch):
    for variable in ("COMPOSER_ERROR_FILE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(variable, raising=False)
    before = sys.excepthook
    error_file.install()
    error_file.record_exception(ValueError("boom"))
    assert sys.excepthook is before
