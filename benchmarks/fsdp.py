"""A sharded step of a 10 M parameter GPT through the Trainer, against a loop written by hand, on two ranks over gloo.

    python benchmarks/fsdp.py [--rounds 6] [--steps 8]

All call `fully_shard` on each block and on the whole, and train in the same two processes, in turns, one thread each.
Printed are the median times of a step on rank 0, their ratios to the loop by hand, and the collectives: for a Trainer
that checks no losses, as the loop does not either, and for one as it is by default, whose ranks tell each other once a
step whether their parts of the gradients are finite.
"""

from collections import Counter

import torch
from gpt_steps import Train, make_network, median_steps_s, report, run, with_trainer
from gpt_steps import by_hand as loop_by_hand
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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


def by_hand(num_steps: int) -> Train:
    """Return what trains the network in a loop of its own."""
    network = make_units()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [module for module in network.modules() if isinstance(module, GPTBlock)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    return loop_by_hand(network, num_steps)


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
        "Trainer(on_divergence=None)": with_trainer(make_units(), num_steps, on_divergence=None, **sharding),
        "Trainer": with_trainer(make_units(), num_steps, **sharding),
    }
    return median_steps_s(loops, rounds), {name: count_collectives(train) for name, train in loops.items()}


def main() -> None:
    """Measure and print."""
    (medians_s, collectives), num_steps = run(measure, "Compare a sharded step of the Trainer with one by hand.")
    report(medians_s)
    for name, counts in collectives.items():
        said = ", ".join(f"{count} {what.removeprefix('c10d::')}" for what, count in sorted(counts.items()))
        print(f"{name}, {num_steps + 1} steps: {said}")


if __name__ == "__main__":
    main()
