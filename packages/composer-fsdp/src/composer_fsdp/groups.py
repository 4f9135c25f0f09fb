"""Process groups by the values of `process_group`.

| value | ranks of the group of rank g, of W ranks with L on each node |
|---|---|
| `'self'`, `'set1'` | g alone |
| `'node'` | as `'setL'` |
| `'local_rank_across_nodes'` | as `'modL'` |
| `'setK'` | K consecutive ranks |
| `'modK'` | every K-th rank |
| a list of ranks | these ranks; each rank gives its own list |
| a pair of these | the ranks that shard, and the ranks that replicate |
| a `ProcessGroup` | its ranks |
"""

import math
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as tdist
from torch.distributed.tensor import DTensor

from composer_dist import dist

_NAMED = re.compile(r"(set|mod)(\d+)")
_ACCEPTED = (
    "Use 'self', 'node', 'local_rank_across_nodes', 'setK' or 'modK' with a number K, a list of ranks, a ProcessGroup, "
    "or a pair of these, of which the first shares and the second replicates"
)


def check_group(group: Any, world_size: int | None) -> bool:
    """Validate a `process_group`, and return whether it is a pair of groups that shard and that replicate."""
    if is_pair(group):
        for part in group:
            if is_pair(part):
                raise ValueError(f"Unsure how to setup process_group={group!r}: a pair within a pair. {_ACCEPTED}.")
            check_group(part, world_size)
        if world_size is not None and isinstance(group[0], str) and isinstance(group[1], str):
            check_grids(group, _lists_of(group[0], world_size), _lists_of(group[1], world_size))
        return True
    if isinstance(group, str) and world_size is not None:
        _lists_of(group, world_size)
    elif _is_ranks(group):
        ranks, limit = cast("Sequence[int]", group), math.inf if world_size is None else world_size
        if len({*ranks}) < len(ranks) or min(ranks) < 0 or max(ranks) >= limit:
            numbers = f" between 0 and {limit - 1}" * (limit < math.inf)
            raise ValueError(f"process_group={group!r} is not a list of ranks, each once. Give numbers{numbers}.")
    elif not isinstance(group, str | tdist.ProcessGroup):
        raise ValueError(f"Unsure how to setup process_group={group!r}. {_ACCEPTED}.")
    return False


def _lists_of(name: str, world_size: int) -> list[list[int]]:
    local = dist.get_local_world_size()
    return [ranks_of(name, rank, world_size, local) for rank in range(world_size)]


def check_grids(pair: Any, shares: Sequence[Sequence[int]], replicas: Sequence[Sequence[int]]) -> None:
    """Raise if the groups of a pair do not cross each other like rows and columns of grids."""
    checked: set[int] = set()
    for rank in range(len(shares)):
        if rank in checked:
            continue
        rows = [shares[other] for other in replicas[rank]]
        for place, member in enumerate(shares[rank]):
            # A row that is too short leaves out a rank, so that the comparison fails as it should.
            if [row[place] for row in rows if place < len(row)] != list(replicas[member]):
                raise ValueError(
                    f"process_group={pair!r}: rank {rank} would share with {list(shares[rank])} and replicate with "
                    f"{list(replicas[rank])}, which are not the row and the column of a grid of ranks. Give a pair "
                    f"such as ('node', 'local_rank_across_nodes') or ('setK', 'modK') with the same number K."
                )
        checked.update(member for row in rows for member in row)


def is_pair(group: Any) -> bool:
    """Return whether a value is a pair of groups."""
    return isinstance(group, tuple | list) and len(group) == 2 and not _is_ranks(group)


def ranks_of(name: str, rank: int, world_size: int, local_world_size: int) -> list[int]:
    """Return the ranks of the named group that a rank belongs to.

    Example:
        >>> ranks_of("set2", rank=3, world_size=4, local_world_size=4)
        [2, 3]
        >>> ranks_of("mod2", rank=3, world_size=4, local_world_size=4)
        [1, 3]
    """
    aliases = {
        "self": "set1",
        "node": f"set{local_world_size}",
        "local_rank_across_nodes": f"mod{local_world_size}",
    }
    match = _NAMED.fullmatch(aliases.get(name.lower(), name.lower()))
    if match is None or int(match[2]) == 0:
        raise ValueError(f"Unsure how to setup process_group={name!r}. {_ACCEPTED}.")
    size = int(match[2])
    if world_size % size:
        kind = "set size" if match[1] == "set" else "mod"
        raise RuntimeError(
            f"process_group={name!r}: {world_size} must be divisible by {kind} ({size}). Choose a divisor of the "
            f"number of ranks."
        )
    if match[1] == "mod":
        return list(range(rank % size, world_size, size))
    first = rank // size * size
    return list(range(first, first + size))


class GroupCache:
    """A cache of process groups: the same ranks get the same group again."""

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[int, ...], ...], tdist.ProcessGroup] = {}

    def get(self, group: Any) -> tdist.ProcessGroup:
        """Return this rank's group for a value that `check_group` accepts. Every rank must call this."""
        if isinstance(group, tdist.ProcessGroup):
            return group
        rank, world_size = dist.get_global_rank(), dist.get_world_size()
        if isinstance(group, str):
            lists = _lists_of(group, world_size)
        else:
            lists = dist.all_gather_object([int(member) for member in group])
            by_rank = dict(enumerate(map(sorted, lists)))
            for other, members in enumerate(lists):
                unique = sorted(set(members))
                if other not in members or any(by_rank.get(member) != unique for member in members):
                    raise ValueError(
                        f"process_group={members!r} on rank {other} does not fit the other ranks' lists, "
                        f"{dict(enumerate(lists))}. Each rank must give the list that it is in, and the ranks of a "
                        f"list the same one."
                    )
        # Equal on every rank, so that either all ranks create the group or none does.
        key = tuple(tuple(members) for members in lists)
        if key not in self._groups:
            # Creating groups is a collective: every rank creates all of them, in the same order.
            distinct = [list(members) for members in dict.fromkeys(tuple(sorted(members)) for members in lists)]
            own, _ = tdist.new_subgroups_by_enumeration(distinct)
            assert isinstance(own, tdist.ProcessGroup)  # each rank is in its own list
            self._groups[key] = own
        assert rank in key[rank]
        return self._groups[key]


def _is_ranks(group: Any) -> bool:
    return (
        isinstance(group, Sequence)
        and not isinstance(group, str)
        and len(group) > 0
        and all(isinstance(member, int) and not isinstance(member, bool) for member in group)
    )


def own_region(sharded: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of a full tensor that corresponds to this rank's shard of a tensor of its shape, as a view."""
    (chunk,) = sharded.__create_chunk_list__()  # as torch's own checkpoints do
    for dim, (start, length) in enumerate(zip(chunk.offsets, sharded.to_local().shape, strict=True)):
        # A rank beyond the last row has an empty shard, whose offset may lie beyond the end.
        whole = whole.narrow(dim, min(start, whole.shape[dim] - length), length)
    return whole
