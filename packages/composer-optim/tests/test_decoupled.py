import copy
import importlib
import logging
import math
import pickle
import re

import pytest
import torch
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.testing import assert_close

from composer_dist.testing import SimulatedAccelerator
from composer_optim import DecoupledAdamW, DecoupledSGDW

SHAPES = [(3,), (4, 2), (2, 3, 2)]


def make_params(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in SHAPES]


def set_grads(params, step, sign=1):
    """Give every parameter the gradient that it is to have in this step."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = sign * torch.randn(param.shape, generator=generator, dtype=param.dtype)


def train(optimizer, rates, params=None, sign=1):
    """Step once for each learning rate."""
    params = [param for group in optimizer.param_groups for param in group["params"]] if params is None else params
    for step, lr in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = lr
        set_grads(params, step, sign)
        optimizer.step()
    return params


RATES = [0.1, 0.05, 0.0, 0.2, 0.1]


def plain_sgdw(rates, weight_decay, momentum, dampening, nesterov):
    """The rule of the paper, one number at a time in Python's floats."""
    weights = [param.detach().flatten().tolist() for param in make_params()]
    momenta = [[None] * len(each) for each in weights]
    grads = make_params()
    for step, lr in enumerate(rates):
        set_grads(grads, step)
        for each, momentum_of, grad_of in zip(weights, momenta, grads, strict=True):
            for i, grad in enumerate(grad_of.grad.flatten().tolist()):
                each[i] *= 1 - lr / rates[0] * weight_decay
                if momentum:
                    kept = momentum_of[i]
                    momentum_of[i] = grad if kept is None else momentum * kept + (1 - dampening) * grad
                    grad = grad + momentum * momentum_of[i] if nesterov else momentum_of[i]
                each[i] -= lr * grad
    return weights


def plain_adamw(rates, weight_decay, amsgrad=False, betas=(0.9, 0.95), eps=1e-8, cautious=False, clip=False):
    """The rule of the paper, one number at a time in Python's floats."""
    weights = [param.detach().flatten().tolist() for param in make_params()]
    moments = [[(0.0, 0.0, 0.0)] * len(each) for each in weights]
    grads = make_params()
    for step, lr in enumerate(rates):
        set_grads(grads, step)
        for each, moments_of, grad_of in zip(weights, moments, grads, strict=True):
            updates, agreeing, ratios = [], [], []
            for i, grad in enumerate(grad_of.grad.flatten().tolist()):
                first, second, largest = moments_of[i]
                first = betas[0] * first + (1 - betas[0]) * grad
                second = betas[1] * second + (1 - betas[1]) * grad**2
                largest = max(largest, second)
                moments_of[i] = first, second, largest
                root = math.sqrt(largest if amsgrad else second)
                each[i] *= 1 - lr / rates[0] * weight_decay
                updates.append(
                    lr / (1 - betas[0] ** (step + 1)) * first / (root / math.sqrt(1 - betas[1] ** (step + 1)) + eps)
                )
                agreeing.append(first * grad > 0 or not cautious)
                ratios.append(grad**2 * (1 - betas[1] ** (step + 1)) / second)
            factor = len(updates) / (sum(agreeing) + 1) if cautious else 1
            factor /= max(1, math.sqrt(sum(ratios) / len(ratios))) if clip else 1
            for i, update in enumerate(updates):
                each[i] -= factor * agreeing[i] * update
    return weights


KERNELS = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=["default", "loop", "foreach", "fused"])
both = pytest.mark.parametrize("make", [DecoupledSGDW, DecoupledAdamW])


@kernels
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)]
)
def test_sgdw_follows_the_rule(kernel, weight_decay, momentum, dampening, nesterov):
    optimizer = DecoupledSGDW(make_params(), 0.1, momentum, dampening, weight_decay, nesterov, **kernel)
    params = train(optimizer, RATES)
    expected = plain_sgdw(RATES, weight_decay, momentum, dampening, nesterov)
    # Both sides are float64. Some 10 roundings a step, 5 steps, numbers of about 1: 50 * 1.1e-16.
    assert_close([param.detach().flatten().tolist() for param in params], expected, rtol=0, atol=1e-14)


