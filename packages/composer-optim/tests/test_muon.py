"""Muon in one process."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn

from composer_optim import LinearScheduler, Muon, lambda_lr

SHAPES = [(6, 6), (12, 3), (3, 12), (6, 6), (4, 2, 3, 3)]
JORDAN = [(3.4445, -4.7750, 2.0315)] * 5


def matrices(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def muon(params, **options):
    return Muon([{"params": params, "role": "muon"}], **options)


def roles(optimizer):
    return {name: group["role"] for group in optimizer.param_groups for name in group["param_names"]}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight
        self.adapter = nn.Linear(4, 4)

    def get_output_embeddings(self):
        return self.head


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 9, 4))
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.classifier = nn.Linear(4, 10)


@pytest.mark.parametrize(
    ("model", "orthogonalized"),
    [
        (nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)), {"1.weight"}),
        (nn.Sequential(nn.EmbeddingBag(5, 4), nn.LSTM(4, 4), nn.Linear(4, 5)), {"1.weight_ih_l0", "1.weight_hh_l0"}),
        (Tied(), {"body.weight", "adapter.weight"}),
        (Vision(), {"stem.weight", "attention.in_proj_weight", "attention.out_proj.weight"}),
        (nn.Sequential(nn.ConvTranspose1d(2, 3, 3), nn.GroupNorm(1, 3)), {"0.weight"}),
    ],
)
def test_hidden_matrices_and_filters_of_a_model_are_orthogonalized(model, orthogonalized):
    found = roles(Muon(model))
    assert {name for name, role in found.items() if role == "muon"} == orthogonalized
    assert set(found) == {name for name, _ in model.named_parameters()}


def test_the_roles_of_a_compiled_model_are_those_of_the_model():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    optimizer = Muon(torch.compile(model, backend="eager"), groups=[{"params": "1.*", "lr": 0.5}])
    assert roles(optimizer) == roles(Muon(model))
    assert {group["lr"]: group["param_names"] for group in optimizer.param_groups if group["lr"] == 0.5} == {
        0.5: ["1.bias"]
    }


def test_patterns_choose_roles_and_options():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    groups = [
        {"params": ["0.weight", "1.weight"], "role": "adamw", "weight_decay": 0.5},
        {"params": "*.bias", "lr": 0.25},
        {"params": "2.weight", "role": "muon", "momentum": 0.5},
    ]
    optimizer = Muon(model, lr=0.125, adamw_lr=0.0625, groups=groups)
    found = {
        name: (group["role"], group["lr"], group["weight_decay"], group["momentum"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert found == {
        "0.weight": ("adamw", 0.0625, 0.5, 0.95),
        "1.weight": ("adamw", 0.0625, 0.5, 0.95),
        "2.weight": ("muon", 0.125, 0.1, 0.5),
        **{f"{i}.bias": ("adamw", 0.25, 0.1, 0.95) for i in range(3)},
    }
    # Names without modules serve as well.
    with pytest.warns(UserWarning, match="parameters without their modules"):
        named = Muon(model.named_parameters(), lr=0.125, adamw_lr=0.0625, groups=groups)
    assert roles(named) == roles(optimizer)


def test_parameters_without_modules_are_divided_by_their_dims_with_a_warning():
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="parameters without their modules") as caught:
        optimizer = Muon(model.parameters())
    assert caught[0].filename == __file__
    assert [(group["role"], *group["params"]) for group in optimizer.param_groups] == [
        ("muon", model.weight),
        ("adamw", model.bias),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon([{"params": [model.weight], "role": "muon"}, {"params": [model.bias]}])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: Muon(m, groups=[{"params": "2.*", "lr": 0.1}]), r"'2\.\*' matches no parameter.*1\.weight"),
        (
            lambda m: Muon(m, groups=[{"params": "0.*", "role": "adamw"}, {"params": "*.weight", "role": "muon"}]),
            r"'0\.weight' matches '0\.\*' of groups\[0\] and '\*\.weight' of groups\[1\]",
        ),
        (lambda m: Muon(m, groups=[{"params": "*.bias", "role": "muon"}]), r"'0\.bias' of shape \(3,\)"),
        (lambda m: Muon(m, groups=[{"params": "*", "weigth_decay": 0}]), "unknown option 'weigth_decay'"),
        (lambda m: Muon(m, groups=[{"params": "*.bias", "role": "sgd"}]), "role='sgd' must be 'muon' or 'adamw'"),
        (lambda m: Muon(list(m.parameters()), groups=[{"params": "*", "lr": 1}]), "params has none"),
        (
            lambda m: Muon(
                [{"params": list(m.named_parameters())[:1], "role": "muon"}],
                groups=[{"params": "0.weight", "role": "adamw"}],
            ),
            r"'0\.weight' has role='muon' in params and role='adamw' in groups",
        ),
        (lambda m: Muon([{"params": [m[0].bias], "role": "muon"}]), r"parameter 0 of the group of shape \(3,\)"),
        (lambda m: Muon(m[0].weight), "single tensor"),
        (lambda m: Muon(nn.Sequential(nn.LazyLinear(3))), "'weight' of a LazyLinear has no shape yet"),
        (lambda m: muon([nn.Parameter(torch.ones(2, 2, dtype=torch.cfloat))]), "complex"),
        (lambda m: Muon(m, lr=-1), "lr=-1 must be 0 or more"),
        (lambda m: Muon(m, adamw_lr=math.nan), "adamw_lr=nan must be 0 or more"),
        (lambda m: Muon(m, momentum=1.0), "momentum=1.0 must be 0 or more and less than 1"),
        (lambda m: Muon(m, normuon_beta2=1.5), "normuon_beta2=1.5 must be"),
        (lambda m: Muon(m, ns_steps=0), "ns_steps=0 must be a whole number"),
        (lambda m: Muon(m, ns_coefficients="newton"), "ns_coefficients='newton' must be one of"),
        (lambda m: Muon(m, ns_coefficients=(1, 2)), "must be one of"),
        (lambda m: Muon(m, adjust_lr_fn="adam"), "adjust_lr_fn='adam' must be one of"),
        (lambda m: Muon(m, dtype=torch.int64), "dtype='int64' must be a floating point dtype"),
        (lambda m: Muon(m, betas=(0.9, 1.0)), r"betas\[1\]=1.0 must be"),
        (lambda m: Muon(m, cautious="no"), "cautious='no' is neither True nor False"),
        (lambda m: Muon(m, cautious_updates=1), "cautious_updates=1 is neither True nor False"),
    ],
)
@pytest.mark.filterwarnings("ignore:Muon got parameters", "ignore:Lazy modules")
def test_invalid_arguments_are_named(make, message):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises((TypeError, ValueError), match=message):
        make(model)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_is_that_of_torch_muon(adjust_lr_fn, nesterov):
    ours, theirs = matrices(SHAPES[:4]), matrices(SHAPES[:4])
    options = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    mine, reference = muon(ours, dtype=torch.bfloat16, **options), torch.optim.Muon(theirs, **options)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        mine.step()
        reference.step()
    # One product of a batch may be rounded unlike a single one.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3 * 0.02 * 0.7 * torch.finfo(torch.bfloat16).eps)


def _polynomial(sigma, steps):
    for a, b, c in steps:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def _by_svd(matrix, steps):
    """Orthogonalize in float64 by applying the polynomials to the singular values."""
    u, s, vh = torch.linalg.svd(matrix.double().flatten(1), full_matrices=False)
    return (u * _polynomial(s / s.norm(), steps)) @ vh, u @ vh


@pytest.mark.parametrize("coefficients", ["jordan", "polar_express", [(1.875, -1.25, 0.375)]])
@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (6, 2, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_is_near_the_polar_factor(coefficients, shape, dtype):
    (param,) = matrices([shape])
    before = param.detach().clone()
    generator = torch.Generator().manual_seed(5)
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=generator).flatten(1), full_matrices=False)
    sigma = torch.logspace(0, -2 if dtype == torch.float32 else -0.5, u.shape[1])
    param.grad = ((u * sigma) @ vh).reshape(shape)
    muon(
        [param],
        lr=1.0,
        weight_decay=0,
        momentum=0.0,
        ns_coefficients=coefficients,
        adjust_lr_fn="original",
        dtype=dtype,
    ).step()
    rows = shape[0]
    columns = param.numel() // rows
    update = ((before - param.detach()).double() / math.sqrt(max(1, rows / columns))).reshape(rows, columns)
    singular = torch.linalg.svdvals(update)

    # The interval to which the polynomials map the singular values, which are at least 1e-3 of the norm.
    named = {"jordan": JORDAN, "polar_express": _polar_express()}
    steps = named[coefficients] if isinstance(coefficients, str) else coefficients * 5
    smallest = float((sigma / sigma.norm()).min())
    mapped = _polynomial(torch.linspace(smallest, 1, 100_001, dtype=torch.float64), steps)
    bound = float((mapped - 1).abs().max())
    # Rounding changes the singular values by about the dtype's precision, and the steps amplify small ones up to 1.
    rounding = 4 / smallest * torch.finfo(dtype).eps
    assert float((singular - 1).abs().max()) <= bound + rounding
    if dtype == torch.float32:
        expected, polar = _by_svd(param.grad, steps)
        torch.testing.assert_close(update, expected, rtol=0, atol=rounding)
        assert torch.linalg.matrix_norm(update - polar, 2) <= bound + rounding


def _polar_express():
    """Coefficients of Amsel et al. for singular values in [1e-3, 1], by the algorithm of the paper.

    Each polynomial is the best odd one of degree 5 for the interval to which the one before has mapped the singular
    values, found with Remez's algorithm. A lower end below 0.024 of the upper one is raised, which bounds the slopes.
    """
    lower, upper, steps = 1e-3, 1.0, []
    for _ in range(5):
        low = max(lower, upper * 0.02407327424182761)
        a, b, c = _remez(low, upper)
        if low > lower:  # centered around 1 for the whole interval
            p_lower, p_upper = (_polynomial(x, [(a, b, c)]) for x in (lower, upper))
            factor = 2 / (p_lower + p_upper)
            a, b, c = a * factor, b * factor, c * factor
        steps.append((a, b, c))
        lower = float(_polynomial(lower, [(a, b, c)]))
        upper = 2 - lower
    return [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in steps]


def _remez(lower, upper):
    q, r = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    for _ in range(100):
        points = torch.tensor([lower, q, r, upper], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, _ = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return a, b, c


def _reference_step(param, state, step, *, role, lr, options):
    """Perform a step in float64, one matrix at a time."""
    grad, weight = param.grad.double(), param.detach().double()
    if role == "adamw":
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * grad
        state["v"] = 0.95 * state.get("v", 0) + 0.05 * grad**2
        update = (state["m"] / (1 - 0.9**step)) / ((state["v"] / (1 - 0.95**step)).sqrt() + 1e-8)
    else:
        state["m"] = 0.95 * state.get("m", 0) + 0.05 * grad
        momentum = 0.95 * state["m"] + 0.05 * grad if options["nesterov"] else state["m"]
        update, _ = _by_svd(momentum, JORDAN)
        if options["normuon_beta2"] is not None:
            mean = (update**2).mean(1, keepdim=True)
            state["v"] = 0.95 * state.get("v", 0) + 0.05 * mean
            update = update / (state["v"].sqrt() + 1e-8)
            update = update * math.sqrt(min(update.shape)) / update.norm()
        update = 0.2 * math.sqrt(max(update.shape)) * update.reshape(weight.shape)
    kept = weight * update >= 0 if options["cautious"] else torch.ones_like(weight)
    if role == "muon" and options["cautious_updates"]:
        agrees = update * grad > 0
        update = update * agrees * agrees.numel() / (agrees.sum() + 1)
    return weight - lr * 0.1 * weight * kept - lr * update


@pytest.mark.parametrize(
    ("nesterov", "normuon_beta2", "cautious", "cautious_updates"),
    [*itertools.product([True, False], [None, 0.95], [True, False], [True, False])],
)
def test_variants_match_their_formulas(nesterov, normuon_beta2, cautious, cautious_updates):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 3, 2), nn.Linear(4, 4), nn.Linear(4, 2))
    options = {"nesterov": nesterov, "normuon_beta2": normuon_beta2, "cautious": cautious}
    options["cautious_updates"] = cautious_updates
    optimizer = Muon(model, lr=0.05, adamw_lr=0.01, **options)
    role_of, states = roles(optimizer), {name: {} for name, _ in model.named_parameters()}
    for step in range(1, 4):
        set_gradients(model.parameters(), step)
        expected = {}
        for name, param in model.named_parameters():
            lr = 0.05 if role_of[name] == "muon" else 0.01
            expected[name] = _reference_step(
                param, states[name], step, role=role_of[name], lr=lr, options=options
            ).float()
        optimizer.step()
        got = {name: param.detach() for name, param in model.named_parameters()}
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_a_filter_moves_like_the_matrix_of_its_rows():
    (filters,), (flat,) = matrices([(4, 2, 3, 3)]), matrices([(4, 18)])
    for param in (filters, flat):
        optimizer = muon([param])
        set_gradients([param], 1)
        optimizer.step()
    torch.testing.assert_close(filters.flatten(1), flat, rtol=0, atol=0)


def test_a_vector_in_a_group_of_matrices_gets_adamw_at_its_rate():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = Muon(model, lr=0.5, adamw_lr=0.125, weight_decay=0)
    vector = nn.Parameter(torch.zeros(2))
    optimizer.param_groups[0]["params"].append(vector)  # as module surgery does
    vector.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(vector.detach(), torch.full((2,), -0.125))


def test_a_schedule_scales_both_rates():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = Muon(model, lr=0.5, adamw_lr=0.25)
    lambda_lr(optimizer, LinearScheduler(alpha_i=0.5), max_duration="10ba", batches_per_epoch=10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_restored_optimizer_takes_the_same_steps(way):
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = Muon(model, normuon_beta2=0.95)
    set_gradients(model.parameters(), 1)
    optimizer.step()
    if way == "deepcopy":
        other_model, other = copy.deepcopy((model, optimizer))
    else:
        other_model = copy.deepcopy(model)
        other = Muon(other_model, lr=0.3)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, opt in ((model, optimizer), (other_model, other)):
        set_gradients(each.parameters(), 2)
        opt.step()
    assert all(map(torch.equal, model.parameters(), other_model.parameters()))


def test_parameters_without_gradients_stay():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    before = copy.deepcopy(model.state_dict())
    optimizer = Muon(model)
    set_gradients(model[0].parameters(), 1)
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.weight", "0.bias"}


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 2))
    optimizer = Muon(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradient.*Embedding\(sparse=False\)"):
        optimizer.step()
