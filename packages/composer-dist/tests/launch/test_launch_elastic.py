"""Restarts, with ranks that meet over gloo in each attempt."""

from pathlib import Path

import pytest

from composer_dist import get_free_tcp_port

REDUCE = """
import torch, torch.distributed as tdist
from composer_dist import dist
torch.set_num_threads(1)
dist.initialize_dist("cpu", timeout=60)
assert dist.get_node_rank() == 0
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == 2
attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
print('attempt', attempt, 'rank', rank, os.environ.get('COMPOSER_ELASTIC_BATCH'))
if attempt < int(sys.argv[1]) and rank == '1':
    raise RuntimeError(f'boom {attempt}')
dist.barrier()
"""


@pytest.mark.slow
def test_ranks_that_fail_twice_are_started_a_third_time_and_meet(launch, script, tmp_path):
    arguments = ["--max_restarts", 2, "--log_dir", tmp_path / "logs", "--elastic_batch", "keep-global"]
    status, out, err = launch("-n", 2, *arguments, script(REDUCE), 2)
    assert status == 0, err
    assert [line for line in out.splitlines() if line.startswith("attempt")] == [
        f"attempt {attempt} rank 0 keep-global" for attempt in range(3)
    ]
    assert err.count("failed; starting all ranks again.") == 2
    (run,) = (tmp_path / "logs").iterdir()
    assert sorted(path.name for path in run.iterdir()) == ["attempt_0", "attempt_1", "attempt_2"]


def test_restarts_that_are_used_up_end_with_the_last_attempts_failure(launch, script):
    fail = script("sys.exit(3 + int(os.environ['TORCHELASTIC_RESTART_COUNT']) if rank == '1' else 0)")
    status, out, err = launch("-n", 2, "--max_restarts", 1, fail)
    assert status == 4
    assert out.count("(root cause)") == 1
    assert "starting all ranks again" in err


def test_each_failed_attempt_tells_its_root_cause_and_keeps_its_logs(launch, script):
    fail = script("if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and rank == '1': raise ValueError('first boom')")
    status, _, err = launch("-n", 2, "--max_restarts", 1, fail)
    assert status == 0
    assert "composer: error: rank 1 (PID " in err
    assert "ValueError: first boom\n" in err
    folder = Path(err.partition("the logs are in ")[2].splitlines()[0])
    assert "first boom" in (folder / "attempt_0/1/stderr.log").read_text()


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes through Linux's /proc")
def test_nothing_of_a_failed_attempt_runs_in_the_next(launch, script, tmp_path):
    leave = script(
        """
        import pathlib, subprocess
        left = pathlib.Path(sys.argv[1])
        if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
            if rank == '1':
                sleep = [sys.executable, '-c', 'import time; time.sleep(62.5)']
                left.write_text(str(subprocess.Popen(sleep, start_new_session=True).pid))
                sys.exit(1)
            time.sleep(60)
        command = pathlib.Path(f'/proc/{left.read_text()}/cmdline')
        sys.exit(5 if command.exists() and command.read_bytes() else 0)  # a zombie's is empty
        """
    )
    status, _, err = launch("-n", 2, "--max_restarts", 1, leave, tmp_path / "left")
    assert status == 0, err


def test_a_signal_while_a_failed_attempt_ends_keeps_the_next_one_from_starting(started, script, tmp_path, wait_for):
    slow = script(
        f"""
        import signal
        def end(*_):
            open('{tmp_path}/ending', 'w').close()
            time.sleep(2)
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        open(f'{tmp_path}/attempt-{{os.environ["TORCHELASTIC_RESTART_COUNT"]}}-{{rank}}', 'w').close()
        time.sleep(1.5 if rank == '1' else 60)
        sys.exit(1)
        """
    )
    launcher = started("-n", 2, "--max_restarts", 1, slow)
    wait_for(lambda: (tmp_path / "ending").exists())
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert not list(tmp_path.glob("attempt-1-*"))


def test_the_rendezvous_of_one_node_is_at_the_port_that_was_named(launch, script):
    port = get_free_tcp_port()
    call = script("import socket; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5).close()")
    assert launch("-n", 1, "--max_restarts", 1, "--master_port", port, call, port)[0] == 0


def test_a_rendezvous_gives_out_the_ranks(launch, script):
    show = script("print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'NODE_RANK', 'LOCAL_WORLD_SIZE')))")
    status, out, _ = launch("-n", 2, "--nnodes", 1, "--tee", show)
    assert status == 0
    assert sorted(out.splitlines()) == ["[rank 0]:0 2 0 2", "[rank 1]:1 2 0 2"]
