"""A run that follows a killed one on the same data starts, and leaves running ones alone."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from composer.datasets import clean_stale_shared_memory

streaming = pytest.importorskip("streaming")

SCRIPT = """
import sys, time
from composer.datasets import StreamingDataset
remote, local = sys.argv[1:]
dataset = StreamingDataset(remote=remote, local=local, batch_size=4)
print("lines:", len(list(dataset)), flush=True)
if "{waits}" == "True":
    time.sleep(300)
"""


def start(tmp_path, local, *, waits, launcher=()):
    script = tmp_path / f"script_{waits}.py"
    script.write_text(SCRIPT.format(waits=waits))
    command = [sys.executable, *launcher, str(script), str(tmp_path / "remote"), str(tmp_path / local)]
    # Jobs often have a temporary folder of their own; where they share one, the locks in it keep datasets apart.
    own_folder = {"TMPDIR": tempfile.mkdtemp(dir=tmp_path)}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **own_folder, "COMPOSER_KEEP_SHARED_MEMORY": ""},
    )


@pytest.fixture
def killed_run(tmp_path):
    """Kill a run that downloads to the folder `local`, with all its helpers, while another one lives."""
    with streaming.MDSWriter(out=str(tmp_path / "remote"), columns={"text": "str"}) as writer:
        for line in Path(random.__file__).read_text().splitlines()[:20]:
            writer.write({"text": line})
    started = []
    try:
        for local in ("of_another", "local"):  # one after the other, since both look for a number
            started.append(start(tmp_path, local, waits=True))
            assert started[-1].stdout.readline() == "lines: 20\n"
        living, dead = started
        os.killpg(dead.pid, signal.SIGKILL)
        dead.wait()
        time.sleep(1.5)  # what is newer than a second may be in the making
        yield
        assert living.poll() is None
        again = start(tmp_path, "of_another", waits=False)  # its memory is there still, so this is refused
        assert "Reused local directory" in again.communicate(timeout=180)[0]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        time.sleep(1.5)
        clean_stale_shared_memory()


@pytest.mark.slow
@pytest.mark.usefixtures("killed_run")
def test_a_dataset_is_refused_where_a_killed_run_was_until_its_memory_is_cleaned(tmp_path):
    refused = start(tmp_path, "local", waits=False).communicate(timeout=180)[0]
    assert "Reused local directory" in refused
    assert "clean_stale_shared_memory" in refused
    assert clean_stale_shared_memory()
    assert start(tmp_path, "local", waits=False).communicate(timeout=180)[0].endswith("lines: 20\n")


@pytest.mark.slow
@pytest.mark.usefixtures("killed_run")
def test_the_launcher_cleans_what_a_killed_run_left(tmp_path):
    launched = start(tmp_path, "local", waits=False, launcher=["-m", "composer.cli", "-n", "1"])
    output = launched.communicate(timeout=180)[0]
    assert launched.returncode == 0, output
    assert "lines: 20" in output
    assert "Deleted shared memory that a killed run left behind" in output
