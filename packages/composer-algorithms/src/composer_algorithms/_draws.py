"""Single random numbers on the host, drawn from torch generators so that `torch.manual_seed` reproduces them."""

import hashlib
import random
from typing import Any

import torch

from composer_events import State
from composer_time import Serializable


def draw_integer(low: int, high: int, generator: torch.Generator | None = None) -> int:
    """Return an integer from the uniform distribution on [low, high)."""
    return int(torch.randint(low, high, (), generator=generator))


def draw_uniform(low: float, high: float, generator: torch.Generator | None = None) -> float:
    """Return a number from the uniform distribution on [low, high)."""
    return low + (high - low) * float(torch.rand((), generator=generator))


def draw_beta(alpha: float, generator: torch.Generator | None = None) -> float:
    """Return a number from `Beta(alpha, alpha)`."""
    return draw_dirichlet(alpha, 2, generator)[0]  # Python's betavariate is biased towards 0 for an alpha near 0


def draw_dirichlet(alpha: float, size: int, generator: torch.Generator | None = None) -> list[float]:
    """Return `size` weights with sum 1 from the symmetric Dirichlet distribution."""
    # torch.distributions takes no generator; Python's random module has these distributions.
    source = random.Random(draw_integer(0, 2**63 - 1, generator))
    # Normalized gamma variables. With a small alpha all of them may underflow to 0; the distribution then has the limit
    # of a single weight of 1.
    gammas = [source.gammavariate(alpha, 1.0) for _ in range(size)]
    total = sum(gammas)
    if total == 0:
        chosen = source.randrange(size)
        return [float(index == chosen) for index in range(size)]
    return [gamma / total for gamma in gammas]


def generator_for(source: str) -> torch.Generator:
    """Return a CPU generator seeded from a text."""
    # Not hash(): Python salts the hashes of strings per process, and a resumed run must seed the same generators.
    digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


class ResumableDraws(Serializable):
    """Mixin for algorithms that draw random numbers: `next_generator(state)` is the source of each draw.

    Draws are numbered. Each has a generator of its own, seeded from the run's seed, the rank, the class and the number
    of the draw, so a checkpoint has to keep that number only. Since all ranks make equally many draws, a checkpoint
    written by rank 0 restores all ranks, at any world size, and their draws still differ.

    List it before `Algorithm` among the bases; its `state_dict` adds `num_draws`.
    """

    _num_draws = 0

    def next_generator(self, state: State) -> torch.Generator:
        """Return the CPU generator of the next draw."""
        # state.seed is the rank's own seed. Without rank_zero_seed, rank 1 of one run and rank 0 of a run with the next
        # seed would share their draws.
        source = f"{state.rank_zero_seed}/{state.seed}/{type(self).__qualname__}/{self._num_draws}"
        self._num_draws += 1
        return generator_for(source)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next base class and the number of draws."""
        return {**super().state_dict(), "num_draws": self._num_draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the draw after the last one before the checkpoint.

        Without `num_draws`, as in checkpoints of Composer itself, start with the first draw.
        """
        super().load_state_dict(state)
        self._num_draws = int(state.get("num_draws", 0))
