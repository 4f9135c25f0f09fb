from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from composer_dist import (
    Device,
    DeviceCPU,
    DeviceGPU,
    DeviceHPU,
    DeviceMPS,
    DeviceNeuron,
    DeviceTPU,
    get_device,
    is_hpu_installed,
    is_xla_installed,
)

Pair = namedtuple("Pair", ["image", "label"])
Single = namedtuple("Single", ["image"])


class DeviceMeta(Device):
    """Torch's device without memory: somewhere else than the CPU that every machine has."""

    name = "meta"

    def module_to_device(self, module):
        return module.to("meta")

    def tensor_to_device(self, tensor):
        return tensor.to("meta")


class Opaque:
    """Something in a batch that is no collection."""


leaves = st.one_of(st.integers(), st.text(), st.binary(), st.none(), st.floats().map(torch.tensor))
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


def same(left, right):
    """Equal structure, and the same objects at its leaves."""
    if isinstance(left, dict):
        return type(right) is dict and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left is right


@given(batches)
def test_a_batch_on_the_device_already_keeps_its_tensors(batch):
    assert same(batch, get_device("cpu").batch_to_device(batch))


def test_every_tensor_of_a_batch_is_moved():
    moved = DeviceMeta().batch_to_device({"x": [torch.ones(2), (torch.ones(1), 3)], "y": torch.ones(1)})
    assert moved["x"][0].is_meta
    assert moved["x"][1][0].is_meta
    assert moved["x"][1][1] == 3
    assert moved["y"].is_meta


def test_replacing_an_item_of_the_moved_batch_leaves_the_original_alone():
    batch = [torch.ones(1), {"y": torch.ones(1)}]
    moved = get_device("cpu").batch_to_device(batch)
    moved[0], moved[1]["y"] = None, None
    assert batch[0] is not None
    assert batch[1]["y"] is not None


@pytest.mark.parametrize("batch", [OrderedDict(x=torch.ones(1)), UserDict(x=torch.ones(1))])
def test_any_mapping_becomes_a_dict(batch):
    moved = get_device("cpu").batch_to_device(batch)
    assert type(moved) is dict
    assert moved["x"] is batch["x"]


@pytest.mark.parametrize("batch", [Pair(torch.ones(1), torch.ones(1)), Single(torch.ones(1)), range(2)])
def test_sequences_that_cannot_be_built_from_their_items_become_lists(batch):
    assert get_device("cpu").batch_to_device(batch) == list(batch)


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_stays_one_and_its_batch_sizes_stay_on_the_cpu(enforce_sorted):
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)], enforce_sorted=enforce_sorted)
    moved = DeviceMeta().batch_to_device({"x": packed})["x"]
    assert type(moved) is PackedSequence
    assert moved.data.is_meta
    assert moved.batch_sizes is packed.batch_sizes
    assert all(i is None or i.is_meta for i in (moved.sorted_indices, moved.unsorted_indices))


def test_a_packed_sequence_reads_back_the_same_after_moving():
    sequences = [torch.rand(1, 2), torch.rand(3, 2)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    for back, sequence in zip(unpack_sequence(get_device("cpu").batch_to_device(packed)), sequences, strict=True):
        assert torch.equal(back, sequence)


def test_what_is_no_collection_stays_as_it_is():
    thing = Opaque()
    assert DeviceMeta().batch_to_device(thing) is thing
    assert DeviceMeta().batch_to_device("text") == "text"


def optimizer_after_a_step():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer, optimizer.state[parameter]


@pytest.mark.parametrize("capturable", [False, True])
def test_an_optimizers_state_is_moved_but_for_the_steps_that_the_host_counts(capturable):
    optimizer, state = optimizer_after_a_step()
    optimizer.param_groups[0]["capturable"] = capturable
    assert DeviceMeta().optimizer_to_device(optimizer) is optimizer
    assert state["exp_avg"].is_meta
    assert state["exp_avg_sq"].is_meta
    assert state["step"].is_meta == capturable


def test_an_optimizers_state_on_the_device_stays_the_same():
    optimizer, state = optimizer_after_a_step()
    before = dict(state)
    get_device("cpu").optimizer_to_device(optimizer)
    assert all(state[key] is before[key] for key in before)


def test_a_module_keeps_its_parameters():
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    assert get_device("cpu").module_to_device(module) is module
    assert module.weight is weight


@pytest.mark.parametrize("name", ["cpu", "CPU", "Cpu"])
def test_a_device_has_a_name_in_any_case(name):
    device = get_device(name)
    assert type(device) is DeviceCPU
    assert (device.name, device.dist_backend, device.torch_device) == ("cpu", "gloo", torch.device("cpu"))


def test_a_device_is_its_own():
    device = DeviceCPU()
    assert get_device(device) is device


@pytest.mark.parametrize("name", ["quantum", "", 3])
def test_an_unknown_device_is_refused_with_those_that_exist(name):
    with pytest.raises(ValueError, match=f"device={name!r} is not a device. Use one of 'cpu', 'gpu', 'cuda'"):
        get_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_without_a_gpu_the_cpu_is_taken_only_where_nothing_was_asked_for(name):
    assert type(get_device()) is DeviceCPU
    with pytest.raises(ValueError, match="device='gpu' needs a CUDA device"):
        get_device(name)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an MPS device")
def test_a_missing_mps_device_says_why():
    with pytest.raises(RuntimeError, match=r"device='mps' is not available: (torch was|this computer)"):
        get_device("mps")


@pytest.mark.skipif(is_xla_installed(), reason="torch_xla is installed")
@pytest.mark.parametrize("name", ["tpu", "neuron"])
def test_xla_devices_name_the_missing_package_and_leave_the_environment_alone(name, environ):
    before = dict(environ)
    with pytest.raises(ImportError, match=f"device='{name}' needs the package 'torch_xla'"):
        get_device(name)
    assert dict(environ) == before


@pytest.mark.skipif(is_hpu_installed(), reason="habana_frameworks is installed")
def test_habana_devices_name_the_missing_package():
    with pytest.raises(ImportError, match="device='hpu' needs the package 'habana_frameworks'"):
        get_device("hpu")


@pytest.mark.parametrize(
    ("kind", "name", "backend"),
    [
        (DeviceCPU, "cpu", "gloo"),
        (DeviceGPU, "gpu", "nccl"),
        (DeviceMPS, "mps", ""),
        (DeviceTPU, "tpu", "xla"),
        (DeviceNeuron, "neuron", "xla"),
        (DeviceHPU, "hpu", "hccl"),
    ],
)
def test_every_kind_of_device_says_its_name_and_backend(kind, name, backend):
    assert (kind.name, kind.dist_backend) == (name, backend)


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("allow_tf32", [True, False])
def test_a_gpu_becomes_the_current_device(allow_tf32):
    device = DeviceGPU(0, allow_tf32=allow_tf32)
    assert device.tensor_to_device(torch.ones(1)).device == torch.device("cuda", torch.cuda.current_device())
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == allow_tf32
    with pytest.raises(ValueError, match="device_id=1000 is not a CUDA device of this node"):
        DeviceGPU(1000)
