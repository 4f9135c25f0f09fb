"""DeepSpeed's engine on two CPU processes, against a plain loop on one.

All cases train in one pair of processes: importing DeepSpeed takes longer than they do.
"""

import copy
import subprocess
import sys

import pytest
import torch

from composer_dist import dist, get_device, is_model_deepspeed
from composer_dist.deepspeed import DeepSpeed, parse_deepspeed_config
from composer_dist.strategy import Strategy
from composer_dist.testing import run_ranks

STAGES = (0, 1, 2, 3)
WORLD_SIZE = 2
BATCH_SIZE = 4  # on each rank
# How each rank cuts its batches, where the configuration says two microbatches of two samples.
CUTS = {"even": [2, 2], "uneven": [3, 1], "too few": [4], "too many": [1, 1, 1, 1]}
MAX_NORM = 0.05
PRECISIONS = ("fp32", "amp_bf16")

pytestmark = pytest.mark.slow


class Model(torch.nn.Module):
    """A part that is frozen, one that nobody uses, tied weights, and sizes that two ranks cannot share evenly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.first = torch.nn.Linear(5, 3)
        self.tied = torch.nn.Linear(5, 3)
        self.tied.weight = self.first.weight
        self.last = torch.nn.Linear(3, 1)
        self.left_out = torch.nn.Parameter(torch.full((3,), 0.5))
        self.register_buffer("offset", torch.tensor([0.25]))

    def forward(self, inputs):
        hidden = self.frozen(inputs)
        return self.last(torch.tanh(self.first(hidden)) + self.tied(hidden) + self.offset.to(hidden)).squeeze(-1)


def make_optimizer(model):
    first, *others = model.first.parameters()
    rest = [*model.frozen.parameters(), *others, model.tied.bias, *model.last.parameters()]
    return torch.optim.AdamW([{"params": [first], "lr": 0.02}, {"params": rest}], lr=0.01)


def batches(steps, seed=2):
    """One batch of all ranks for each step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(WORLD_SIZE * BATCH_SIZE, 5, generator=generator) for _ in range(steps)]


def loss_of(model, inputs):
    return (model(inputs) - inputs.sum(1)).square().mean()


def train_plainly(model, optimizer, batches, max_norm=None):
    """Return the loss of each batch on one device."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(strategy, model, optimizer, batches, cut=(2, 2)):
    """Return the loss of each batch, by way of a loop that knows the protocol only."""
    losses = []
    for batch in batches:
        strategy.zero_grad(optimizer)
        microbatches = batch.chunk(strategy.world_size)[dist.get_global_rank()].split(list(cut))
        (weight,) = strategy.sum([sum(cut)])
        total = torch.zeros(())
        for index, microbatch in enumerate(microbatches):
            with strategy.microbatch(is_last=index == len(microbatches) - 1):
                loss = loss_of(model, strategy.prepare_batch(microbatch))
                loss = loss * (len(microbatch) * strategy.world_size / weight)
                strategy.backward(loss)
            total += loss.detach()
        strategy.step(optimizer)
        losses.append(strategy.mean({"loss": total})["loss"].item())
    return losses


def make(stage, precision="fp32", clip=None, **config):
    """Return strategy, engine and optimizer."""
    config = parse_deepspeed_config(
        {"zero_optimization": {"stage": stage}, **config},
        batch_size=BATCH_SIZE,
        microbatch_size=2,
        world_size=WORLD_SIZE,
        precision=precision,
        clip=clip,
    )
    strategy = DeepSpeed(get_device("cpu"), config)
    module = Model()
    model, (optimizer,) = strategy.prepare(module, [make_optimizer(module)])
    return strategy, model, optimizer


def state_of(strategy, model, optimizer):
    """Return weights and state as they are now; what a strategy returns may share memory with what trains on."""
    return copy.deepcopy((strategy.model_state_dict(model), strategy.optimizer_state_dict(model, optimizer)))


def trained(stage):
    """Train as each cut says, and with clipping; then take the state to other engines."""
    seen = {}
    for name, cut in CUTS.items():
        strategy, model, optimizer = make(stage)
        seen[name] = train(strategy, model, optimizer, batches(5), cut)
    seen["state"] = state_of(strategy, model, optimizer)
    seen["is_strategy"] = isinstance(strategy, Strategy)
    seen["is_deepspeed"] = is_model_deepspeed(model) and not is_model_deepspeed(model.module)
    strategy, model, optimizer = make(stage, clip=("norm", MAX_NORM))
    seen["clipped"] = train(strategy, model, optimizer, batches(5))

    strategy, model, optimizer = make(stage)  # has not taken a step
    strategy.load_model_state_dict(model, seen["state"][0])
    strategy.load_optimizer_state_dict(model, optimizer, seen["state"][1])
    seen["loaded"] = state_of(strategy, model, optimizer)
    seen["resumed"] = train(strategy, model, optimizer, batches(2, seed=3))
    strategy.load_model_state_dict(model, seen["state"][0])  # has taken some
    strategy.load_optimizer_state_dict(model, optimizer, seen["state"][1])
    seen["rewound"] = train(strategy, model, optimizer, batches(2, seed=3))

    odd = {**{name: value for name, value in seen["state"][0].items() if name != "last.bias"}, "extra": torch.ones(1)}
    seen["odd names"] = strategy.load_model_state_dict(model, odd, strict=False)
    seen["refusals"] = [
        refusal(lambda: strategy.load_model_state_dict(model, odd)),
        refusal(lambda: strategy.load_model_state_dict(model, {**seen["state"][0], "last.bias": torch.ones(2)})),
    ]
    return seen


def refusal(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


def trained_in_bfloat16(stage):
    strategy, model, optimizer = make(stage, precision="amp_bf16")
    losses = train(strategy, model, optimizer, batches(5))
    before = state_of(strategy, model, optimizer)
    dtypes = {name: parameter.dtype for name, parameter in model.module.named_parameters()}
    batch = strategy.prepare_batch({"x": torch.ones(2), "labels": [torch.ones(2, dtype=torch.int64)]})
    strategy, model, optimizer = make(stage, precision="amp_bf16")
    strategy.load_model_state_dict(model, before[0])
    strategy.load_optimizer_state_dict(model, optimizer, before[1])
    return losses, dtypes, batch, before, state_of(strategy, model, optimizer)


class Branch(torch.nn.Module):
    """A model of which some steps leave a part out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.maybe, self.last = (torch.nn.Linear(5, size) for size in (5, 5, 1))
        self.uses_all = True

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.last(self.maybe(hidden) if self.uses_all else hidden).squeeze(-1)


