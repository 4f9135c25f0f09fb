"""Launches of real processes from within this one, which has torch loaded already."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_every_rank_has_its_variables_and_arguments(launch, script, tmp_path, environ):
    environ["OUT"], environ["HOME"] = str(tmp_path), "/home/someone"
    dump = script(
        """
        import json
        with open(f"{os.environ['OUT']}/{rank}.json", "w") as file:
            json.dump([sys.argv[1:], os.getcwd(), dict(os.environ)], file)
        """
    )
    before = dict(os.environ)
    status, *_ = launch("-n", 2, "--master_port", 29501, dump, "~/a", "run-$RANK-${WORLD_SIZE}", "$NOPE", "--x", "a ~")
    assert status == 0
    assert dict(os.environ) == before
    for rank in range(2):
        arguments, folder, variables = json.loads((tmp_path / f"{rank}.json").read_text())
        assert arguments == ["/home/someone/a", f"run-{rank}-2", "$NOPE", "--x", "a ~"]
        assert folder == os.getcwd()
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29501",
            "PYTHONUNBUFFERED": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
            "OUT": str(tmp_path),
        }
        assert expected.items() <= variables.items()
        assert variables["COMPOSER_ERROR_FILE"] == variables["TORCHELASTIC_ERROR_FILE"]


def test_the_meeting_point_is_open_before_any_rank_starts(launch, script):
    call = script(
        """
        import socket
        socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])), timeout=1).close()
        """
    )
    assert launch("-n", 2, call)[0] == 0


def test_number_of_threads_is_the_users_if_set(launch, script, environ):
    environ["OMP_NUM_THREADS"] = "7"
    _, out, _ = launch("-n", 2, script("print(os.environ['OMP_NUM_THREADS'] if rank == '0' else '')"))
    assert out.split() == ["7"]


def test_nodes_of_different_size_count_their_ranks_from_the_base_rank(launch, script):
    show = script(
        "print(rank, os.environ['WORLD_SIZE'], os.environ['NODE_RANK'], os.environ['LOCAL_RANK'], flush=True)"
    )
    places = "--world_size 5 --node_rank 1 --base_rank 3 --master_addr 127.0.0.1 --master_port 1 --hang-timeout off"
    status, out, _ = launch("-n", 2, *places.split(), "--tee", show)
    assert status == 0
    assert sorted(out.splitlines()) == ["[rank 3]:3 5 1 0", "[rank 4]:4 5 1 1"]


def test_a_module_or_a_command_runs_instead_of_a_script(launch, tmp_path, environ):
    (tmp_path / "mod.py").write_text("import sys; print(__name__, sys.argv[1:])")
    environ["PYTHONPATH"] = str(tmp_path)
    assert launch("-n", 1, "-m", "mod", "$RANK")[1].strip() == "__main__ ['0']"
    assert launch("-n", 1, "--command-mode", "echo", "rank", "$RANK")[1].strip() == "rank 0"


def test_only_the_first_rank_writes_to_the_console(launch, script):
    status, out, err = launch("-n", 2, script("print('out', rank); print('err', rank, file=sys.stderr)"))
    assert (status, out.split("\n"), err.split("\n")) == (0, ["out 0", ""], ["err 0", ""])


def test_named_files_are_appended_to_and_folders_made(launch, script, tmp_path):
    show = script("print('out', sys.argv[1]); print('err without end', end='', file=sys.stderr)")
    formats = ["--stdout", tmp_path / "new/out_{rank}.log", "--stderr", tmp_path / "err_{local_rank}_{world_size}.log"]
    for run in ("first", "second"):
        assert launch("-n", 3, *formats, show, run)[0] == 0
    files = sorted(path.name for path in [*(tmp_path / "new").iterdir(), *tmp_path.glob("err*")])
    assert files == ["err_1_3.log", "err_2_3.log", "out_1.log", "out_2.log"]
    assert (tmp_path / "new/out_1.log").read_text() == "out first\nout second\n"
    assert (tmp_path / "err_2_3.log").read_text() == "err without end" * 2


def test_ranks_may_share_a_file_and_no_line_is_lost(launch, script, tmp_path):
    show = script("for i in range(100): print(rank, i)")
    launch("-n", 3, "--stdout", tmp_path / "all.log", "--stderr", tmp_path / "all.log", show)
    lines = (tmp_path / "all.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("1 ")] == [f"1 {i}" for i in range(100)]
    assert len(lines) == 200


def test_a_filter_shows_matching_lines_of_the_other_ranks(launch, script):
    _, out, _ = launch("-n", 2, "--log_filter", "loss=[0-9]+", script("print('loss=3'); print('x', rank)"))
    assert sorted(out.splitlines()) == ["[rank 1]:loss=3", "loss=3", "x 0"]


def test_a_folder_for_logs_keeps_every_attempts_files(launch, script, tmp_path):
    assert launch("-n", 2, "--log_dir", tmp_path / "logs", script("print('out', rank)"))[0] == 0
    (run,) = (tmp_path / "logs").iterdir()
    assert (run / "attempt_0/1/stdout.log").read_text() == "out 1\n"


def test_a_hosted_platform_collects_both_streams_in_its_own_files(launch, script, tmp_path, environ):
    environ["MOSAICML_PLATFORM"], environ["MOSAICML_LOG_DIR"] = "true", str(tmp_path / "platform")
    environ["MOSAICML_GPU_LOG_FILE_PREFIX"] = "gpu_"
    show = script("print('out', rank); print('err', rank, file=sys.stderr)")
    launch("-n", 2, "--stdout", tmp_path / "mine_{rank}", show)
    assert sorted((tmp_path / "platform/gpu_1.txt").read_text().splitlines()) == ["err 1", "out 1"]
    assert not list(tmp_path.glob("mine*"))


@pytest.mark.parametrize(
    ("body", "expected", "words"),
    [
        ("sys.exit(7)", 7, "exited with code 7 (root cause)"),
        ("raise RuntimeError('boom')", 1, "exited with code 1 (root cause)"),
        ("os.kill(os.getpid(), 11)", 139, "exited with code 139 (killed by SIGSEGV) (root cause)"),
        ("os.kill(os.getpid(), 9)", 137, "exited with code 137 (killed by SIGKILL) (root cause)"),
    ],
)
def test_the_exit_status_is_that_of_the_rank_that_failed(launch, script, body, expected, words):
    fail = script(f"print('last words', file=sys.stderr)\nif rank == '1':\n    {body}\ntime.sleep(60)")
    status, out, err = launch("-n", 2, fail)
    assert status == expected
    assert f"Global rank 1 (PID " in out  # noqa: F541
    assert words in out
    block = out.partition("----------Begin global rank 1 STDERR----------\n")[2]
    assert block.startswith("last words\n")
    assert "Global rank 0" not in out
    assert f"composer: Rank 1 crashed with exit code {expected}." in err


def test_the_traceback_of_the_first_failure_is_the_last_thing_said(launch, script):
    fail = script(
        """
        if rank == '1':
            try:
                {}['cause']
            except KeyError:
                raise RuntimeError('boom')
        time.sleep(60)
        """
    )
    _, _, err = launch("-n", 2, fail)
    assert err.rstrip().endswith("RuntimeError: boom")
    last = err[err.index("composer: error: rank 1 (PID ") :]
    assert "failed first" in last
    assert "KeyError: 'cause'" in last


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("exec('1 +')", "SyntaxError: invalid syntax"),
    ],
)
def test_a_first_ranks_traceback_is_the_last_thing_said_too(started, script, body, error):
    fail = started("-n", 2, script(f"if rank == '0': {body}\ntime.sleep(60)"), stderr=subprocess.STDOUT)
    said = fail.communicate(timeout=60)[0].rstrip()
    assert fail.returncode == 1
    last = said[said.rindex("Traceback (most recent call last):") :]
    assert last.endswith(error)
    assert "composer: " not in last


def test_one_line_follows_what_a_first_rank_wrote_without_a_traceback(started, script):
    fail = started("-n", 2, script("if rank == '0': sys.exit('no data')\ntime.sleep(60)"), stderr=subprocess.STDOUT)
    lines = fail.communicate(timeout=60)[0].splitlines()
    assert fail.returncode == 1
    assert lines[-2] == "no data"
    assert lines[-1].startswith("Global rank 0 (PID ")
    assert "exited with code 1 (root cause)" in lines[-1]


def test_the_hook_leaves_the_search_path_and_other_hooks_as_they_were(launch, script, tmp_path, environ):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/sitecustomize.py").write_text("import builtins; builtins.theirs = True")
    show = script(
        "print([p for p in sys.path if p.endswith('/hook')], os.environ.get('PYTHONPATH'), "
        "hasattr(__builtins__, 'theirs'))"
    )
    environ.pop("PYTHONPATH", None)
    assert launch("-n", 1, show)[1].strip() == "[] None False"
    environ["PYTHONPATH"] = str(tmp_path / "theirs")
    assert launch("-n", 1, show)[1].strip() == f"[] {tmp_path / 'theirs'} True"


@pytest.mark.parametrize(("after", "expected"), [("", 0), ("sys.exit(3)", 3)])
def test_a_process_that_a_rank_started_does_not_speak_for_it(launch, script, after, expected):
    fail = script(
        f"""
        import subprocess
        helper = "from composer_dist import error_file; error_file.install(); raise ValueError('a helper')"
        if rank == '1':
            subprocess.run([sys.executable, '-c', helper])
            time.sleep(6)
            {after}
        """
    )
    status, _, err = launch("-n", 2, fail)
    assert status == expected
    assert ("ValueError: a helper" in err) == bool(expected)


@pytest.mark.parametrize("detached", ["False", "True"])
def test_a_process_that_writes_for_ever_does_not_keep_the_launcher(launch, script, tmp_path, detached):
    leave = script(
        f"""
        import subprocess
        if rank == '1':
            endless = 'echo y; echo y; touch "$0"; while :; do echo y; done'
            subprocess.Popen(['sh', '-c', endless, sys.argv[1]], start_new_session={detached})
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
        """
    )
    start = time.monotonic()
    try:
        assert launch("-n", 2, "--stdout", tmp_path / "out_{rank}.log", leave, tmp_path / "writes")[0] == 0
        assert time.monotonic() - start < 120
        assert (tmp_path / "out_1.log").read_text().startswith("y\ny\n")
    finally:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"while :; do echo y" in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


@pytest.mark.parametrize("tee", [False, True])
def test_output_is_copied_while_the_ranks_run(launch, script, tmp_path, tee):
    look = script(
        """
        print('here', flush=True)
        until = time.monotonic() + 60
        while rank == '0' and 'here' not in (open(sys.argv[1]).read() if os.path.exists(sys.argv[1]) else ''):
            assert time.monotonic() < until
            time.sleep(0.05)
        """
    )
    status, out, _ = launch(
        "-n", 2, *["--tee"] * tee, "--stdout", tmp_path / "out_{rank}.log", look, tmp_path / "out_1.log"
    )
    assert status == 0
    assert ("[rank 1]:here" in out) == tee


def test_letters_that_the_console_does_not_have_change_no_exit_status(started, script, environ):
    environ["PYTHONIOENCODING"] = "ascii"
    launcher = started("-n", 2, script("sys.stdout.buffer.write('\u2603\\n'.encode())\nsys.exit(7 * int(rank))"))
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 7, err
    assert "\\u2603" in out


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", ">/dev/full", ">/dev/full 2>&1"])
def test_a_console_that_is_closed_or_full_changes_no_exit_status(script, redirection):
    fail = script("sys.exit(7 * int(rank))")
    command = f"{sys.executable} -m composer_dist.launch -n 2 {fail} {redirection}"
    assert subprocess.run(command, shell=True, stderr=subprocess.DEVNULL, timeout=60).returncode == 7


def test_an_error_file_tells_the_first_failure_with_its_event(launch, script, tmp_path):
    fail = script(
        """
        from composer_dist import error_file
        error_file.install()
        class Failure(RuntimeError):
            event = "after_loss"
        if rank == '0':
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            raise ValueError('connection closed by peer')
        # The cause, although this process ends later: what is registered runs after the error file is written.
        import atexit; atexit.register(time.sleep, 1.0); atexit.register(lambda: open(sys.argv[1], 'w').close())
        error = Failure('boom'); error.add_note('in MixUp')
        raise error
        """
    )
    status, out, err = launch("-n", 2, fail, tmp_path / "failed")
    assert status == 1
    assert "Failure: boom during the event after_loss" in out
    last = err[err.index("composer: error: ") :]
    assert "rank 1 (PID " in last.splitlines()[0]
    assert "connection closed" not in last
    assert err.rstrip().endswith("Failure: boom\nin MixUp")


def test_a_rank_that_raised_and_does_not_end_is_a_failure(launch, script):
    hang = script(
        """
        from composer_dist import error_file
        import threading
        error_file.install()
        if rank == '1':
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise RuntimeError('boom')
        time.sleep(60)
        """
    )
    status, out, err = launch("-n", 2, hang)
    assert status == 1
    assert "raised an exception and was stopped (root cause)" in out
    assert err.rstrip().endswith("RuntimeError: boom")


def test_a_rank_that_ignores_being_asked_to_end_is_killed(launch, script):
    stubborn = script(f"{IGNORE_TERM}time.sleep(0.5 if rank == '1' else 60)\nif rank == '1': sys.exit(3)")
    status, out, _ = launch("-n", 2, "--shutdown_timeout", 1, stubborn)
    assert status == 3
    assert "Waiting up to 1 seconds for all training processes to terminate." in out


def test_ten_seconds_after_a_failure_nothing_runs(launch, script, tmp_path):
    stubborn = script(
        f"""
        import pathlib
        {IGNORE_TERM}
        if rank == '1':
            pathlib.Path(sys.argv[1]).write_text(str(time.time()))
            sys.exit(1)
        time.sleep(60)
        """
    )
    assert launch("-n", 2, stubborn, tmp_path / "failed")[0] == 1
    assert time.time() - float((tmp_path / "failed").read_text()) < 10


def test_the_rank_that_others_failed_to_meet_is_the_root_cause(launch, script):
    meet = script(
        """
        import torch
        from composer_dist import dist
        torch.set_num_threads(1)
        dist.initialize_dist("cpu", timeout=60)
        dist.barrier()
        if rank == '1':
            raise RuntimeError('boom')
        dist.barrier()
        """
    )
    status, out, err = launch("-n", 2, meet)
    assert status == 1
    assert "RuntimeError: boom\n" in out.partition("Global rank 1 (PID ")[2]
    assert "composer: error: rank 1 (PID " in err
    assert err.rstrip().endswith("RuntimeError: boom")


@pytest.mark.parametrize("detached", ["False", "True"])
def test_what_a_failed_rank_left_running_is_killed(launch, script, running, detached):
    leave = script(
        f"""
        import subprocess
        subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(61.25)'], start_new_session={detached})
        sys.exit(1 if rank == '1' else 0)
        """
    )
    assert launch("-n", 2, leave)[0] == 1
    assert not running("time.sleep(61.25)")


def test_what_tidies_up_after_a_rank_that_ended_well_is_let_do_so(launch, script, tmp_path):
    tidy = script(
        """
        import pathlib
        rank = os.getppid()
        pathlib.Path(sys.argv[1]).touch()
        while os.getppid() == rank:
            time.sleep(0.01)
        pathlib.Path(sys.argv[2]).touch()
        """,
        "tidy.py",
    )
    leave = script(
        """
        import subprocess
        subprocess.Popen([sys.executable, *sys.argv[1:]])
        while not os.path.exists(sys.argv[2]):  # it has begun, since it is given a second from the end of the ranks
            time.sleep(0.01)
        """
    )
    status, _, err = launch("-n", 1, leave, tidy, tmp_path / "begun", tmp_path / "tidy")
    assert status == 0
    assert (tmp_path / "tidy").exists()
    assert "killed" not in err


def test_a_suspended_rank_is_named_and_ends_the_run(launch, script):
    suspend = script("if rank == '1': os.kill(os.getpid(), 19)\ntime.sleep(60)")
    status, out, err = launch("-n", 2, "--stopped_timeout", 2, suspend)
    assert status == 128 + signal.SIGSTOP
    assert "Global rank 1" in out
    assert "was suspended by SIGSTOP for 2 s (root cause)" in out
    assert "composer: error: rank 1 (PID " in err


def test_logs_of_a_failed_run_are_kept_and_found(launch, script):
    _, _, err = launch("-n", 2, script("print('out', rank)\nif rank == '1': sys.exit(1)"))
    folder = Path(err.partition("the logs are in ")[2].splitlines()[0])
    assert (folder / "attempt_0/1/stdout.log").read_text() == "out 1\n"


def test_long_output_is_cut_to_its_end(launch, script):
    _, out, _ = launch("-n", 2, script("for i in range(1000 * int(rank)): print('line', i)\nsys.exit(int(rank))"))
    assert "line 999\n" in out
    assert "line 800\n" in out
    assert "line 799\n" not in out
    assert "[the last lines; the others are in " in out


def test_a_launch_says_what_it_does_if_asked(launch, script):
    _, _, err = launch("-n", 2, "-v", script(""))
    assert "composer: Rank 0 finished successfully." in err
    assert "composer: Rank 1 finished successfully." in err


def test_another_interpreter_runs_the_ranks(launch, script, tmp_path):
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    assert launch("-n", 1, "--python", other, script("print(sys.argv[0])"))[0] == 0
