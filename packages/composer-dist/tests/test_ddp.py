from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from composer_dist import (
    DDP,
    DDPSyncStrategy,
    SingleDevice,
    Strategy,
    ddp_sync_context,
    dist,
    get_device,
    is_model_ddp,
    prepare_ddp_module,
)
from composer_dist.testing import run_ranks

CPU = get_device("cpu")
# Gradients on rank 0 of three parameters of which a step uses two: where rank r's loss is -(r + 1) times the
# parameter in use, the mean of the two ranks' gradients is -1.5.
AFTER_EACH_MICROBATCH = {
    "single_auto_sync": [[-1.0, None, None], [-1.5, -1.5, None]],
    "multi_auto_sync": [[-1.5, None, None], [-1.5, -1.5, None]],
    "forced_sync": [[-1.0, None, None], [-1.0, -1.0, None]],
}
AFTER_THE_LAST = [-1.5, -1.5, None]


class Branches(torch.nn.Module):
    """Uses one of three parameters, as its input says."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(())) for _ in range(3)])

    def forward(self, index, factor):
        return self.weights[index] * factor


class Holder:
    """What a training loop's state shows of its model."""

    def __init__(self, model):
        self.model = model


def gradients_of(model):
    return [None if weight.grad is None else weight.grad.item() for weight in model.weights]


def branch_by_branch(sync_strategy, other_branch_on_rank_1):
    """Return the gradients inside and after the context of each microbatch, by the function and by the strategy."""
    rank = dist.get_global_rank()
    order = [1, 0] if rank == 1 and other_branch_on_rank_1 else [0, 1]
    seen = []
    for by_strategy in (False, True):
        strategy = DDP(CPU, sync_strategy=sync_strategy, find_unused_parameters=True)
        model = Branches()
        wrapped, _ = strategy.prepare(model, [])
        for _ in range(2):  # the first step is special to DistributedDataParallel
            for weight in model.weights:
                weight.grad = None
            step = []
            for position, index in enumerate(order):
                context = (
                    strategy.microbatch(is_last=position == 1)
                    if by_strategy
                    else ddp_sync_context(Holder(wrapped), position == 1, sync_strategy)
                )
                with context:
                    strategy.backward(wrapped(index, -1.0 - rank))
                    step.append(gradients_of(model))
            seen.append((step, gradients_of(model)))
    return seen


@pytest.mark.parametrize("sync_strategy", AFTER_EACH_MICROBATCH)
def test_gradients_are_averaged_when_the_strategy_says(sync_strategy, tmp_path):
    ranks = run_ranks(branch_by_branch, sync_strategy, False, store=tmp_path / "store")
    for inside, after in ranks[0]:
        assert inside == AFTER_EACH_MICROBATCH[sync_strategy]
        assert after == AFTER_THE_LAST
    assert all(after == AFTER_THE_LAST for _, after in ranks[1])


@pytest.mark.parametrize("sync_strategy", AFTER_EACH_MICROBATCH)
def test_ranks_may_use_other_parameters_at_the_same_time(sync_strategy, tmp_path):
    for rank in run_ranks(branch_by_branch, sync_strategy, True, store=tmp_path / "store"):
        assert all(after == AFTER_THE_LAST for _, after in rank)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.Linear(4, 6)
        self.head = torch.nn.Linear(6, 1)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs))).squeeze(-1)


def batches():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(8, 4, generator=generator) for _ in range(4)]


def loss_of(model, inputs):
    return (model(inputs) - inputs.sum(1)).square().mean()


def train(strategy, model, optimizers, rank, share_of_rank, cut):
    """Train on this rank's samples of each batch, as a loop that knows the protocol only."""
    wrapped, (optimizer,) = strategy.prepare(model, optimizers)
    norms, losses = [], []
    for batch in batches():
        mine = batch.split(share_of_rank)[rank]
        (weight,) = strategy.sum([len(mine)])
        strategy.zero_grad(optimizer)
        microbatches = mine.split(cut)
        total = torch.zeros(())
        for index, microbatch in enumerate(microbatches):
            with strategy.microbatch(is_last=index == len(microbatches) - 1):
                share = len(microbatch) * strategy.world_size / weight
                loss = loss_of(wrapped, strategy.prepare_batch(microbatch)) * share
                strategy.backward(loss)
            total += loss.detach()
        norms.append(strategy.clip_grad_norm(wrapped.parameters(), 0.5).item())
        strategy.step(optimizer)
        losses.append(strategy.mean({"loss": total})["loss"].item())
    return strategy.model_state_dict(wrapped), losses, norms


