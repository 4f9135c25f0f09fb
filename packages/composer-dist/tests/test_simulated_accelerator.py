"""The simulated accelerator behaves as a GPU does where code can be wrong; its numbers are the CPU's."""

import copy
import io
import threading

import pytest
import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from composer_dist import get_rng_state, load_rng_state, seed_context
from composer_dist.testing import SimulatedAccelerator, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch has one accelerator type per process: CUDA")


@pytest.fixture
def accelerator():
    torch.ones(1, requires_grad=True).sum().backward()  # the autograd engine may have started before
    with SimulatedAccelerator() as accelerator:
        yield accelerator


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


def train(device, precision=None):
    network = make_network().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, enabled=precision == torch.float16)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs = torch.randn(4, 2, 4, 4, generator=generator).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, precision, enabled=precision is not None):
            outputs = network(inputs)
            loss = nn.functional.cross_entropy(outputs, torch.tensor([0, 1, 0, 1], device=device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return network, outputs, loss


def test_a_training_loop_ends_with_the_weights_of_the_cpu(accelerator):
    expected, network = train("cpu")[0], train("simgpu")[0]
    for name, tensor in network.state_dict().items():
        assert tensor.device.type == "simgpu"
        torch.testing.assert_close(tensor.cpu(), expected.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize("function", [nn.functional.silu, nn.functional.mish, nn.functional.gelu])
def test_activations_have_the_gradients_of_the_cpu(accelerator, function):
    values = torch.linspace(-4, 4, 101)
    gradients = []
    for device in ("simgpu", "cpu"):
        inputs = values.clone().to(device).requires_grad_()
        function(inputs).sum().backward()
        gradients.append(inputs.grad.cpu())
    assert gradients[0].equal(gradients[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_layers_in_low_precision_and_losses_in_float32(accelerator, dtype):
    network, outputs, loss = train("simgpu", dtype)
    assert (outputs.dtype, loss.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(network[4].weight.cpu(), train("cpu")[0][4].weight, rtol=0, atol=0.3)


MIXES = {
    "add": lambda ours, theirs: ours + theirs,
    "matmul": lambda ours, theirs: ours @ theirs,
    "cat": lambda ours, theirs: torch.cat([ours, theirs]),
    "in place": lambda ours, theirs: theirs.add_(ours),
    "foreach": lambda ours, theirs: torch._foreach_add([ours], [theirs]),
    "fused": lambda ours, theirs: torch._fused_sgd_(
        [ours],
        [theirs],
        [],
        weight_decay=0,
        momentum=0,
        lr=0.1,
        dampening=0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    ),
    "put": lambda ours, theirs: torch.index_put(ours, [torch.tensor([0])], theirs[:1]),
    "not elementwise": lambda ours, theirs: ours.index_add(0, torch.tensor([0]), ours[:1]),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_operations_that_mix_devices_are_refused(accelerator, mix):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(torch.ones(2, 2, device="simgpu"), torch.ones(2, 2))


def test_scalars_and_indices_of_the_host_are_accepted_as_by_cuda(accelerator):
    ones = torch.ones(3, device="simgpu")
    assert (ones * torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert ones[torch.tensor([0, 2])].shape == (2,)
    assert ones.masked_fill(ones > 0, torch.tensor(3.0)).tolist() == [3, 3, 3]


def fill_pinned(ones):
    torch.empty(3, pin_memory=True).copy_(ones, non_blocking=True)


WAITS = {
    "item": (lambda ones: ones[0].item(), 1),
    "if": (lambda ones: 1 if ones.sum() else 0, 1),
    "tolist": (lambda ones: ones.tolist(), 1),
    "cpu": (lambda ones: ones.cpu(), 1),
    "to the device": (lambda ones: torch.ones(3).to("simgpu"), 1),
    "a new tensor": (lambda ones: torch.tensor([1.0], device="simgpu"), 1),
    "nonzero": (lambda ones: ones.nonzero(), 1),
    "mask": (lambda ones: ones[ones > 0], 1),
    "put by mask": (lambda ones: ones.__setitem__(ones > 0, 0.0), 0),
    "synchronize": (lambda ones: torch.accelerator.synchronize(), 1),
    "asynchronous copy to the device": (lambda ones: torch.ones(3).to("simgpu", non_blocking=True), 0),
    "asynchronous copy to the host": (fill_pinned, 0),
    "kernels": (lambda ones: (ones + 1).exp().sum(), 0),
    "constants": (lambda ones: torch.full((2,), 3.0, device="simgpu"), 0),
}


@pytest.mark.parametrize(("call", "expected"), WAITS.values(), ids=WAITS)
def test_waits_of_the_host_are_counted_by_line(accelerator, call, expected):
    ones = torch.ones(3, device="simgpu")
    with accelerator.counting() as counts:
        call(ones)
    call(ones)  # no longer counted
    assert counts.synchronizations.total() == expected
    assert all(__file__ in place for place in counts.synchronizations)


def test_copies_and_kernels_are_counted(accelerator):
    with accelerator.counting() as counts:
        ones = torch.ones(3).to("simgpu", non_blocking=True)  # a copy
        doubled = (ones.view(3, 1) * 2).sum()  # two kernels, and a view, which is none
        doubled.cpu()
    assert counts.copies_to_device.total() == counts.copies_to_host.total() == 1
    assert counts.kernels.total() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_value_that_is_read_before_its_copy_has_arrived_is_garbage(accelerator, dtype):
    ones = torch.ones(2, dtype=dtype, device="simgpu")
    copied = ones.to("cpu", non_blocking=True)
    event = torch.Event("simgpu")
    event.record()
    ones.zero_()  # after the copy in the order of the stream
    assert not copied.equal(torch.ones(2, dtype=dtype))
    assert not event.query()
    event.synchronize()
    assert copied.equal(torch.ones(2, dtype=dtype))
    assert event.query()


def test_an_event_waits_only_for_what_was_launched_before_it_on_its_stream(accelerator):
    ones = torch.ones(2, device="simgpu")
    with torch.Stream("simgpu"):
        elsewhere = ones.to("cpu", non_blocking=True)
    event = torch.Event("simgpu")
    event.record()
    later = ones.to("cpu", non_blocking=True)
    event.synchronize()
    assert elsewhere.isnan().all()
    assert later.isnan().all()
    torch.accelerator.synchronize()
    assert elsewhere.equal(later)
    assert later.equal(torch.ones(2))


def test_pinned_memory_that_is_changed_during_its_copy_is_refused(accelerator):
    pinned = torch.ones(2).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(2).is_pinned()
    pinned.to("simgpu", non_blocking=True)
    torch.accelerator.synchronize()
    pinned.zero_()
    pinned.to("simgpu", non_blocking=True)
    pinned.fill_(3)
    with pytest.raises(RuntimeError, match="Pinned memory was changed"):
        torch.accelerator.synchronize()


def test_more_memory_than_there_is_is_refused_and_freed_memory_comes_back():
    with SimulatedAccelerator(memory_bytes=1000) as accelerator:
        first = torch.zeros(200, device="simgpu")
        view = first[:10]
        assert torch.accelerator.memory_allocated() == 800
        with pytest.raises(torch.OutOfMemoryError, match="simgpu out of memory"):
            torch.zeros(100, device="simgpu")
        del first
        assert torch.accelerator.memory_allocated() == 800, "a view keeps it"
        del view
        assert torch.accelerator.memory_allocated() == 0
        assert torch.accelerator.memory_reserved() == torch.accelerator.max_memory_allocated() == 800
        torch.accelerator.empty_cache()
        assert torch.accelerator.memory_reserved() == 0
        assert accelerator.torch_device == torch.device("simgpu", 0)


@pytest.mark.parametrize("map_location", [None, "cpu"])
def test_tensors_are_saved_and_loaded_as_those_of_any_device(accelerator, map_location):
    network, file = make_network().to("simgpu"), io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location=map_location, weights_only=True)
    assert {tensor.device.type for tensor in loaded.values()} == {map_location or "simgpu"}
    fresh = make_network().to("simgpu")
    fresh.load_state_dict(loaded)
    torch.testing.assert_close(fresh.state_dict(), network.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: unpickled(module)], ids=["copy", "pickle"])
def test_a_module_is_copied_with_its_parameters(accelerator, duplicate):
    network = make_network().to("simgpu")
    copied = duplicate(network)
    with torch.no_grad():
        network[4].weight.zero_()
    assert isinstance(copied[4].weight, nn.Parameter)
    assert copied[4].weight.requires_grad
    assert copied[4].weight.device.type == "simgpu"
    assert copied[4].weight.cpu().equal(make_network()[4].weight)


def unpickled(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_it_draws_from_a_generator_of_its_own(accelerator):
    torch.manual_seed(3)
    on_host = torch.rand(2)
    torch.manual_seed(3)
    on_device = torch.rand(2, device="simgpu")
    assert torch.rand(2).equal(on_host), "the CPU's generator is untouched"
    torch.manual_seed(3)
    assert torch.rand(2, device="simgpu").equal(on_device)


def test_its_generator_is_saved_and_restored_with_the_others(accelerator):
    """Only that of CUDA was."""
    state = get_rng_state()
    first = torch.rand(2, device="simgpu")
    load_rng_state(state)
    assert torch.rand(2, device="simgpu").equal(first)
    with seed_context(3):
        torch.rand(2, device="simgpu")
    load_rng_state(state)
    with seed_context(3):
        torch.rand(2, device="simgpu")
    assert torch.rand(2, device="simgpu").equal(first), "restored after the seeded block"


def test_a_change_of_strides_in_place_is_seen(accelerator):
    changed = torch.ones(2, 3, device="simgpu").t_()
    assert changed.shape == (3, 2)
    changed.data = torch.zeros(4, device="simgpu")
    assert changed.tolist() == [0, 0, 0, 0]


def test_data_of_the_host_is_replaced_by_data_of_the_device(accelerator):
    weight = nn.Parameter(torch.ones(2))
    weight.name_of_the_script = "weight"
    weight.data = weight.data.to("simgpu")
    assert isinstance(weight, nn.Parameter)
    assert (weight.device.type, weight.requires_grad, weight.name_of_the_script) == ("simgpu", True, "weight")
    assert weight.tolist() == [1, 1]


def reduce_on_a_rank():
    rank = tdist.get_rank()
    with SimulatedAccelerator() as accelerator:
        network = DistributedDataParallel(nn.Linear(2, 1, bias=False).to("simgpu"))
        inputs = torch.full((1, 2), float(rank + 1), device="simgpu")
        for _ in range(2):  # the first two copy the order of the gradients
            network(inputs).sum().backward()
        network.zero_grad()
        with accelerator.counting() as counts:
            network(inputs).sum().backward()
            sharded = DTensor.from_local(
                torch.full((1,), rank, device="simgpu"), init_device_mesh("simgpu", (2,)), [Shard(0)]
            )
            whole = sharded.full_tensor()
        return network.module.weight.grad.tolist(), whole.tolist(), counts.synchronizations.total()


def test_ranks_reduce_and_gather_without_waiting(tmp_path):
    for found in run_ranks(reduce_on_a_rank, store=tmp_path / "store"):
        assert found == ([[1.5, 1.5]], [0, 1], 0)


def test_other_threads_make_tensors_too(accelerator):
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.empty(2, device="simgpu").fill_(1).tolist()))
    thread.start()
    thread.join()
    assert made == [[1, 1]]


def test_nothing_is_left_of_it_afterwards():
    names = ("synchronize", "empty_cache", "memory_stats", "current_stream")
    before = [getattr(torch.accelerator, name) for name in names] + [torch.Event, torch.Stream]
    with SimulatedAccelerator() as accelerator:
        assert torch.accelerator.is_available()
        with pytest.raises(RuntimeError, match="in use already"), SimulatedAccelerator():
            pass
        kept = torch.ones(2, device="simgpu")
    assert [getattr(torch.accelerator, name) for name in names] + [torch.Event, torch.Stream] == before
    assert not torch.accelerator.is_available()
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert kept.tolist() == [1, 1]
    with accelerator:
        assert torch.ones(2, device="simgpu").tolist() == [1, 1]