@kernels
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_follows_the_rule(kernel, weight_decay, amsgrad):
    optimizer = DecoupledAdamW(make_params(), 0.1, weight_decay=weight_decay, amsgrad=amsgrad, **kernel)
    params = train(optimizer, RATES)
    expected = plain_adamw(RATES, weight_decay, amsgrad)
    # Both sides are float64. A quotient of roots has some 20 roundings a step, 5 steps: 100 * 1.1e-16.
    assert_close([param.detach().flatten().tolist() for param in params], expected, rtol=0, atol=1e-13)


CHANGES = [{"cautious_updates": True}, {"clip_updates": True}, {"cautious_updates": True, "clip_updates": True}]


@kernels
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_adamw_masks_and_clips_its_updates_and_resumes_so(kernel, changes):
    optimizer = DecoupledAdamW(make_params(), 0.1, weight_decay=5e-4, **changes, **kernel)
    params = train(optimizer, RATES[:2])
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = DecoupledAdamW([param.detach().clone().requires_grad_() for param in params], 1.0)
    resumed.load_state_dict(saved)
    expected = plain_adamw(RATES, 5e-4, cautious=changes.get("cautious_updates"), clip=changes.get("clip_updates"))
    for each in (optimizer, resumed):
        of_each = [param for group in each.param_groups for param in group["params"]]
        for step, lr in list(enumerate(RATES))[2:]:
            each.param_groups[0]["lr"] = lr
            set_grads(of_each, step)
            each.step()
        # PyTorch counts steps in float32, so 1 - 0.95 is known to one part in ten million where it is a tensor.
        assert_close([param.detach().flatten().tolist() for param in of_each], expected, rtol=0, atol=1e-6)


def test_the_updates_of_a_state_of_torchs_adamw_are_masked_as_asked_for():
    theirs = torch.optim.AdamW(make_params(), lr=0.1, weight_decay=0.0)
    train(theirs, RATES[:1])
    mine = DecoupledAdamW(make_params(), lr=0.1, cautious_updates=True)
    mine.load_state_dict(theirs.state_dict())
    assert [group["cautious_updates"] for group in mine.param_groups] == [True]
    with pytest.raises(ValueError, match="must be False for complex parameters"):
        DecoupledAdamW([torch.ones(2, dtype=torch.complex64, requires_grad=True)], clip_updates=True)
    with pytest.raises(TypeError, match="clip_updates='yes'"):
        DecoupledAdamW(make_params(), clip_updates="yes")


@kernels
def test_adamw_is_torchs_with_the_weight_decay_divided_by_the_initial_learning_rate(kernel):
    mine = DecoupledAdamW(make_params(torch.float32), lr=0.1, betas=(0.8, 0.9), weight_decay=5e-4, **kernel)
    theirs = torch.optim.AdamW(make_params(torch.float32), 0.1, (0.8, 0.9), weight_decay=5e-4 / 0.1, **kernel)
    assert_close(train(mine, RATES), train(theirs, RATES), rtol=0, atol=0)


def test_adamw_in_float32_is_within_a_rounding_of_the_rule():
    params = train(DecoupledAdamW(make_params(torch.float32), lr=0.1, weight_decay=5e-4), [0.1])
    without = train(DecoupledAdamW(make_params(torch.float32), lr=0.1, weight_decay=0.0), [0.1])
    # The decay comes first, so it takes its share of the old weights. Numbers up to 2: half of 2^-22, twice.
    expected = [new - 5e-4 * old for new, old in zip(without, make_params(torch.float32), strict=True)]
    assert_close(params, expected, rtol=0, atol=2**-22)