def trained(share_of_rank, cut, options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train(DDP(CPU, **options), model, [optimizer], dist.get_global_rank(), share_of_rank, cut)


def trained_on_one_device(cut=8):
    model = Net()
    return train(SingleDevice(CPU), model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)], 0, 8, cut)


def assert_same_training(seen, expected):
    # The same sums in another order.
    for part, expected_part in zip(seen, expected, strict=True):
        torch.testing.assert_close(part, expected_part, rtol=1e-6, atol=1e-7)


FORCED = {"sync_strategy": "forced_sync"}
UNUSED = {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("share_of_rank", "cut", "options"),
    [
        ([4, 4], 2, UNUSED),
        ([4, 4], 3, UNUSED),
        ([4, 4], 2, FORCED),
        ([4, 4], 2, {**UNUSED, "sync_strategy": "single_auto_sync"}),
        ([5, 3], 5, UNUSED),  # as many microbatches of other sizes
        ([5, 3], 2, FORCED),  # not even as many
        ([6, 2], 2, {**UNUSED, "sync_strategy": "single_auto_sync"}),
    ],
)
def test_a_batch_trains_alike_however_ranks_and_microbatches_share_it(share_of_rank, cut, options, tmp_path):
    expected = trained_on_one_device()
    for seen in run_ranks(trained, share_of_rank, cut, options, store=tmp_path / "store"):
        assert_same_training(seen, expected)


def test_four_ranks_and_four_microbatches_train_alike(tmp_path):
    expected = trained_on_one_device()
    assert_same_training(trained_on_one_device(cut=2), expected)
    for seen in run_ranks(trained, [2] * 4, 2, UNUSED, store=tmp_path / "store", world_size=4):
        assert_same_training(seen, expected)


class TwoLooks(torch.optim.SGD):
    """Looks at a batch twice, as SAM does: climbs along each rank's own gradient, and descends from there."""

    def step(self, closure):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.enable_grad():
            closure(sync=False)
        with torch.no_grad():
            climbs = [parameter.grad * 0.1 for parameter in parameters]
            for parameter, climb in zip(parameters, climbs, strict=True):
                parameter.add_(climb)
        with torch.enable_grad():
            loss = closure(sync=True)
        with torch.no_grad():
            for parameter, climb in zip(parameters, climbs, strict=True):
                parameter.sub_(climb)
        super().step()
        return loss


def two_looks(sync_strategy):
    rank = dist.get_global_rank()
    strategy = DDP(CPU, sync_strategy=sync_strategy)
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    wrapped, (optimizer,) = strategy.prepare(model, [TwoLooks(model.parameters(), lr=0.2)])
    batch = batches()[0].split(4)[rank]
    looks = []

    def closure(sync):
        strategy.zero_grad(optimizer)
        for index, microbatch in enumerate(batch.split(2)):
            with strategy.microbatch(is_last=index == 1, sync=sync):
                loss = wrapped(microbatch).square().mean() / 2
                strategy.backward(loss)
        looks.append([parameter.grad.clone() for parameter in model.parameters()])
        return loss

    strategy.step(optimizer, closure)
    return looks, [parameter.detach() for parameter in model.parameters()]


def gradients_at(weights, batch):
    leaves = [weight.detach().requires_grad_() for weight in weights]
    loss = torch.nn.functional.linear(batch, *leaves).square().mean()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("sync_strategy", AFTER_EACH_MICROBATCH)
def test_an_optimizer_that_looks_twice_sees_its_own_and_then_the_mean_gradient(sync_strategy, tmp_path):
    start = [torch.full((1, 4), 0.5), torch.full((1,), 0.25)]
    parts = batches()[0].split(4)
    own = [gradients_at(start, part) for part in parts]
    climbed = [
        gradients_at([weight + 0.1 * climb for weight, climb in zip(start, climbs, strict=True)], part)
        for climbs, part in zip(own, parts, strict=True)
    ]
    mean = [(one + other) / 2 for one, other in zip(*climbed, strict=True)]
    descended = [weight - 0.2 * gradient for weight, gradient in zip(start, mean, strict=True)]
    for rank, ((first, second), weights) in enumerate(run_ranks(two_looks, sync_strategy, store=tmp_path / "store")):
        torch.testing.assert_close(first, list(own[rank]))
        torch.testing.assert_close(second, mean)
        torch.testing.assert_close(weights, descended)


