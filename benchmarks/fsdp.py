"""A sharded step of a 10 M parameter GPT through the Trainer, against a loop written by hand, on two ranks over gloo.

    python benchmarks/fsdp.py [--rounds 6] [--steps 8]

All call `fully_shard` on each block and on the whole, and train in the same two processes, one thread each: before each
step of the Trainer the loops by hand make one. Printed are the median times of a step on rank 0, the median ratio to
the step by hand before it, and the collectives of a step: for a Trainer that looks at no gradients, as the loop does
not either, and for one as it is by default, whose ranks know before the optimizer steps whether all gradients are
finite; beside it a loop by hand that asks for that, by the norm of the gradients. What a fit needs at its beginning and
end, four collectives at most, is left out of their number, for which there have to be four steps or more.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpt_steps import BY_HAND, Pairs, Steps, WithTrainer, in_turns, make_network, report, run
from gpt_steps import by_hand as loop_by_hand
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import get_total_norm

from composer_dist import dist
from composer_models.gpt import GPTBlock


def make_units() -> nn.Module:
    """Return the network, whose blocks are units."""
    network = make_network()
    for module in network.modules():
        if isinstance(module, GPTBlock):
            vars(module)["_fsdp_wrap"] = True
    return network


def by_hand(num_steps: int, check: Callable[[nn.Module], None] | None = None) -> Steps:
    """Return the steps of a loop that may look at the gradients before the optimizer does."""
    network = make_units()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [module for module in network.modules() if isinstance(module, GPTBlock)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    return loop_by_hand(network, num_steps, check)


def refuse_infinite(network: nn.Module) -> None:
    """Raise if a gradient is not finite, on every rank alike."""
    norm: Any = get_total_norm([p.grad for p in network.parameters() if p.grad is not None])
    if not norm.full_tensor().isfinite():
        raise FloatingPointError("a gradient is not finite")


def count_collectives(train: Callable[[], object]) -> Counter[str]:
    """Return how often each collective ran."""
    with CommDebugMode() as mode:
        train()
    return Counter({str(name).removeprefix("c10d."): count for name, count in mode.get_comm_counts().items()})


def measure(rounds: int, num_steps: int) -> tuple[dict[str, Pairs], dict[str, Counter[str]]]:
    """Return the steps of each loop, and the collectives of an epoch of it."""
    hands = {BY_HAND: by_hand(num_steps), "by hand, looking at gradients": by_hand(num_steps, refuse_infinite)}
    sharding = {"parallelism_config": {"fsdp": {}}}
    trainers = {
        "Trainer(on_divergence=None)": WithTrainer(make_units(), num_steps, on_divergence=None, **sharding),
        "Trainer": WithTrainer(make_units(), num_steps, **sharding),
    }
    pairs = in_turns(hands, trainers, rounds)
    counts = {name: count_collectives(partial(take, steps, num_steps + 1)) for name, steps in hands.items()}
    counts |= {name: count_collectives(partial(train, {})) for name, train in trainers.items()}
    return pairs, counts


def take(steps: Steps, number: int) -> None:
    """Make so many steps."""
    for _ in range(number):
        next(steps)


def main() -> None:
    """Measure and print."""
    (pairs, collectives), arguments = run(measure, "Compare a sharded step of the Trainer with one by hand.")
    report(pairs, "FSDP2 step of a GPT", arguments.json, {"Trainer": 1.02})
    for name, counts in collectives.items():
        of_a_step = {what: count // (arguments.steps + 1) for what, count in sorted(counts.items())}
        print(f"{name}, each step: {', '.join(f'{count} {what}' for what, count in of_a_step.items() if count)}")


if __name__ == "__main__":
    main()
