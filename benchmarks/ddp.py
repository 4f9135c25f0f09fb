"""A DDP step of a 10 M parameter GPT through the Trainer, against a loop written by hand, on two ranks over gloo.

    python benchmarks/ddp.py [--rounds 6] [--steps 8]

All train in the same two processes, one thread each: before each step of the Trainer the loop by hand makes one.
Printed are the median times of a step on rank 0 and the median ratio to the step by hand before it: for a Trainer that
checks no losses, as the loop does not either; for one as it is by default; and for one with a callback, for which the
ranks also exchange the loss and the clock.
"""

from gpt_steps import BY_HAND, Pairs, WithTrainer, by_hand, in_turns, make_network, report, run
from torch.nn.parallel import DistributedDataParallel

from composer import Callback


class Listener(Callback):
    """Listens, and does nothing."""

    def batch_end(self, state: object, logger: object) -> None:
        """Do nothing."""


def measure(rounds: int, num_steps: int) -> dict[str, Pairs]:
    """Return the steps of each loop."""
    network = DistributedDataParallel(make_network(), gradient_as_bucket_view=True)
    trainers = {
        "Trainer(on_divergence=None)": WithTrainer(make_network(), num_steps, on_divergence=None),
        "Trainer": WithTrainer(make_network(), num_steps),
        "Trainer with a callback": WithTrainer(make_network(), num_steps, callbacks=[Listener()]),
    }
    return in_turns({BY_HAND: by_hand(network, num_steps)}, trainers, rounds)


if __name__ == "__main__":
    pairs, arguments = run(measure, "Compare a DDP step of the Trainer with one by hand.")
    report(pairs, "DDP step of a GPT", arguments.json, {})