@kernels
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DecoupledSGDW, {"momentum": 0.9}),
        (DecoupledAdamW, {"amsgrad": True}),
        (DecoupledAdamW, {"cautious_updates": True}),
    ],
)
def test_maximize_is_descent_along_the_negated_gradient_with_the_same_decay(make, options, kernel):
    up = make(make_params(), lr=0.1, weight_decay=5e-4, maximize=True, **options, **kernel)
    down = make(make_params(), lr=0.1, weight_decay=5e-4, **options, **kernel)
    # A change of sign rounds nothing.
    assert_close(train(up, RATES), train(down, RATES, sign=-1), rtol=0, atol=0)


@both
def test_the_choice_of_learning_rate_does_not_change_the_decay(make):
    for lr in (1e-4, 1.0):
        params = make_params()
        optimizer = make(params, lr=lr, weight_decay=5e-4)
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        expected = [old.detach() * (1 - 5e-4) for old in make_params()]
        assert_close([param.detach() for param in params], expected, rtol=1e-15, atol=0)


@both
def test_the_decay_follows_the_schedule(make):
    params = make_params()
    optimizer = make(params, lr=0.1, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.5, 1.0][step])
    for param in params:
        param.grad = torch.zeros_like(param)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    expected = [old.detach() * (1 - 0.5 * 5e-4) for old in make_params()]
    assert_close([param.detach() for param in params], expected, rtol=1e-15, atol=0)


@both
def test_a_learning_rate_that_begins_at_zero_decays_in_full(make):
    params = make_params()
    optimizer = make(params, lr=0.0, weight_decay=5e-4)
    set_grads(params, 0)
    optimizer.step()
    expected = [old.detach() * (1 - 5e-4) for old in make_params()]
    assert_close([param.detach() for param in params], expected, rtol=1e-15, atol=0)


@both
def test_groups_keep_their_own_learning_rates_and_decays(make):
    first, second, late = make_params()
    optimizer = make(
        [{"params": [first]}, {"params": [second], "lr": 0.5, "weight_decay": 0.0}], 0.1, weight_decay=5e-4
    )
    for group in optimizer.param_groups:
        group["lr"] /= 2
    optimizer.add_param_group({"params": [late], "lr": 0.3})
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.3]
    for param in (first, second, late):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    olds = [old.detach() for old in make_params()]
    expected = [olds[0] * (1 - 0.5 * 5e-4), olds[1], olds[2] * (1 - 5e-4)]
    assert_close([first.detach(), second.detach(), late.detach()], expected, rtol=1e-15, atol=0)


@both
def test_a_group_without_an_initial_learning_rate_takes_the_present_one(make):
    optimizer = make(make_params(), lr=0.1, weight_decay=5e-4)
    del optimizer.param_groups[0]["initial_lr"]
    train(optimizer, [0.05])
    assert optimizer.param_groups[0]["initial_lr"] == 0.05


@both
def test_a_parameter_without_gradient_stays_as_it_is(make):
    params = make_params()
    optimizer = make(params, lr=0.1, weight_decay=5e-4)
    train(optimizer, RATES, params[1:])
    assert torch.equal(params[0], make_params()[0])
    assert params[0] not in optimizer.state


