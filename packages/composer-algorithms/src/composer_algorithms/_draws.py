"""Single random numbers on the host, each from a torch generator, so that `torch.manual_seed` repeats them."""

import random

import torch


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
