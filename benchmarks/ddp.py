"""A DDP step of a 10 M parameter GPT through the Trainer, against a loop written by hand, on two ranks over gloo.

    python benchmarks/ddp.py [--rounds 6] [--steps 8]

All train in the same two processes, in turns, one thread each. Printed are the median times of a step on rank 0 and
their ratios to the loop by hand: for a Trainer that checks no losses, as the loop does not either; for one as it is by
default; and for one with a callback, for which the ranks also exchange the loss and the clock.
"""

from gpt_steps import by_hand, make_network, median_steps_s, report, run, with_trainer
from torch.nn.parallel import DistributedDataParallel

from composer import Callback


class Listener(Callback):
    """Listens, and does nothing."""

    def batch_end(self, state: object, logger: object) -> None:
        """Do nothing."""


def measure(rounds: int, num_steps: int) -> dict[str, float]:
    """Return the median step of each loop in seconds."""
    loops = {
        "by hand": by_hand(DistributedDataParallel(make_network(), gradient_as_bucket_view=True), num_steps),
        "Trainer(on_divergence=None)": with_trainer(make_network(), num_steps, on_divergence=None),
        "Trainer": with_trainer(make_network(), num_steps),
        "Trainer with a callback": with_trainer(make_network(), num_steps, callbacks=[Listener()]),
    }
    return median_steps_s(loops, rounds)


if __name__ == "__main__":
    medians_s, arguments = run(measure, "Compare a DDP step of the Trainer with one by hand.")
    report(medians_s, "DDP step of a GPT", arguments.json)
