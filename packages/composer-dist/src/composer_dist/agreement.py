"""Checks that all ranks train the same thing, before a disagreement makes a collective hang."""

import hashlib
import json
import os
import random
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as tdist

from composer_dist.collectives import barrier, broadcast_object_list, cpu_group, gather_objects, is_initialized
from composer_dist.env import get_local_rank, get_node_rank
from composer_dist.initialize import get_timeout

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = [
    "RankDisagreementError",
    "check_agreement",
    "describe_model",
    "get_node_signal_file_name",
    "write_signal_file",
    "busy_wait_for_local_rank_zero",
    "local_rank_zero_download_and_wait",
    "run_local_rank_zero_first",
]

_MAX_DIFFERENCES = 20
_MAX_VALUE_LENGTH = 200
_ABSENT = "nothing"


class RankDisagreementError(ValueError):
    """The ranks of a run were started with different settings, models or data."""


def check_agreement(facts: Mapping[str, Any], *, timeout_s: float | None = None) -> None:
    """Raise on every rank if the ranks have different facts. Every rank must call this.

    Ranks exchange 32-byte digests, and the facts only if the digests differ. A single process always agrees.

    Args:
        facts: Values that must be equal everywhere: a seed, a batch size, `describe_model(model)`, a checkpoint's
            path. Nested mappings are compared by key, in any order, all other values by their `repr`. Leave out
            objects whose `repr` contains an address.
        timeout_s: Seconds after which missing ranks are reported. The timeout of `initialize_dist` when `None`.

    Raises:
        RankDisagreementError: If the facts differ; names each fact, its values and their ranks.
        RuntimeError: If a rank does not arrive in time; names the missing ranks as far as rank 0 knows them.

    Example:
        >>> check_agreement({"seed": 17, "optimizer": {"lr": 0.1}})
    """
    if not is_initialized() or tdist.get_world_size() == 1:
        return
    # Turns a missing rank into an error; the collectives below would hang.
    _meet(get_timeout() if timeout_s is None else timeout_s)
    flat = _flatten(facts)
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    all_digests = [torch.empty_like(mine) for _ in range(tdist.get_world_size())]
    tdist.all_gather(all_digests, mine, group=cpu_group(None))
    if all(torch.equal(other, mine) for other in all_digests):
        return
    differences = _differences(gather_objects(flat, None))
    if not differences:
        return  # unreachable: equal facts have equal digests
    shown = differences[:_MAX_DIFFERENCES]  # two unrelated models differ in every tensor
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    raise RankDisagreementError(
        "the ranks do not agree on what to train, and would hang or train different things:\n  "
        + "\n  ".join(shown)
        + "\nStart every rank with the same script, arguments, configuration and files."
    )


def describe_model(model: "Module") -> dict[str, str]:
    """Return shape, dtype and trainability of each parameter and buffer by name.

    Values are not read, so ranks may hold different weights.

    Example:
        >>> describe_model(torch.nn.Linear(2, 1))
        {'weight': '(1, 2) float32', 'bias': '(1,) float32'}
    """
    described = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        described[name] = _describe(parameter) + ("" if parameter.requires_grad else " frozen")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        described[name] = f"{_describe(buffer)} buffer"
    return described


def _describe(tensor: torch.Tensor) -> str:
    # Reading the shape of a lazy parameter raises before its first forward pass.
    shape = "no shape yet" if torch.nn.parameter.is_lazy(tensor) else str(tuple(tensor.shape))
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _meet(timeout_s: float) -> None:
    try:
        # The only barrier that reports which ranks are missing; only gloo has it.
        tdist.monitored_barrier(group=cpu_group(None), timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {tdist.get_rank()} waited {timeout_s} s for the other ranks before training, and not all of them "
            f"came: {error} Look at the output of the ranks that are missing: they failed earlier, or are at another "
            "place in the script. If they are only slow, raise dist_timeout."
        ) from error


def _flatten(facts: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = repr(value)
    return flat


def _differences(facts_of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for facts in facts_of_ranks for name in facts)  # a dict keeps rank 0's order
    lines = []
    for name in names:
        ranks_of_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_ranks):
            ranks_of_value.setdefault(facts.get(name, _ABSENT), []).append(rank)
        if len(ranks_of_value) > 1:
            groups = [f"{_shorten(value)} on {_name_ranks(ranks)}" for value, ranks in ranks_of_value.items()]
            more = [f"{len(groups) - 4} other values elsewhere"] if len(groups) > 5 else []
            lines.append(f"{name}: {', '.join(groups[:4] + more if more else groups)}")
    return lines


def _shorten(value: str) -> str:
    if len(value) <= _MAX_VALUE_LENGTH:
        return value
    half = _MAX_VALUE_LENGTH // 2
    return f"{value[:half]} ... {value[-half:]}"


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, `'ranks 0-6, 9'`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)


