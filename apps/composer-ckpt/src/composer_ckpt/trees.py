"""Drawing of tensors as the tree of their names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_ckpt.output import counted, format_size


def draw_tree(tensors: Sequence[Mapping[str, Any]], limit: int | None = None) -> list[str]:
    r"""Return lines with the shape, dtype and size of each tensor, and the total of each branch.

    Names below a branch continue its name after a dot, or after the slash that ends it.

    Args:
        tensors: Entries of `inspect --json`.
        limit: Maximum number of lines; branches are folded to stay below it.

    Example:
        >>> tensor = {"name": "fc.weight", "shape": [2, 3], "dtype": "float32", "bytes": 24, "alias_of": None}
        >>> print("\n".join(draw_tree([tensor, {**tensor, "name": "fc.bias", "shape": [2], "bytes": 8}])))
        fc                              2 tensors     32 B
        ├── weight  [2, 3]                float32     24 B
        └── bias  [2]                     float32      8 B
    """
    root = _Branch()
    for tensor in tensors:
        root.add(_parts(tensor["name"]), tensor)
    depth = None
    if limit is not None and len(tensors) > limit:
        # The deepest tree that fits, or a single level if none does.
        depth = next((depth for depth in range(8, 1, -1) if sum(1 for _ in root.lines("", "", depth)) <= limit), 1)
    rows = list(root.lines("", "", depth))
    width = max((len(left) for left, _, _ in rows), default=0)
    lines = [f"{left:<{max(width, 24)}}  {kind:>15}  {size:>7}" for left, kind, size in rows]
    return lines if depth is None else [*lines, f"(folded: {counted(len(tensors), 'tensor')}; --tree shows all)"]


class _Branch:
    def __init__(self) -> None:
        self.children: dict[str, _Branch] = {}
        self.leaves: list[Mapping[str, Any]] = []

    def add(self, parts: Sequence[str], tensor: Mapping[str, Any]) -> None:
        here = self
        for part in parts:
            here = here.children.setdefault(part, _Branch())
        here.leaves.append(tensor)

    def all(self) -> Iterator[Mapping[str, Any]]:
        pending: list[_Branch] = [self]
        while pending:
            branch = pending.pop()
            yield from branch.leaves
            pending.extend(branch.children.values())

    def lines(self, indent: str, name: str, depth: int | None) -> Iterator[tuple[str, str, str]]:
        """Yield the left column, the dtype or count, and the size."""
        for order, (key, child) in enumerate(self.children.items()):
            is_last = order == len(self.children) - 1
            corner, below = (("└── ", "    ") if is_last else ("├── ", "│   ")) if name else ("", "")
            joined, branch = _chain(key, child)
            shown = joined[:-1] if branch.children and joined.endswith(".") and joined != "." else joined
            for tensor in branch.leaves:
                layout = f" {tensor['layout']}" if "layout" in tensor else ""
                left = f"{indent}{corner}{shown}  {tensor['shape']}{layout}"
                kind = tensor["dtype"] if tensor["alias_of"] is None else "tied"
                yield left, kind, format_size(tensor["bytes"])
            if branch.children:
                inside = list(branch.all())
                own = sum(tensor["bytes"] for tensor in inside if tensor["alias_of"] is None)
                yield f"{indent}{corner}{shown}", counted(len(inside), "tensor"), format_size(own)
                if depth is None or depth > 1:
                    yield from branch.lines(indent + below, joined, None if depth is None else depth - 1)


def _chain(key: str, branch: _Branch) -> tuple[str, _Branch]:
    while len(branch.children) == 1 and not branch.leaves:
        ((below, child),) = branch.children.items()
        key, branch = f"{key}{below}", child
    return key, branch


def _parts(name: str) -> list[str]:
    """Split a name after slashes, and its last part after dots; the joined parts are the name."""
    *containers, last = name.split("/")
    *outer, own = last.split(".")
    return [*(f"{part}/" for part in containers), *(f"{part}." for part in outer), own]
