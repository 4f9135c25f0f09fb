"""Single random numbers on the host, each from a torch generator, so that `torch.manual_seed` repeats them."""

import hashlib
import random
from typing import TYPE_CHECKING, Any

import torch

from composer_time import Serializable

if TYPE_CHECKING:
    from composer_events.state import State


def draw_integer(low: int, high: int, generator: torch.Generator | None = None) -> int:
    """Return an integer in [low, high), each with the same probability."""
    return int(torch.randint(low, high, (), generator=generator))


def draw_uniform(low: float, high: float, generator: torch.Generator | None = None) -> float:
    """Return a number from the uniform distribution between two bounds."""
    return low + (high - low) * float(torch.rand((), generator=generator))


def draw_beta(alpha: float, generator: torch.Generator | None = None) -> float:
    """Return a number from `Beta(alpha, alpha)`."""
    return draw_dirichlet(alpha, 2, generator)[0]  # Python's betavariate leans to 0 for an alpha near 0


def draw_dirichlet(alpha: float, size: int, generator: torch.Generator | None = None) -> list[float]:
    """Return `size` weights that add up to 1, from the symmetric Dirichlet distribution."""
    source = _python_random(generator)
    # Gamma variables divided by their sum. For a small alpha all of them may underflow to 0; the limit of the
    # distribution, one weight of 1, is then right.
    gammas = [source.gammavariate(alpha, 1.0) for _ in range(size)]
    total = sum(gammas)
    if total == 0:
        chosen = source.randrange(size)
        return [float(index == chosen) for index in range(size)]
    return [gamma / total for gamma in gammas]


def _python_random(generator: torch.Generator | None) -> random.Random:
    # torch.distributions takes no generator; Python's own has these distributions.
    return random.Random(draw_integer(0, 2**63 - 1, generator))


class ResumableDraws(Serializable):
    """Mixin for an algorithm that draws random numbers: `next_generator(state)` is the source of each draw.

    The draws are numbered. Each has a generator of its own, seeded from the run's seed, the rank, the class and the
    draw's number, so the number is all that a checkpoint must keep. Since all ranks make equally many draws, a
    checkpoint that only rank 0 wrote restores all ranks, in a run of any world size, to draws that still differ.

    Put it before `Algorithm` in the list of bases; its `state_dict` adds `num_draws`.
    """

    _num_draws = 0

    def next_generator(self, state: "State") -> torch.Generator:
        """Return the generator, on the CPU, of the next draw."""
        # state.seed is the rank's own seed; with rank_zero_seed beside it, a rank of one run and another rank of a run
        # that has the next seed do not share their draws.
        source = f"{state.rank_zero_seed}/{state.seed}/{type(self).__qualname__}/{self._num_draws}"
        self._num_draws += 1
        digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))

    def state_dict(self) -> dict[str, Any]:
        """Return what the next base returns, and how many draws were made."""
        return {**super().state_dict(), "num_draws": self._num_draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the draw that follows the last one before the checkpoint.

        A checkpoint without `num_draws`, as Composer's own are, starts with the first draw.
        """
        super().load_state_dict(state)
        self._num_draws = int(state.get("num_draws", 0))
