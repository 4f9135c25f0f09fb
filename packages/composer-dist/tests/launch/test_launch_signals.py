"""Signals to launchers that are processes of their own, and what is left of their runs: nothing, seen in /proc."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through Linux's /proc")

# Says which signal it got, and leaves a process behind in a session of its own.
PATIENT = """
import signal, subprocess
subprocess.Popen([sys.executable, '-c', f'import time; time.sleep(90) # {sys.argv[1]}'], start_new_session=True)
def note(signum, frame):
    open(f'{sys.argv[1]}/got-{rank}-{signum}', 'w').close()
    if sys.argv[2] == 'end':
        sys.exit(0)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(signum, note)
open(f'{sys.argv[1]}/ready-{rank}', 'w').close()
for _ in range(900):
    time.sleep(0.1)
"""


@pytest.fixture
def run(started, script, tmp_path, wait_for):
    """Return a function that starts two ranks and returns their launcher once they are ready."""

    def begin(then="end", *arguments, **settings):
        folder = tmp_path / "ranks"
        folder.mkdir()
        launcher = started("-n", 2, *arguments, script(PATIENT), folder, then, **settings)
        wait_for(lambda: len(list(folder.glob("ready-*"))) == 2 or launcher.poll() is not None)
        assert launcher.poll() is None, launcher.communicate()
        return launcher, folder

    return begin


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_reaches_every_rank_and_ends_the_launcher_with_its_number(run, running, name):
    signum = getattr(signal, name)
    launcher, folder = run()
    launcher.send_signal(signum)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signum
    assert sorted(path.name for path in folder.glob("got-*")) == [f"got-{rank}-{int(signum)}" for rank in range(2)]
    assert f"{'Ctrl-C' if name == 'SIGINT' else name} received; terminating training processes." in out
    assert not running(str(folder))


def test_on_a_terminal_the_message_of_ctrl_c_has_a_line_of_its_own(run):
    """It followed the progress bar and the ^C of the terminal."""
    terminal, side = os.openpty()
    launcher, _ = run(stdout=side, stderr=side)
    os.write(side, b"epoch 1/2 |")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    os.close(side)
    said = b""
    with contextlib.suppress(OSError):  # the end of it, which may come in parts
        while part := os.read(terminal, 1 << 16):
            said += part
    os.close(terminal)
    # Not at the start: the ranks may have written before, such as a warning that NumPy is not installed.
    assert b"epoch 1/2 |\r\nCtrl-C received" in said


# Stops in order when rank 1 gets a signal; rank 0 has something left to do then.
IN_ORDER = """
import signal
def stop(signum, frame):
    open(f'{sys.argv[1]}/stop', 'w').close()
signal.signal(signal.SIGTERM, stop)
open(f'{sys.argv[1]}/pid-{rank}', 'w').write(str(os.getpid()))
while not os.path.exists(f'{sys.argv[1]}/stop'):
    time.sleep(0.05)
if rank == '0':
    time.sleep(1.5)
    open(f'{sys.argv[1]}/saved', 'w').close()
sys.exit(143 if rank == '1' or sys.argv[2] == 'together' else 3)
"""


@pytest.mark.parametrize(("how", "is_fault"), [("together", False), ("apart", True)])
def test_ranks_that_stop_in_order_have_not_failed(started, script, tmp_path, wait_for, how, is_fault):
    launcher = started("-n", 2, script(IN_ORDER), tmp_path, how)
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    wait_for(lambda: (tmp_path / "pid-1").read_text())
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert (tmp_path / "saved").exists()  # nobody ended rank 0 before
    assert ("failed first" in err) is is_fault, out + err


def test_a_launcher_in_the_background_survives_what_nohup_ignores(run, running):
    launcher, folder = run("end", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert [path.name for path in folder.glob("got-0-*")] == ["got-0-15"]


def test_a_second_interrupt_ends_the_run_at_once(run, running, wait_for):
    launcher, folder = run("stay")
    launcher.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(folder.glob("got-*"))) == 2)
    launcher.send_signal(signal.SIGINT)
    start = time.monotonic()
    launcher.communicate(timeout=60)
    assert time.monotonic() - start < 25  # and not 30, since interpreters with torch take a while to go
    assert launcher.returncode == 130
    assert not running(str(folder))


@pytest.mark.parametrize("names", [("SIGHUP", "SIGHUP"), ("SIGUSR1", "SIGTERM")])
def test_another_signal_leaves_ranks_the_time_to_save(started, script, tmp_path, wait_for, names):
    save = script(
        """
        import signal
        def save(*_):
            open(f'{sys.argv[1]}/saving-{rank}', 'w').close()
            time.sleep(2)
            open(f'{sys.argv[1]}/saved-{rank}', 'w').close()
            sys.exit(0)
        signal.signal(getattr(signal, sys.argv[2]), save)
        open(f'{sys.argv[1]}/ready-{rank}', 'w').close()
        time.sleep(60)
        """
    )
    first, second = (getattr(signal, name) for name in names)
    launcher = started("-n", 2, save, tmp_path, names[0])
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    launcher.send_signal(first)
    wait_for(lambda: len(list(tmp_path.glob("saving-*"))) == 2)
    launcher.send_signal(second)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + first
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_ranks_that_do_not_end_after_a_signal_are_killed(run, running):
    launcher, folder = run("stay", "--shutdown_timeout", 1)
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert not running(str(folder))


def test_nothing_outlives_a_launcher_that_is_killed(run, running, wait_for):
    launcher, folder = run("stay")
    assert len(running(str(folder))) == 5  # the launcher, two ranks, and the process that each of them started
    launcher.kill()
    wait_for(lambda: not running(str(folder)), timeout_s=40)
    _, err = launcher.communicate(timeout=60)
    assert f"the launcher (PID {launcher.pid}) is gone" in err
    assert not running(f"\0{launcher.pid}\0")  # the guardian, which was told whom it guards


def test_a_killed_rank_is_named_and_ends_the_run(run, running, wait_for):
    launcher, folder = run("stay", "--shutdown_timeout", 1)
    ranks = [pid for pid in running(str(folder)) if b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    second = min(ranks)  # the other is the process that it started
    os.kill(second, signal.SIGKILL)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 137
    assert f"rank 1 (PID {second}) failed first" in err
    assert "out of memory" in err
    assert not running(str(folder))


def test_a_launch_within_a_launch_ends_with_the_outer_one(started, script, tmp_path, running, wait_for):
    inner = script(f"open('{tmp_path}/ready', 'w').close()\ntime.sleep(90)", "inner.py")
    outer = started("-n", 1, "-m", "composer_dist.launch", "-n", 1, inner)
    wait_for(lambda: (tmp_path / "ready").exists())
    outer.kill()
    wait_for(lambda: not running(inner), timeout_s=40)


def test_the_command_answers_by_its_name(started):
    out, _ = started("--version").communicate(timeout=60)
    assert out.startswith("MosaicML Composer ")
    assert out.count("\n") == 1
    assert sys.version_info >= (3, 11)
