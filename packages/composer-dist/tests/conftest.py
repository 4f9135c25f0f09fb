import os

import pytest
import torch
import torch.distributed as tdist
from hypothesis import settings

# A deadline would measure how busy the machine is.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
PREFIXES = ("SLURM_", "OMPI_", "TORCHELASTIC_", "MASTER_")


@pytest.fixture(autouse=True)
def environ():
    """The environment of a process that no launcher started, put back afterwards whatever the test set."""
    before = dict(os.environ)
    for variable in before:
        if variable in RANK_VARIABLES or variable.startswith(PREFIXES):
            del os.environ[variable]
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def group_of_one():
    """A process group that holds only this process."""
    tdist.init_process_group("gloo", store=tdist.HashStore(), rank=0, world_size=1)
    yield
    tdist.destroy_process_group()


@pytest.fixture
def no_group_left():
    """Whatever process group a test made is gone after it."""
    yield
    if tdist.is_initialized():
        tdist.destroy_process_group()


@pytest.fixture
def torch_settings():
    """Torch's settings of determinism, put back afterwards."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    )
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before[1:]