def compressed(comm_hook):
    strategy = DDP(CPU, comm_hook=comm_hook)
    model = torch.nn.Linear(64, 32)
    wrapped, _ = strategy.prepare(model, [])
    with strategy.microbatch(is_last=True):
        strategy.backward(wrapped(torch.ones(2, 64) * (1.0 + dist.get_global_rank())).sum())
    return model.weight.grad, wrapped._get_ddp_logging_data()["comm_hook"]


@pytest.mark.parametrize("comm_hook", ["bf16_compress", "fp16_compress"])
def test_a_communication_hook_is_chosen_by_name(comm_hook, tmp_path):
    for gradient, name in run_ranks(compressed, comm_hook, store=tmp_path / "store"):
        torch.testing.assert_close(gradient, torch.full((32, 64), 2 * 1.5), rtol=0, atol=0)  # exact in both halves
        assert comm_hook in name


def test_powersgd_needs_numpy_and_averages_plainly_at_first(tmp_path):
    pytest.importorskip("numpy", reason="the wheel alone comes without the extra numpy")
    for gradient, name in run_ranks(compressed, "powersgd", store=tmp_path / "store"):
        torch.testing.assert_close(gradient, torch.full((32, 64), 2 * 1.5), rtol=0, atol=0)
        assert "powerSGD" in name


def prepared_models():
    rank = dist.get_global_rank()
    strategy = DDP(CPU)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapped, _ = strategy.prepare(model, [])
    saved = strategy.model_state_dict(wrapped)
    same_memory = saved["0.weight"].data_ptr() == model[0].weight.data_ptr()
    compiled_names = list(strategy.model_state_dict(torch.compile(wrapped)))
    weights = {name: torch.full_like(value, 2) for name, value in saved.items()}
    keys = strategy.load_model_state_dict(wrapped, weights)
    loaded = model[0].weight.detach().clone()
    # One step on data of its own: the statistics of rank 0 are everyone's in the next.
    for _ in range(2):
        with strategy.microbatch(is_last=True):
            strategy.backward(wrapped(torch.randn(4, 2)).square().mean())
    before = model[1].running_mean.clone()
    with strategy.microbatch(is_last=True):
        wrapped(torch.zeros(4, 2))
    frozen, _ = strategy.prepare(torch.nn.Linear(1, 1).requires_grad_(False), [])
    with DDP(CPU).microbatch(is_last=False):  # nothing is wrapped: nothing to do
        pass
    return list(saved), same_memory, compiled_names, keys, loaded, before, model[1].running_mean, type(frozen)


def test_a_wrapped_model_keeps_its_names_and_shares_rank_0s_buffers(tmp_path):
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    one, other = run_ranks(prepared_models, store=tmp_path / "store")
    for saved, same_memory, compiled_names, keys, loaded, _, _, frozen in (one, other):
        assert saved == compiled_names == names
        assert same_memory
        assert keys == ([], [])
        assert torch.equal(loaded, torch.full((2, 2), 2.0))
        assert frozen is torch.nn.Linear  # there is nothing to train, and nothing to wrap
    assert not torch.equal(one[5], other[5])
    torch.testing.assert_close(one[6], other[6], rtol=0, atol=0)


def test_without_a_process_group_a_model_cannot_be_wrapped():
    with pytest.raises(RuntimeError, match="is not available or has not been initialized"):
        prepare_ddp_module(torch.nn.Linear(1, 1), find_unused_parameters=False)


@pytest.mark.usefixtures("group_of_one")
def test_preparing_wraps_what_can_be_trained():
    layer = torch.nn.Linear(1, 1)
    wrapped = prepare_ddp_module(layer, find_unused_parameters=True)
    assert isinstance(wrapped, DistributedDataParallel)
    assert is_model_ddp(wrapped)
    assert wrapped.find_unused_parameters
    assert wrapped.gradient_as_bucket_view
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    assert prepare_ddp_module(frozen, find_unused_parameters=False) is frozen


@pytest.mark.usefixtures("group_of_one")
def test_ddp_is_a_strategy():
    strategy = DDP(CPU)
    assert isinstance(strategy, Strategy)
    assert strategy.world_size == 1
    assert not strategy.has_own_precision


def test_the_default_depends_on_whether_parameters_may_be_unused():
    assert DDP(CPU).sync_strategy is DDPSyncStrategy.SINGLE_AUTO_SYNC
    assert DDP(CPU, find_unused_parameters=True).sync_strategy is DDPSyncStrategy.MULTI_AUTO_SYNC
    assert DDP(CPU, sync_strategy="FORCED_SYNC").sync_strategy is DDPSyncStrategy.FORCED_SYNC


