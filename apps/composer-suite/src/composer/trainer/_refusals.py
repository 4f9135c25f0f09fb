"""Arguments that some ranks refuse and others do not, of which all must hear before they wait for each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer.trainer._arguments import check_dist_timeout
from composer_dist import RankDisagreementError, agreement, dist, get_world_size
from composer_dist.devices import Device, get_device
from composer_dist.initialize import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from composer.trainer._given import Given

__all__ = ["compare", "share_refusal"]

_MOST_SHOWN = 8
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, which is another one in each process


def share_refusal(refusal: Exception, given: Given) -> None:
    """Tell the other ranks that this one refuses its arguments. Every rank must call this, or `compare`.

    Raises:
        RankDisagreementError: If they do not all refuse theirs in the same words.
    """
    try:
        if get_world_size() == 1:
            return
        dist.initialize_dist(_device_of(given), _timeout_s_of(given))
        compare({}, refusal)
    except RankDisagreementError:
        raise
    except Exception:
        return  # nobody is there to be told, and what is wrong here is known


def compare(facts: Mapping[str, Any], refusal: Exception | None = None) -> None:
    """Raise, on every rank alike, if the ranks have different facts, or if some refuse their arguments.

    Every rank must call this, or `share_refusal`.

    Args:
        facts: As `check_agreement` takes them.
        refusal: With what this rank refuses its arguments, if it does.

    Raises:
        RankDisagreementError: With the facts that differ, or else with what each rank refuses.
    """
    said = None if refusal is None else _ADDRESS.sub("", f"{type(refusal).__name__}: {refusal}")
    try:
        agreement.check_agreement({"refusal": said, **facts})
    except RankDisagreementError:
        of_ranks = dist.all_gather_object(said)
        if not any(of_ranks):
            raise
        refusals = [f"rank {rank}: {text}" for rank, text in enumerate(of_ranks) if text]
        raise RankDisagreementError(
            f"{len(refusals)} of {len(of_ranks)} ranks cannot use the arguments that they were given:\n  "
            + "\n  ".join(refusals[:_MOST_SHOWN])
            + "\nThe arguments of every rank must be good, and the same where they are not about files or loggers."
        ) from refusal


def _device_of(given: Given) -> Device:
    try:
        return get_device(given.device)
    except Exception:
        return get_device(None)  # which is what the other ranks most likely have


def _timeout_s_of(given: Given) -> float:
    try:
        check_dist_timeout(given.dist_timeout)
    except Exception:
        return DEFAULT_TIMEOUT_S
    return given.dist_timeout
