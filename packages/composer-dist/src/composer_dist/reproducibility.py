"""Seeds, random number generator states, and deterministic algorithms."""

import functools
import logging
import operator
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer_dist.collectives import all_gather_object
from composer_dist.env import get_global_rank, get_world_size

__all__ = [
    "MAX_SEED",
    "get_random_seed",
    "seed_all",
    "configure_deterministic_mode",
    "get_rng_state",
    "load_rng_state",
    "seed_context",
    "get_sampler",
]

# Composer's logger name, so that `python_log_level` of a Trainer applies.
_log = logging.getLogger("composer.utils.reproducibility")

MAX_SEED = 2**32 - 1
"""The largest seed that NumPy accepts."""

_LONG_CUDA_STATE, _CUDA_STATE = 816, 16  # older torch put 800 unused bytes before seed and offset


def get_random_seed() -> int:
    """Return a seed between 0 and `MAX_SEED` that does not depend on the generators' state.

    Ranks draw different seeds: broadcast rank 0's where all need the same.
    """
    return random.SystemRandom().randint(0, MAX_SEED)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, of NumPy if it is installed, and of torch on all devices.

    Ranks should draw different numbers: seed rank `r` with the run's seed plus `r`.

    Args:
        seed: An integer; also a NumPy integer or a one-element integer tensor.

    Raises:
        TypeError: If the seed is not an integer.
        ValueError: If the seed is not between 0 and `MAX_SEED`.

    Example:
        >>> seed_all(7)
        >>> first = torch.rand(3)
        >>> seed_all(7)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    try:
        seed = operator.index(seed)  # unlike int(), rejects 1.5 and "1"
    except TypeError:
        raise TypeError(
            f"Invalid seed: seed={seed!r} is a {type(seed).__name__}, not an integer between 0 and {MAX_SEED}. Pass "
            "one, such as get_random_seed()."
        ) from None
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"Invalid seed: seed={seed!r} is not between 0 and {MAX_SEED}. Choose one that is.")
    _log.info("Setting seed to %d", seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)  # also seeds CUDA, MPS and XPU, even before their first use


def configure_deterministic_mode() -> None:
    """Make torch use only deterministic algorithms, for the whole process.

    Operations without a deterministic algorithm raise, and some become slower. Call it before any work on a GPU: it
    sets `CUBLAS_WORKSPACE_CONFIG`, which cuBLAS reads when it starts.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    _log.info("Deterministic mode is on. Training may become slower.")


def get_rng_state() -> list[dict[str, Any]]:
    """Return the state of every rank's generators, in rank order. Every rank must call this.

    Returns:
        For each rank a dict with `python`, `torch`, `numpy` if it is installed, and `cuda` if it is in use, or the type
            of another accelerator, such as `mps`. Values are tensors and plain Python values, which `torch.load` reads
            with `weights_only=True`.
    """
    return all_gather_object(_local_state())


def load_rng_state(
    rng_state_dicts: Sequence[Mapping[str, Any]], rank: int | None = None, world_size: int | None = None
) -> None:
    """Restore this rank's generators from the result of `get_rng_state`; the number of ranks may differ.

    A rank without an entry keeps its current state.

    Args:
        rng_state_dicts: One entry for each rank of the run that saved them.
        rank: The place of this rank's entry, if not its own number; ranks that split tensors share an entry.
        world_size: The number of entries that the present ranks have, if not that of the ranks.

    Raises:
        ValueError: If the list is empty, or if this rank's entry lacks the state of Python or torch.

    Warns:
        UserWarning: If the number of ranks has changed, or if a state is missing, unused or does not fit.
    """
    world_size = get_world_size() if world_size is None else world_size
    rank, saved = get_global_rank() if rank is None else rank, len(rng_state_dicts)
    if saved == 0:
        raise ValueError(
            f"rng_state_dicts={rng_state_dicts!r} holds no rank's random state. Pass what get_rng_state() returned, "
            "which has one entry for each rank, or leave the generators as they are."
        )
    own = rng_state_dicts[rank] if rank < saved else None
    # Checked before anything is restored, so that an error changes nothing.
    if own is not None and (missing := [key for key in ("python", "torch") if key not in own]):
        raise ValueError(
            f"rng_state_dicts[{rank}] has no {' and no '.join(map(repr, missing))}, only {sorted(own)}. An entry is a "
            "dict as get_rng_state() returns it for each rank; pass those."
        )
    if world_size != saved:
        kept = f" Ranks {saved} and up keep their own." if world_size > saved else ""
        warnings.warn(
            f"the random state of {saved} ranks is loaded into a run of {world_size}, so what these ranks draw "
            f"differs from what the saved run would have drawn.{kept} To repeat that run, use {saved} ranks.",
            stacklevel=2,
        )
    for complaint in [] if own is None else _load_local_state(own):
        warnings.warn(complaint, stacklevel=2)


@contextmanager
def seed_context(seed: int) -> Iterator[None]:
    """Seed this process's generators inside the context and restore them afterwards, also after an error.

    Example:
        >>> seed_all(1)
        >>> with seed_context(2):
        ...     inside = torch.rand(())
        >>> after = torch.rand(())
        >>> seed_all(1)
        >>> torch.equal(after, torch.rand(()))
        True
    """
    state = _local_state()
    try:
        seed_all(seed)
        yield
    finally:
        _load_local_state(state)
        if "cuda" not in state and torch.cuda.is_available():
            # CUDA was not in use and has no state to restore: seed it as torch does at its first use.
            torch.cuda.manual_seed_all(torch.initial_seed())


def _local_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.random.get_rng_state()}
    numpy = _numpy()
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)  # `torch.load(weights_only=True)` rejects arrays
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # reading the state would initialize CUDA
        state["cuda"] = torch.cuda.get_rng_state()
    elif (other := _other_accelerator()) is not None:
        state[other] = torch.get_device_module(other).get_rng_state()
    return state


def device_rng(device: torch.device) -> tuple[Callable[[Any], object], torch.Tensor] | None:
    """Return the state of a device's own random generator, with the function that restores it.

    `None` for the CPU, whose generator `torch.get_rng_state` reads, and for devices without a generator.
    """
    module: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(module, "get_rng_state"):
        return None
    if device.type == "mps":  # has one device, so its functions take none
        return module.set_rng_state, module.get_rng_state()
    return functools.partial(module.set_rng_state, device=device), module.get_rng_state(device)


def _other_accelerator() -> str | None:
    """Return the type of an available accelerator that is not CUDA and has a random generator."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "cuda" or not hasattr(torch.get_device_module(device), "get_rng_state"):
        return None
    return device.type


