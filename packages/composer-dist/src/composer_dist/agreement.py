"""Whether all ranks are about to train the same thing, found out before they wait for each other."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as tdist

from composer_dist.collectives import is_initialized
from composer_dist.initialize import get_timeout
from composer_dist.objects import cpu_group, gather_objects

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["RankDisagreementError", "check_agreement", "describe_model"]

_MAX_DIFFERENCES = 20
_MAX_VALUE_LENGTH = 200
_ABSENT = "nothing"


class RankDisagreementError(ValueError):
    """The ranks of a run were started with different settings, models or data."""


def check_agreement(facts: Mapping[str, Any], *, timeout_s: float | None = None) -> None:
    """Raise, on every rank alike, if the ranks do not have the same facts. Every rank must call this.

    While they agree, 32 bytes of each rank travel. Where they do not, the facts themselves do, and the error shows
    what differs. A process that is alone agrees with itself.

    Args:
        facts: Whatever must be the same everywhere: a seed, a batch size, `describe_model(model)`, a checkpoint's path.
            Mappings inside are looked into, in any order of their keys; everything else is compared by what `repr`
            shows of it, so objects whose `repr` has an address do not belong here.
        timeout_s: Seconds until a rank that does not come is named; by default as `initialize_dist` was told.

    Raises:
        RankDisagreementError: If the facts differ: what, and which ranks have which value.
        RuntimeError: If a rank does not come: which ones, as far as rank 0 can tell.

    Example:
        >>> check_agreement({"seed": 17, "optimizer": {"lr": 0.1}})
    """
    if not is_initialized() or tdist.get_world_size() == 1:
        return
    _meet(get_timeout() if timeout_s is None else timeout_s)
    flat = _flatten(facts)
    if _digests_agree(flat):
        return
    differences = _differences(gather_objects(flat, None))
    if not differences:
        return  # cannot be: equal facts have equal digests
    shown = differences[:_MAX_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    raise RankDisagreementError(
        "the ranks do not agree on what to train, and would hang or train different things:\n  "
        + "\n  ".join(shown)
        + "\nStart every rank with the same script, arguments, configuration and files."
    )


def describe_model(model: "Module") -> dict[str, str]:
    """Return what the ranks' models must have in common: shape, dtype and trainability of each tensor by its name.

    The numbers in the tensors are not read.

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
    # A parameter that is still to be initialized has no shape.
    shape = "no shape yet" if torch.nn.parameter.is_lazy(tensor) else str(tuple(tensor.shape))
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _meet(timeout_s: float) -> None:
    """Wait for all ranks, and name those that do not come."""
    try:
        # Of the barriers the one that knows who is missing; gloo alone has it.
        tdist.monitored_barrier(group=cpu_group(None), timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {tdist.get_rank()} waited {timeout_s} s for the other ranks before training, and not all of them "
            f"came: {error} Look at the output of the ranks that are missing: they failed earlier, or are at another "
            "place in the script. If they are only slow, raise dist_timeout."
        ) from error


def _digests_agree(flat: Mapping[str, str]) -> bool:
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    all_digests = [torch.empty_like(mine) for _ in range(tdist.get_world_size())]
    tdist.all_gather(all_digests, mine, group=cpu_group(None))
    return all(torch.equal(other, mine) for other in all_digests)


def _flatten(facts: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Return the facts in one level, as text; `{"a": {"b": 1}}` becomes `{"a.b": "1"}`."""
    flat: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = repr(value)
    return flat


def _differences(facts_of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each fact that is not the same everywhere."""
    names = dict.fromkeys(name for facts in facts_of_ranks for name in facts)  # in the order of the first rank
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
