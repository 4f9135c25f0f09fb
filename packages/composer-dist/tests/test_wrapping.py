import subprocess
import sys

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from composer_dist import is_model_ddp, is_model_deepspeed, unwrap_model


@pytest.mark.usefixtures("group_of_one")
def test_a_model_is_ddp_once_it_is_wrapped():
    model = torch.nn.Linear(2, 1)
    assert not is_model_ddp(model)
    assert is_model_ddp(DistributedDataParallel(model))


@pytest.mark.usefixtures("group_of_one")
def test_a_model_with_a_wrapped_part_is_not_ddp_itself():
    assert not is_model_ddp(torch.nn.Sequential(DistributedDataParallel(torch.nn.Linear(2, 1))))


def test_a_subclass_of_ddp_is_ddp(group_of_one):
    class Wrapped(DistributedDataParallel):
        pass

    assert is_model_ddp(Wrapped(torch.nn.Linear(2, 1)))


def test_torch_is_not_imported_before_the_question_is_asked():
    code = "import composer_dist.wrapping, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_is_no_engine_and_deepspeed_is_not_imported_to_know():
    loaded = "deepspeed" in sys.modules
    assert not is_model_deepspeed(torch.nn.Linear(2, 1))
    assert ("deepspeed" in sys.modules) == loaded


@pytest.mark.usefixtures("group_of_one")
def test_the_model_is_found_inside_whatever_wraps_it():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    model.module = torch.nn.Linear(1, 1)  # a part that has the name that wrappers use
    assert unwrap_model(model) is model
    assert unwrap_model(torch.compile(DistributedDataParallel(model))) is model
    assert unwrap_model(DistributedDataParallel(torch.compile(model))) is model
