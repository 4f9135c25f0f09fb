"""A sharded step of a 10 M parameter GPT through the Trainer, against a loop written by hand, on two ranks over gloo.

    python benchmarks/fsdp.py [--rounds 6] [--steps 8]

All call `fully_shard` on each block and on the whole, and train in the same two processes, in turns, one thread each.
Printed are the median times of a step on rank 0, their ratios to the loop by hand, and the collectives of a step: for a
Trainer that looks at no gradients, as the loop does not either, and for one as it is by default, whose ranks tell each
other before the optimizer steps whether their parts of the gradients are finite; beside it a loop by hand that does so,
with the norm of the gradients. What a fit needs at its beginning and end, four at most, is left out, for which there
have to be four steps or more.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from gpt_steps import Train, make_network, median_steps_s, report, run, with_trainer
from gpt_steps import by_hand as loop_by_hand
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import get_total_norm
from torch.profiler import ProfilerActivity, profile

from composer_dist import dist
from composer_models.gpt import GPTBlock


def make_units() -> nn.Module:
    """Return the network, whose blocks are units."""
    network = make_network()
    for module in network.modules():
        if isinstance(module, GPTBlock):
            vars(module)["_fsdp_wrap"] = True
    return network


def by_hand(num_steps: int, check: Callable[[nn.Module], None] | None = None) -> Train:
    """Return what trains the network in a loop of its own, which may look at the gradients before each step."""
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


def count_collectives(train: Train) -> Counter[str]:
    """Return how often each collective ran."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        train()
    return Counter(event.name for event in profiler.events() or () if event.name.startswith("c10d::"))


def measure(rounds: int, num_steps: int) -> tuple[dict[str, float], dict[str, Counter[str]]]:
    """Return the median step in seconds and the collectives of each loop."""
    sharding = {"parallelism_config": {"fsdp": {}}}
    loops = {
        "by hand": by_hand(num_steps),
        "by hand, looking at gradients": by_hand(num_steps, refuse_infinite),
        "Trainer(on_divergence=None)": with_trainer(make_units(), num_steps, on_divergence=None, **sharding),
        "Trainer": with_trainer(make_units(), num_steps, **sharding),
    }
    return median_steps_s(loops, rounds), {name: count_collectives(train) for name, train in loops.items()}


def main() -> None:
    """Measure and print."""
    (medians_s, collectives), arguments = run(measure, "Compare a sharded step of the Trainer with one by hand.")
    report(medians_s, "FSDP2 step of a GPT", arguments.json)
    for name, counts in collectives.items():
        of_a_step = {
            what.removeprefix("c10d::"): count // (arguments.steps + 1) for what, count in sorted(counts.items())
        }
        print(f"{name}, each step: {', '.join(f'{count} {what}' for what, count in of_a_step.items() if count)}")


if __name__ == "__main__":
    main()