@both
def test_a_closure_is_called_with_gradients_on_and_its_value_returned(make):
    (param,) = params = [torch.ones(2, requires_grad=True)]
    optimizer = make(params, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (param < 1).all()
    assert optimizer.step() is None


@kernels
@pytest.mark.parametrize(("make", "options"), [(DecoupledSGDW, {"momentum": 0.9}), (DecoupledAdamW, {"amsgrad": True})])
def test_saving_and_loading_midway_is_exact(make, options, kernel, tmp_path):
    def new():
        return make(make_params(torch.float32), lr=0.1, weight_decay=5e-4, **options, **kernel)

    whole = train(new(), RATES + RATES)
    optimizer = new()
    half = train(optimizer, RATES)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    resumed = new()
    resumed.param_groups[0]["lr"] = resumed.param_groups[0]["initial_lr"] = 7.0
    with torch.no_grad():
        for param, old in zip(resumed.param_groups[0]["params"], half, strict=True):
            param.copy_(old)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    params = resumed.param_groups[0]["params"]
    for step, lr in enumerate(RATES, start=len(RATES)):
        resumed.param_groups[0]["lr"] = lr
        set_grads(params, step)
        resumed.step()
    assert all(torch.equal(param, expected) for param, expected in zip(params, whole, strict=True))


@both
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_as_the_original(make, duplicate):
    optimizer = make(make_params(), lr=0.1, weight_decay=5e-4)
    train(optimizer, RATES)
    other = duplicate(optimizer)
    assert all(torch.equal(*pair) for pair in zip(train(optimizer, RATES), train(other, RATES), strict=True))


def test_the_state_has_torchs_keys():
    adamw = DecoupledAdamW(make_params(), amsgrad=True)
    train(adamw, [0.1])
    (state, *_) = adamw.state.values()
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert (state["step"].dtype, state["step"].shape) == (torch.float32, ())

    sgdw = DecoupledSGDW(make_params(), 0.1, momentum=0.9)
    train(sgdw, [0.1])
    assert all(set(state) == {"momentum_buffer"} for state in sgdw.state.values())

    without_momentum = DecoupledSGDW(make_params(), 0.1)
    train(without_momentum, [0.1])
    assert not without_momentum.state


def test_the_state_of_torchs_adamw_can_be_loaded():
    theirs = torch.optim.AdamW(make_params(), lr=0.1, weight_decay=0.0)
    params = train(theirs, RATES)
    mine = DecoupledAdamW(copy.deepcopy(params), lr=1.0)
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch would share the tensors
    assert_close(train(mine, RATES), train(theirs, RATES), rtol=0, atol=0)


@both
def test_hooks_on_a_step_run_once_although_the_parent_is_used_elsewhere(make):
    make.__bases__[-1](make_params(), lr=0.1)
    optimizer = make(make_params(), lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, [0.1])
    assert calls == ["before", "after"]


@pytest.fixture
def unwritten_memory_is_nan():
    """Fill what `torch.empty` and its like return, so that no test passes because memory happened to be 0."""
    torch.use_deterministic_algorithms(True)  # it is what makes torch.utils.deterministic.fill_uninitialized_memory act
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DecoupledSGDW, {}),
        (DecoupledSGDW, {"momentum": 0.9}),
        (DecoupledAdamW, {}),
        (DecoupledAdamW, {"cautious_updates": True}),
        (DecoupledAdamW, {"clip_updates": True}),
    ],
    ids=["sgdw", "sgdw-momentum", "adamw", "adamw-cautious", "adamw-clip"],
)
def test_a_step_that_overflowed_changes_nothing_not_even_by_decay(make, options):
    params = make_params(torch.float32)
    optimizer = make(params, lr=0.1, weight_decay=5e-4, fused=True, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for grad in (math.inf, 4.0):
        scaler.scale(torch.ones(()))
        for param in params:
            param.grad = torch.full_like(param, grad)
        scaler.step(optimizer)
        scaler.update()
        if grad == math.inf:
            assert all(torch.equal(*pair) for pair in zip(params, make_params(torch.float32), strict=True))
    # The scale was halved to 2, so the second gradient counts as 2.
    reference = make(make_params(torch.float32), lr=0.1, weight_decay=5e-4, **options)
    for param in reference.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 2.0)
    reference.step()
    # Two kernels for the same rule in float32, numbers of about 1.
    assert_close(params, reference.param_groups[0]["params"], rtol=0, atol=3e-7)


