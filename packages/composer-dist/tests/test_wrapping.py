import subprocess
import sys

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from composer_dist import is_model_ddp, is_model_deepspeed, is_model_fsdp, is_model_fsdp2, unwrap_model
from composer_dist.wrapping import canonical_name


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


def put(shard):
    """Put what `shard` makes of a layer at the root of a model, below it, and one further down."""
    root = shard(torch.nn.Linear(2, 1))
    child = torch.nn.Sequential(shard(torch.nn.Linear(2, 1)))
    grandchild = torch.nn.Sequential(torch.nn.Sequential(shard(torch.nn.Linear(2, 1))))
    return root, child, grandchild


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_a_model_is_fsdp_of_its_version_if_it_is_sharded_itself_or_a_direct_child_is():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    first = put(lambda layer: FullyShardedDataParallel(layer, device_id=torch.device("cpu")))
    second = put(lambda layer: fully_shard(layer, mesh=mesh))
    assert [is_model_fsdp(model) for model in (*first, *second)] == [True, True, False] + [False] * 3
    assert [is_model_fsdp2(model) for model in (*first, *second)] == [False] * 3 + [True, True, False]
    assert not is_model_fsdp(None)


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


def test_a_parameter_has_one_name_however_parts_of_the_model_are_wrapped():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    names = [name for name, _ in model.named_parameters()]
    model[0] = checkpoint_wrapper(torch.compile(model[0]))
    assert [canonical_name(name) for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_parameters()] != names


def test_a_part_that_is_called_module_by_its_model_keeps_its_name():
    assert canonical_name("module.my_orig_mod.weight") == "module.my_orig_mod.weight"
