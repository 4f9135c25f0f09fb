"""Two launchers on this machine, as if on two machines."""

import pytest

from composer_dist import get_free_tcp_port

MEET = """
import torch, torch.distributed as tdist
from composer_dist import dist
torch.set_num_threads(1)
dist.initialize_dist("cpu", timeout=60)
numbers = dist.all_gather_object([dist.get_global_rank(), dist.get_node_rank(), dist.get_local_rank()])
attempt = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))
if attempt < int(sys.argv[1]) and rank == '1':
    raise RuntimeError(f'boom {attempt}')
dist.barrier()
if dist.get_local_rank() == 0:
    print('met', attempt, numbers)
"""


@pytest.mark.slow
def test_nodes_of_different_size_meet(started, script):
    meet, address = (
        script(MEET),
        ["--world_size", 3, "--master_addr", "localhost", "--master_port", get_free_tcp_port()],
    )
    first = started("-n", 1, *address, "--node_rank", 0, "--base_rank", 0, meet, 0)
    second = started("-n", 2, *address, "--node_rank", 1, "--base_rank", 1, meet, 0)
    for launcher in (first, second):
        out, err = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, err
        assert out.strip() == "met 0 [[0, 0, 0], [1, 1, 0], [2, 1, 1]]"


@pytest.mark.slow
def test_nodes_that_met_once_meet_again_after_a_failure(started, script):
    endpoint = ["--rdzv_endpoint", f"localhost:{get_free_tcp_port()}", "--rdzv_id", "job"]
    arguments = ["-n", 1, "--nnodes", 2, "--max_restarts", 2, *endpoint, script(MEET), 2]
    launchers = [started(*arguments), started(*arguments)]
    for launcher in launchers:
        out, err = launcher.communicate(timeout=180)
        assert launcher.returncode == 0, err
        assert out.splitlines()[-1] == "met 2 [[0, 0, 0], [1, 1, 0]]"