@kernels
@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_sgdw_starts_the_momentum_of_a_parameter_whose_first_gradient_comes_late(kernel, dampening):
    def new(params):
        return DecoupledSGDW(params, 0.1, 0.9, dampening, 5e-4, **kernel)

    params = make_params()
    optimizer = new(params)
    late = params[1]
    for step in range(3):
        set_grads(params, step)
        if step == 0:
            late.grad = None
        optimizer.step()

    early, alone = make_params(), make_params()
    train(new([early[0], early[2]]), [0.1] * 3, early)
    only_late = new([alone[1]])
    for step in (1, 2):
        set_grads(alone, step)
        only_late.step()
    # The same arithmetic, whichever tensors share a kernel.
    assert_close(params, [early[0], alone[1], early[2]], rtol=0, atol=0)


@both
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_may_be_a_tensor_of_one_element(make, shape):
    optimizer = make(make_params(), lr=torch.full(shape, 0.1, dtype=torch.float64), weight_decay=5e-4)
    reference = make(make_params(), lr=0.1, weight_decay=5e-4)
    params = optimizer.param_groups[0]["params"]
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"].fill_(lr)
        set_grads(params, step)
        optimizer.step()
    # One more rounding a step than with a number.
    assert_close(params, train(reference, RATES), rtol=1e-14, atol=1e-14)


@both
def test_complex_parameters_are_trained_as_pairs_of_numbers(make):
    def train_with(dtype):
        numbers = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(3, 2)
        param = (torch.view_as_complex(numbers.clone()) if dtype.is_complex else numbers.clone()).requires_grad_()
        optimizer = make([param], lr=0.1, weight_decay=5e-4)
        for _ in range(3):
            param.grad = param.detach() * 0.5
            optimizer.step()
        return torch.view_as_real(param.detach()) if dtype.is_complex else param.detach()

    assert_close(train_with(torch.complex128), train_with(torch.float64), rtol=1e-14, atol=0)


def test_parameters_of_several_dtypes_share_one_optimizer():
    params = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64)]
    optimizer = DecoupledSGDW(params, lr=0.1, weight_decay=0.5e-3)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert [param.dtype for param in params] == [torch.float32, torch.float64]
    assert_close(params[0].double(), params[1], rtol=1e-7, atol=0)
    assert params[1][0].item() == pytest.approx(1 - 0.5e-3, rel=1e-15)


def test_adamw_refuses_sparse_gradients():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = DecoupledAdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        optimizer.step()


def test_sgdw_takes_sparse_gradients():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    optimizer = DecoupledSGDW(embedding.parameters(), lr=0.5, weight_decay=5e-4)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert embedding.weight[:, 0].tolist() == pytest.approx([1 - 5e-4, 0.5 - 5e-4, 1 - 5e-4, 1 - 5e-4], rel=1e-6)


@both
@pytest.mark.parametrize(("weight_decay", "warns"), [(9e-4, False), (1e-3, True)])
def test_a_weight_decay_meant_for_a_coupled_optimizer_is_logged(make, weight_decay, warns, caplog):
    with caplog.at_level(logging.WARNING, "composer.optim"):
        make(make_params(), lr=0.1, weight_decay=weight_decay)
    assert ("multiply it by the initial learning rate" in caplog.text) is warns


def test_sgdw_needs_a_learning_rate():
    with pytest.raises(TypeError, match="lr"):
        DecoupledSGDW(make_params())


@both
def test_the_optimizers_are_torchs(make):
    optimizer = make(make_params(), lr=0.1)
    assert isinstance(optimizer, torch.optim.SGD if make is DecoupledSGDW else torch.optim.AdamW)
    assert type(optimizer).__qualname__ in ("DecoupledSGDW", "DecoupledAdamW")