def _load_local_state(state: Mapping[str, Any]) -> list[str]:
    """Restore this process's generators and return a message for each state that does not fit."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))  # JSON turns tuples into lists
    torch.random.set_rng_state(state["torch"].cpu())
    complaints: list[str] = []
    numpy = _numpy()
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(tuple(state["numpy"]))
    elif "numpy" in state:
        complaints.append("the saved random state of NumPy is not used, because NumPy is not installed here.")
    cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    if "cuda" in state and cuda_in_use:
        complaints += _load_cuda_state(state["cuda"].cpu())
    elif "cuda" in state:
        complaints.append("the saved CUDA random state is not used, because this process does not use CUDA.")
    elif cuda_in_use:
        complaints.append("no CUDA random state was saved, so the CUDA generator keeps the state that it has.")
    elif (other := _other_accelerator()) in state and other is not None:
        torch.get_device_module(other).set_rng_state(state[other].cpu())
    return complaints


def _load_cuda_state(state: torch.Tensor) -> list[str]:
    """Restore the current CUDA device's generator, unless the state's size is unknown to this torch."""
    try:
        torch.cuda.set_rng_state(state[-_CUDA_STATE:] if state.numel() == _LONG_CUDA_STATE else state)
    except RuntimeError as error:
        return [
            f"the saved CUDA random state of {state.numel()} bytes does not fit this torch and is not used: {error}"
        ]
    return []


def _numpy() -> ModuleType | None:
    try:
        import numpy  # optional; torch has usually imported it already
    except ImportError:
        return None
    return numpy


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> "DistributedSampler[int]":
    """Return a sampler that gives this rank its share of a map-style dataset.

    A single process gets the whole dataset, so the same line serves one rank and many. The dataloader's `batch_size`
    counts the samples of one rank.

    Args:
        dataset: A dataset of the same length on every rank.
        drop_last: Drop the samples that do not divide evenly, instead of repeating some.
        shuffle: Draw a new order each epoch; needs `sampler.set_epoch(epoch)` before each, which a Trainer calls.
        num_replicas: Number of shares. The world size when `None`.
        rank: Index of the share. This process's rank when `None`.
        seed: Seed of the order; the same on every rank.

    Raises:
        TypeError: If the dataset is an `IterableDataset`, such as a `StreamingDataset`, which splits itself over
            ranks.

    Example:
        >>> list(get_sampler(range(5), num_replicas=2, rank=1, drop_last=True))
        [1, 3]
    """
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"dataset={dataset!r} is an IterableDataset, which splits its samples over ranks and workers itself; a "
            "sampler is for map-style datasets. Pass it to its DataLoader without a sampler."
        )
    return DistributedSampler(
        dataset,
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