_DONE = "local rank zero done"
_FAILED = "local rank zero failed: "
_POLL_S, _LONGEST_POLL_S = 0.01, 0.1


def get_node_signal_file_name(rng: random.Random | None = None) -> str:
    """Return a new file name that is the same on all ranks. Every rank must call this.

    Args:
        rng: The generator that rank 0 draws the name from. A new one when `None`, which leaves the generators that
            training uses unchanged.
    """
    rng = rng or random.Random()
    suffix = "".join(rng.choices(string.ascii_letters + string.digits, k=6))
    name = [f"._signal_file_node{get_node_rank()}_{suffix}"]
    broadcast_object_list(name, src=0)
    return name[0]


def write_signal_file(signal_file_name: str, dir_path: str | None = None) -> str:
    """Write a signal file on the node's local rank 0 and return its path.

    Args:
        signal_file_name: A name from `get_node_signal_file_name`.
        dir_path: The folder, created if missing. The working directory when `None`.
    """
    return _write(signal_file_name, dir_path, _DONE)


@contextmanager
def local_rank_zero_download_and_wait(expected_file_path: str, *, timeout: float | None = None) -> Iterator[None]:
    """Run the body at once on local rank 0, and on the node's other ranks once the file exists.

    Needs no process group. Write the file under another name and rename it, so that it appears complete.

    Args:
        expected_file_path: The file that local rank 0 creates.
        timeout: Seconds to wait. The timeout of `initialize_dist` when `None`.

    Raises:
        TimeoutError: If the file has not appeared by then.
    """
    if get_local_rank() != 0:
        _wait_for(Path(expected_file_path), timeout)
    yield


@contextmanager
def busy_wait_for_local_rank_zero(dir_path: str | None = None, *, timeout: float | None = None) -> Iterator[None]:
    """Run the body on every rank, and leave once the node's local rank 0 has finished it. Every rank must call this.

    Ranks poll for a file instead of waiting in a collective, so local rank 0 may take longer than a collective's
    timeout. Each node uses a file of its own, also in a shared folder, and deletes it on leaving the context.

    Args:
        dir_path: A folder that all ranks of the node can read. The working directory when `None`.
        timeout: Seconds to wait after the body. The timeout of `initialize_dist` when `None`.

    Raises:
        RuntimeError: On every rank of the node, if the body failed on local rank 0, which raises its own error.
        TimeoutError: If local rank 0 has not finished by then.
    """
    name = get_node_signal_file_name()
    outcome = _DONE
    try:
        yield
    except BaseException as error:
        outcome = f"{_FAILED}{type(error).__name__}: {error}"
        raise
    finally:
        _leave_together(name, dir_path, outcome, timeout)


@contextmanager
def run_local_rank_zero_first() -> Iterator[None]:
    """Run the body on each node's local rank 0 first, and then on the others. Every rank must call this.

    The other ranks run the body even if it failed on local rank 0.

    Raises:
        RuntimeError: If several processes were started without a process group.
    """
    if not is_initialized():
        barrier()  # raises if other ranks were started
        yield
        return
    first = get_local_rank() == 0
    if not first:
        barrier()
    try:
        yield
    # Also after an error, or the other ranks would hang in their barrier.
    finally:
        if first:
            barrier()


def _leave_together(name: str, dir_path: str | None, outcome: str, timeout: float | None) -> None:
    """Synchronize the ranks once local rank 0 has written its outcome, and raise if the body failed there."""
    first = get_local_rank() == 0
    # Nodes may share the folder, but each waits for its own local rank 0.
    path = Path(_write(f"{name}_of_node{get_node_rank()}", dir_path, outcome))
    try:
        if not first:
            _wait_for(path, timeout)
            outcome = path.read_text()
        barrier()  # every rank has read the file, so it may be deleted
    finally:
        if first:
            path.unlink(missing_ok=True)
    barrier()  # no rank leaves while the file still exists
    if not first and outcome.startswith(_FAILED):
        raise RuntimeError(f"{outcome} (the traceback is that of local rank 0 of node {get_node_rank()})")


def _write(name: str, dir_path: str | None, text: str) -> str:
    folder = os.getcwd() if dir_path is None else dir_path
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    if get_local_rank() == 0:
        unfinished = Path(f"{path}.{uuid4().hex}.part")  # other nodes may write the same file into a shared folder
        unfinished.write_text(text)
        unfinished.replace(path)
    return path


def _wait_for(path: Path, timeout: float | None) -> None:
    """Poll for a file, often at first and then every tenth of a second."""
    timeout = get_timeout() if timeout is None else timeout
    deadline, pause = time.monotonic() + timeout, _POLL_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} did not appear within {timeout} s. Local rank 0 writes it: look for the reason in its log, "
                "check that this rank sees the same folder, or pass initialize_dist() a longer timeout."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_S)