USES_ALL = (False, True, False, True)


def optimizer_of_branch(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def trained_with_a_part_left_out(stage, precision):
    """Return weights and momentum of the model before the first step and after each."""
    run = {"batch_size": BATCH_SIZE, "microbatch_size": 2, "world_size": WORLD_SIZE, "precision": precision}
    config = parse_deepspeed_config({"zero_optimization": {"stage": stage}}, **run)
    strategy, module = DeepSpeed(get_device("cpu"), config, find_unused_parameters=True), Branch()
    model, (optimizer,) = strategy.prepare(module, [optimizer_of_branch(module)])
    states = [state_of(strategy, model, optimizer)]
    for batch, uses_all in zip(batches(4), USES_ALL, strict=True):
        # Where nothing is sharded, it is enough that one of the ranks has a gradient.
        module.uses_all = uses_all and (stage > 0 or dist.get_global_rank() == 0)
        train(strategy, model, optimizer, [batch])
        states.append(state_of(strategy, model, optimizer))
    return states


def all_stages():
    return (
        {stage: trained(stage) for stage in STAGES},
        {stage: trained_in_bfloat16(stage) for stage in STAGES},
        {(stage, kind): trained_with_a_part_left_out(stage, kind) for stage in (0, 1, 2) for kind in PRECISIONS},
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(all_stages, store=tmp_path_factory.mktemp("deepspeed") / "store", timeout_s=300)


@pytest.fixture
def plain():
    """A model trained on one device, its optimizer, and its losses."""
    model = Model()
    optimizer = make_optimizer(model)
    return model, optimizer, train_plainly(model, optimizer, batches(5))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_batch_trains_alike_however_ranks_and_microbatches_share_it(ranks, plain, stage, cut):
    _, _, losses = plain
    for fp32, _, _ in ranks:
        torch.testing.assert_close(fp32[stage][cut], losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_clips_the_norm_of_the_whole_gradient(ranks, stage):
    model = Model()
    losses = train_plainly(model, make_optimizer(model), batches(5), MAX_NORM)
    torch.testing.assert_close(ranks[0][0][stage]["clipped"], losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_is_that_of_a_model_that_was_never_wrapped(ranks, plain, stage):
    model, optimizer, _ = plain
    for fp32, _, _ in ranks:
        weights, state = fp32[stage]["state"]
        assert list(weights) == list(model.state_dict())
        # The sums are in another order, which Adam's division by small numbers makes larger.
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-4, atol=1e-5)
        assert weights["tied.weight"] is weights["first.weight"]
        expected = optimizer.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(state["state"], expected["state"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_new_engine_goes_on_where_the_state_was_taken(ranks, plain, stage):
    model, optimizer, _ = plain
    losses = train_plainly(model, optimizer, batches(2, seed=3))
    for fp32, _, _ in ranks:
        torch.testing.assert_close(fp32[stage]["loaded"], fp32[stage]["state"], rtol=0, atol=0)
        torch.testing.assert_close(fp32[stage]["resumed"], losses, rtol=1e-5, atol=0)
        assert fp32[stage]["rewound"] == fp32[stage]["resumed"]


@pytest.mark.parametrize("stage", STAGES)
def test_names_that_do_not_fit_are_returned_or_refused_on_every_rank(ranks, stage):
    for fp32, _, _ in ranks:
        assert fp32[stage]["odd names"] == (["last.bias"], ["extra"])
        odd, misshapen = fp32[stage]["refusals"]
        assert "Missing key" in odd
        assert "Unexpected key" in odd
        assert "size mismatch for last.bias" in misshapen


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_is_recognized_and_the_strategy_is_one(ranks, stage):
    assert ranks[0][0][stage]["is_deepspeed"]
    assert ranks[0][0][stage]["is_strategy"]


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_computes_in_halves_and_keeps_float32(ranks, plain, stage):
    for _, bf16, _ in ranks:
        losses, dtypes, batch, before, after = bf16[stage]
        assert set(dtypes.values()) == {torch.bfloat16}
        assert batch["x"].dtype is torch.bfloat16
        assert batch["labels"][0].dtype is torch.int64
        assert before[0]["first.weight"].dtype is torch.float32
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        # 8 bits of mantissa in each of a handful of operations.
        torch.testing.assert_close(losses, plain[2], rtol=0.1, atol=0)


ALONE = """
import torch
from composer_dist import DeepSpeed, get_device, parse_deepspeed_config

run = {"batch_size": 4, "microbatch_size": 2, "world_size": 1, "precision": "fp32"}
strategy = DeepSpeed(get_device("cpu"), parse_deepspeed_config({"zero_optimization": {"stage": 2}}, **run))
layer = torch.nn.Linear(3, 1)
model, (optimizer,) = strategy.prepare(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)])
with strategy.microbatch(is_last=True):
    strategy.backward(model(torch.ones(2, 3)).sum())
strategy.step(optimizer)
"""


def test_a_process_that_nobody_launched_trains_quietly_leaves_no_file_and_ends(tmp_path):
    run = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def alone():
    strategy = DeepSpeed(get_device("cpu"), {"train_batch_size": 1})
    return strategy, torch.nn.Linear(1, 1)


def test_there_is_no_engine_before_prepare(alone):
    with pytest.raises(RuntimeError, match="there is no DeepSpeed engine yet"):
        alone[0].engine  # noqa: B018


def test_float16_on_a_cpu_is_refused_with_what_to_use():
    with pytest.raises(ValueError, match=r"does not train in float16 on a CPU\. Use precision='amp_bf16'"):
        DeepSpeed(get_device("cpu"), {"fp16": {"enabled": True}})


@pytest.mark.parametrize("number", [0, 2])
def test_the_engine_takes_exactly_one_optimizer(alone, number):
    strategy, model = alone
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(number)]
    with pytest.raises(ValueError, match=f"{number} optimizers were given, and DeepSpeed's engine takes exactly one"):
        strategy.prepare(model, optimizers)


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused(alone):
    strategy, model = alone
    with pytest.raises(ValueError, match="LBFGS evaluates the loss itself"):
        strategy.prepare(model, [torch.optim.LBFGS(model.parameters())])


def test_what_the_engine_cannot_do_is_refused(alone):
    strategy, model = alone
    with pytest.raises(ValueError, match="create_graph=True"):
        strategy.backward(torch.zeros(()), create_graph=True)
    with pytest.raises(ValueError, match="sync=False asks for gradients that differ"):
        strategy.microbatch(is_last=True, sync=False)
    with pytest.raises(RuntimeError, match=r"deepspeed_config\['gradient_clipping'\]"):
        strategy.clip_grad_norm(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="scales losses itself"):
        strategy.step(None, scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_step_gives_no_gradient_stays_with_its_momentum(ranks, stage, precision):
    """Momentum and weight decay moved it on, where torch's optimizers pass over what has no gradient."""
    for rank in ranks:
        states = rank[2][stage, precision]
        for (weights, state), (later_weights, later_state), uses_all in zip(states, states[1:], USES_ALL, strict=False):
            for index, name in enumerate(("maybe.weight", "maybe.bias"), 2):
                assert torch.equal(weights[name], later_weights[name]) is not uses_all, name
                momentum, later = (each["state"].get(index, {}).get("momentum_buffer") for each in (state, later_state))
                if not uses_all and later is not None:
                    assert torch.equal(later, torch.zeros_like(later) if momentum is None else momentum)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_part_that_is_left_out_trains_as_in_one_process(ranks, stage):
    model = Branch()
    optimizer = optimizer_of_branch(model)
    for batch, uses_all in zip(batches(4), USES_ALL, strict=True):
        optimizer.zero_grad()
        losses = []
        for part, rank in zip(batch.chunk(WORLD_SIZE), range(WORLD_SIZE), strict=True):
            model.uses_all = uses_all and (stage > 0 or rank == 0)
            losses.append(loss_of(model, part))
        torch.stack(losses).mean().backward()
        optimizer.step()
    for rank in ranks:
        # Four steps, each of fewer than 16 sums of up to 8 terms of size 1, taken in another order.
        bound = 4 * 16 * 8 * torch.finfo(torch.float32).eps
        for name, value in model.state_dict().items():
            torch.testing.assert_close(rank[2][stage, "fp32"][-1][0][name], value, rtol=bound, atol=bound)