@both
@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", [{}, {"foreach": False}, {"fused": True}])
def test_a_gpu_gives_the_cpus_numbers(make, kernel):
    params = [param.detach().cuda().requires_grad_() for param in make_params()]
    optimizer = make(params, lr=0.1, weight_decay=5e-4, **kernel)
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        twins = make_params()
        set_grads(twins, step)
        for param, twin in zip(params, twins, strict=True):
            param.grad = twin.grad.cuda()
        optimizer.step()
    expected = train(make(make_params(), lr=0.1, weight_decay=5e-4), RATES)
    assert_close([param.cpu() for param in params], expected, rtol=0, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # since the step raises
def test_adamw_refuses_to_be_recorded_without_capturable():
    params = [torch.ones(2, device="cuda", requires_grad=True)]
    params[0].grad = torch.ones_like(params[0])
    optimizer = DecoupledAdamW(params)
    optimizer.step()
    with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.parametrize("make_bad", [lambda make, bad: make(make_params(), **bad), None])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"lr": math.nan}, ValueError, "lr=nan must be 0 or more and finite"),
        ({"lr": math.inf}, ValueError, "lr=inf must be 0 or more and finite"),
        ({"lr": -0.1}, ValueError, "lr=-0.1 must be 0 or more"),
        ({"lr": "1e-3"}, TypeError, "lr='1e-3' is not a number"),
        ({"lr": True}, TypeError, "lr=True is not a number"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay=-1.0 must be 0 or more"),
        (
            {"weight_decay": 10**5000},
            ValueError,
            "weight_decay='a number larger than any float' must be 0 or more and finite",
        ),
        ({"maximize": "no"}, TypeError, "maximize='no' is neither True nor False"),
        ({"foreach": 3}, TypeError, "foreach=3 is neither True nor False"),
    ],
)
@both
def test_options_that_no_weights_could_be_trained_with_are_refused(make, bad, error, message, make_bad):
    if make_bad is None:  # in a group of its own, beside one that is well
        good, other = make_params(), make_params()

        def make_bad(make, bad):
            return make([{"params": good}, {"params": other, **bad}], lr=0.1)

        optimizer = make(good, lr=0.1)
        with pytest.raises(error, match=re.escape(message)):
            optimizer.add_param_group({"params": other, **bad})
        assert len(optimizer.param_groups) == 1
    with pytest.raises(error, match=re.escape(message)):
        make_bad(make, {"lr": 0.1, **bad})