def test_a_model_that_is_not_wrapped_has_nothing_to_synchronize():
    state = Holder(torch.nn.Linear(1, 1))
    with ddp_sync_context(state, False, "single_auto_sync"):
        state.model(torch.ones(1, 1)).sum().backward()
    assert state.model.weight.grad.item() == 1.0
    with pytest.raises(ValueError, match="some_sync"):
        ddp_sync_context(state, False, "some_sync")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_strategy": "some_sync"}, "some_sync"),
        ({"comm_hook": "zip"}, "comm_hook='zip' is not a communication hook. Use one of bf16_compress, fp16_compress"),
        ({"comm_hook": "powersgd", "sync_strategy": "forced_sync"}, "comm_hook='powersgd' does nothing with"),
    ],
)
def test_options_that_do_not_exist_or_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DDP(CPU, **options)


@pytest.mark.usefixtures("group_of_one")
def test_sparse_gradients_are_refused_where_they_would_be_averaged_as_dense_ones():
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True))
    with pytest.raises(ValueError, match="the model's '0' has sparse ones"):
        DDP(CPU, sync_strategy="forced_sync").prepare(model, [])
    DDP(CPU).prepare(model, [])


@pytest.mark.usefixtures("group_of_one")
def test_an_error_in_a_microbatch_averages_nothing():
    strategy = DDP(CPU, sync_strategy="forced_sync")
    wrapped, _ = strategy.prepare(torch.nn.Linear(1, 1), [])

    def fail():
        with strategy.microbatch(is_last=True):
            strategy.backward(wrapped(torch.ones(1, 1)).sum())
            raise ZeroDivisionError

    torch.distributed.destroy_process_group()  # a collective would fail in another way
    try:
        with pytest.raises(ZeroDivisionError):
            fail()
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


class Normed(torch.nn.Module):
    """Has buffers that differ between the ranks after each forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)

    def forward(self, inputs):
        return self.last(self.norm(inputs))


def steps_with_attempts(sync_strategy, attempts_of_steps):
    """Take steps of two microbatches, each attempted so often, of which all but the last fail on rank 1."""
    rank = dist.get_global_rank()
    strategy = DDP(CPU, sync_strategy=sync_strategy)
    model = Normed()
    wrapped, optimizers = strategy.prepare(model, [torch.optim.SGD(model.parameters(), lr=0.5)])
    generator = torch.Generator().manual_seed(rank)
    for attempts in attempts_of_steps:
        microbatches = [torch.randn(3, 2, generator=generator) for _ in range(2)]
        buffers = [buffer.clone() for buffer in model.buffers()]
        for left in reversed(range(attempts or 1)):
            optimizers[0].zero_grad()
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            check = partial(fail_together, left > 0)
            with suppress(ConnectionError), strategy.attempt(check) if attempts else nullcontext():
                for index, microbatch in enumerate(microbatches):
                    with strategy.microbatch(is_last=index == 1):
                        strategy.backward(wrapped(microbatch).square().mean() / 2)
                    if left and rank == 1:
                        fail_together(True)
        strategy.step(optimizers[0])
    # With this one, the buffers of other ranks than the first are sent anew before each microbatch.
    are_sent_again = sync_strategy == "multi_auto_sync" and rank == 1
    return [value.detach().clone() for value in (model.parameters() if are_sent_again else model.state_dict().values())]


def fail_together(fails):
    """Raise on both ranks if one says so."""
    told = torch.tensor([int(fails)])
    dist.all_reduce(told)
    if told.item():
        raise ConnectionError


@pytest.mark.parametrize("sync_strategy", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
def test_a_step_that_one_rank_gave_up_is_repeated_by_all(sync_strategy, tmp_path):
    repeated = run_ranks(steps_with_attempts, sync_strategy, (1, 3, 2), store=tmp_path / "repeated")
    plain = run_ranks(steps_with_attempts, sync_strategy, (0, 0, 0), store=tmp_path / "plain")

    for one, other in zip(repeated, plain, strict=True):
        # The sum of two ranks' gradients has no order, but that over microbatches and ranks has.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("group_of_one")
def test_an_attempt_goes_past_no_hook():
    strategy = DDP(CPU, comm_hook="bf16_compress")
    with pytest.raises(ValueError, match="comm_hook='bf16_compress' does nothing in a step that may be repeated"):
        strategy.attempt(lambda: None).__enter__()
