"""`latest` names the newest whole checkpoint of a folder, and `repair` mends what led there."""

import os
import subprocess
import sys

import pytest
import torch

from composer_checkpoint import FolderLock, save_file

# Dies while it writes to the path that it is given, in a folder.
KILLED = """
import os, signal, sys
from composer_checkpoint import write_atomically
with write_atomically(sys.argv[1]) as unfinished:
    unfinished.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with three checkpoints, of which the last is cut short."""
    for batch in (1, 2, 3):
        path = tmp_path / f"ep0-ba{batch}-rank0.pt"
        save_file({"w": torch.ones(3)}, path, info={"timestamp": {"epoch": 0, "batch": batch}})
    os.truncate(path, 100)
    return tmp_path


def test_the_newest_that_is_whole_is_named(folder, run, run_json):
    code, out, _ = run("latest", folder)
    assert (code, out) == (0, f"{folder}/ep0-ba2-rank0.pt\n")
    code, told = run_json("latest", folder)
    assert told["timestamp"] == {"epoch": 0, "batch": 2}
    assert [skipped["path"] for skipped in told["skipped"]] == [f"{folder}/ep0-ba3-rank0.pt"]
    assert run("latest", folder, "--no-verify")[1] == f"{folder}/ep0-ba3-rank0.pt\n"


def test_a_folder_without_a_whole_checkpoint_has_no_latest(run, tmp_path):
    code, _, errors = run("latest", tmp_path)
    assert code == 1
    assert "no whole checkpoint" in errors
    for typed in (tmp_path / "none", "memory://bucket/run"):
        assert run("latest", typed)[0] == 2
        assert run("repair", typed)[0] == 2


def test_a_link_that_leads_nowhere_leads_to_the_newest(folder, run, run_json):
    (folder / "latest-rank0.pt").symlink_to("ep0-ba7-rank0.pt")
    (folder / "elsewhere").symlink_to("/no/such/place")
    assert run_json("repair", folder, "--dry-run")[1]["links"] == [f"{folder}/latest-rank0.pt"]
    assert os.readlink(folder / "latest-rank0.pt") == "ep0-ba7-rank0.pt"
    assert run("repair", folder)[0] == 0
    assert os.readlink(folder / "latest-rank0.pt") == "ep0-ba2-rank0.pt"
    assert os.readlink(folder / "elsewhere") == "/no/such/place"
    assert "nothing to repair" in run("repair", folder)[1]


def test_a_link_is_made_on_request_and_replaces_nothing_else(folder, run):
    assert run("repair", folder, "--link", "latest.pt")[0] == 0
    assert os.readlink(folder / "latest.pt") == "ep0-ba2-rank0.pt"
    for name in ("ep0-ba1-rank0.pt", "../latest.pt", ""):
        code, _, errors = run("repair", folder, "--link", name)
        assert code == 2
        assert "--link" in errors
    assert (folder / "ep0-ba1-rank0.pt").stat().st_size > 4


def test_what_a_killed_writer_left_goes_on_request(folder, run, run_json):
    subprocess.run([sys.executable, "-c", KILLED, folder / "ep0-ba4-rank0.pt"], timeout=60, check=False)
    left = [str(path) for path in folder.glob("*.tmp-*")]
    assert run_json("repair", folder)[1]["leftovers"] == left
    assert run_json("repair", folder, "--delete", "--dry-run")[1]["leftovers"] == left
    assert [str(path) for path in folder.glob("*.tmp-*")] == left
    assert run("repair", folder, "--delete")[0] == 0
    assert not [*folder.glob("*.tmp-*")]


def test_a_folder_that_a_run_saves_to_is_left_alone(folder, run):
    code = (
        "import subprocess, sys\nfrom composer_checkpoint import FolderLock\n"
        "with FolderLock(sys.argv[1]):\n"
        "    sys.exit(subprocess.call([sys.executable, '-m', 'composer_ckpt', 'repair', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "is in use" in done.stderr
    with FolderLock(folder):  # which the process itself may share
        assert run("repair", folder)[0] == 0