@pytest.mark.parametrize(
    ("make", "bad", "error", "message"),
    [
        (DecoupledAdamW, {"betas": (0.9,)}, ValueError, "betas=(0.9,) must be two numbers"),
        (DecoupledAdamW, {"betas": 0.9}, ValueError, "betas=0.9 must be two numbers"),
        (DecoupledAdamW, {"betas": (0.9, 1.0)}, ValueError, "betas[1]=1.0 must be 0 or more and less than 1"),
        (DecoupledAdamW, {"betas": (math.nan, 0.9)}, ValueError, "betas[0]=nan must be finite"),
        (DecoupledAdamW, {"eps": math.nan}, ValueError, "eps=nan must be 0 or more and finite"),
        (DecoupledAdamW, {"amsgrad": "x"}, TypeError, "amsgrad='x' is neither True nor False"),
        (DecoupledSGDW, {"momentum": -1}, ValueError, "momentum=-1 must be 0 or more"),
        (DecoupledSGDW, {"dampening": "x"}, TypeError, "dampening='x' is not a number"),
        (DecoupledSGDW, {"nesterov": True}, ValueError, "Use a momentum above 0"),
    ],
)
def test_options_of_one_optimizer_are_looked_at_as_well(make, bad, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make(make_params(), lr=0.1, **bad)
    optimizer = make(make_params(), lr=0.1)
    with pytest.raises(error, match=re.escape(message)):
        optimizer.add_param_group({"params": make_params(), **bad})


@both
def test_whole_numbers_and_lists_are_taken(make):
    options = {"betas": [0.9, 0.95]} if make is DecoupledAdamW else {"momentum": 1}
    optimizer = make(make_params(), lr=1, weight_decay=0, **options)
    assert optimizer.param_groups[0]["initial_lr"] == 1.0
    train(optimizer, [1])


@pytest.fixture
def accelerator():
    if torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator type per process: CUDA")
    with SimulatedAccelerator() as accelerator:
        yield accelerator


def make_convolution(device="cpu"):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    return network.to(device)


def step_all(optimizer, num_steps):
    params = optimizer.param_groups[0]["params"]
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        for param in params:  # contiguous, though a weight is not
            param.grad = torch.randn(param.shape, generator=generator).to(param.device)
        optimizer.step()
    return [param.detach().cpu() for param in params]


SGDW, ADAMW = (DecoupledSGDW, {"momentum": 0.9}), (DecoupledAdamW, {"amsgrad": True})
both_with_state = pytest.mark.parametrize(("make", "options"), [SGDW, ADAMW], ids=["sgdw", "adamw"])


@both_with_state
def test_weights_on_an_accelerator_are_stepped_by_the_fused_kernel(accelerator, make, options):
    network = make_convolution()
    optimizer = make(network.parameters(), lr=0.1, weight_decay=5e-4, **options)
    assert not optimizer._step_supports_amp_scaling
    network.to(accelerator.torch_device)  # after the optimizer is made, as the Trainer does
    assert optimizer._step_supports_amp_scaling
    with accelerator.counting() as counts:
        found = step_all(optimizer, 3)
    fused = make(make_convolution().parameters(), lr=0.1, weight_decay=5e-4, fused=True, **options)
    assert_close(found, step_all(fused, 3), rtol=0, atol=0)
    assert optimizer.param_groups[0]["fused"] is None
    assert all(__file__ in place for place in counts.synchronizations), "the optimizer waits"


@both_with_state
@pytest.mark.parametrize("kernel", [{"foreach": True}, {"fused": False}], ids=str)
def test_a_chosen_kernel_is_kept_on_an_accelerator(accelerator, make, options, kernel):
    optimizer = make(make_convolution(accelerator.torch_device).parameters(), lr=0.1, **options, **kernel)
    assert not optimizer._step_supports_amp_scaling
    plain = make(make_convolution().parameters(), lr=0.1, **options, **kernel)
    assert_close(step_all(optimizer, 3), step_all(plain, 3), rtol=0, atol=0)


@both_with_state
@pytest.mark.parametrize("places", [("cpu", "simgpu"), ("simgpu", "cpu"), ("simgpu", "simgpu")], ids=str)
def test_state_is_loaded_from_either_device(accelerator, make, options, places):
    def new(device, kernel):
        return make(make_convolution(device).parameters(), lr=0.1, **options, **kernel)

    def resume(first, second):
        step_all(first, 2)
        saved = copy.deepcopy(first.state_dict())
        for entries in saved["state"].values():  # as from a file, whose format may not keep strides
            entries.update({name: value.cpu().contiguous() for name, value in entries.items()})
        second.load_state_dict(saved)
        return step_all(second, 2)

    found = resume(*(new(place, {}) for place in places))
    kernels_used = ({"fused": True} if place == "simgpu" else {"fused": None} for place in places)
    assert_close(found, resume(*(new("cpu", kernel) for kernel in kernels_used)), rtol=0, atol=1e-7)


@pytest.mark.parametrize("overflows", [False, True])
def test_fused_sgdw_unscales_and_skips_sparse_gradients(overflows):
    weight = torch.ones(3, 2, requires_grad=True)
    optimizer = DecoupledSGDW([weight], lr=1.0, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(overflows))
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2))
    optimizer.step()
    assert weight.tolist() == [[1.0, 1.0], [1.0, 1.0] if overflows else [0.5, 0.5], [1.0, 1.0]]


@both
def test_pytorch_chooses_between_its_other_kernels_where_steps_are_not_fused(make, monkeypatch):
    asked, choose = [], _default_to_fused_or_foreach

    def choose_and_note(*args, **options):
        asked.append(args)
        return choose(*args, **options)

    for name in ("sgd", "adam", "adamw"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_default_to_fused_or_foreach", choose_and_note, raising=False)
    train(make(make_params(), lr=0.1), RATES[:1])
    assert asked
