"""Restarts, with ranks that meet over gloo in each attempt."""

import pytest

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


def test_a_rendezvous_gives_out_the_ranks(launch, script):
    show = script("print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'NODE_RANK', 'LOCAL_WORLD_SIZE')))")
    status, out, _ = launch("-n", 2, "--nnodes", 1, "--tee", show)
    assert status == 0
    assert sorted(out.splitlines()) == ["[rank 0]:0 2 0 2", "[rank 1]:1 2 0 2"]
