"""What a launcher leaves behind when it is killed is found by its identity, and ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from composer_dist.launch.guardian import LAUNCH_ID, new_launch_id, sweep

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="identities are seen in /proc")


def start(launch_id):
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    return subprocess.Popen(command, env=os.environ | {LAUNCH_ID: launch_id}, start_new_session=True)


def test_processes_of_a_launch_are_ended_and_those_of_others_are_not():
    ours, other = new_launch_id(), new_launch_id()
    with start(ours) as mine, start(other) as foreign:
        try:
            assert sweep([], ours) == [mine.pid]
            assert mine.wait(timeout=10) == -signal.SIGKILL
            assert foreign.poll() is None
        finally:
            mine.kill()
            foreign.kill()


def test_a_process_that_shows_up_during_the_quiet_time_is_ended_too():
    launch_id, found = new_launch_id(), []
    thread = threading.Thread(target=lambda: found.extend(sweep([], launch_id, timeout_s=60, quiet_s=3)))
    thread.start()
    time.sleep(0.5)  # it has looked, and found nobody
    with start(launch_id) as late:
        try:
            assert late.wait(timeout=30) == -signal.SIGKILL
        finally:
            late.kill()
    thread.join()
    assert found == [late.pid]
