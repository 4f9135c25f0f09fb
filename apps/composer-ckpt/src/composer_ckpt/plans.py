"""What a conversion will write, known before anything is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_checkpoint.tensors import StoredTensor
from composer_ckpt.inspect import dtype_name
from composer_ckpt.output import counted, format_size

__all__ = ["Plan", "Progress", "peak_bytes"]

Progress = Callable[[int], object]


@dataclass(slots=True)
class Plan:
    """A conversion: which tensors become which, in which files, and how to write them.

    Args:
        source: As it was typed.
        target: As it was typed.
        formats: Of the source and of the target.
        files: Which tensors go into which file.
        write: Writes all of it to its final name, whole or not at all, and tells how many bytes it has done.
        cast: How many tensors change their dtype, by `'float32 -> bfloat16'`.
        dropped_aliases: Names that are left out, since the target has the tensor under another one.
        renamed: New names by old ones.
        warnings: What the user should know.
        check: Compares tensors that must be equal, before anything is written and where nothing is.
    """

    source: str
    target: str
    formats: tuple[str, str]
    files: Mapping[str, Mapping[str, StoredTensor]]
    write: Callable[[Progress], None]
    cast: Mapping[str, int] = field(default_factory=dict)
    dropped_aliases: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    largest_source: int = 0
    check: Callable[[], None] | None = None

    @property
    def size_bytes(self) -> int:
        """Of all tensors that are written."""
        return sum(tensor.size_bytes for tensors in self.files.values() for tensor in tensors.values())

    def to_dict(self) -> dict[str, Any]:
        """Return what `convert --json` prints."""
        shards = [
            {"file": name, "bytes": sum(t.size_bytes for t in tensors.values()), "tensors": list(tensors)}
            for name, tensors in self.files.items()
        ]
        return {
            "source": self.source,
            "target": self.target,
            "formats": list(self.formats),
            "shards": shards,
            "dropped_aliases": dict(self.dropped_aliases),
            "renamed": dict(self.renamed),
            "cast": dict(self.cast),
            "peak_bytes": peak_bytes(self),
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """Return the plan for people."""
        count = sum(len(tensors) for tensors in self.files.values())
        aliases = ", ".join(f"{alias} -> {name}" for alias, name in list(self.dropped_aliases.items())[:3])
        lines = [f"plan: {self.formats[0]} {self.source} -> {self.formats[1]} {self.target}"]
        lines.append(
            f"      {counted(count, 'tensor')}, {format_size(self.size_bytes)}, in "
            f"{counted(len(self.files), 'file')}; tensors take at most {format_size(peak_bytes(self))} of memory"
        )
        if aliases:
            lines.append(f"      {len(self.dropped_aliases)} tied dropped ({aliases})")
        lines += [f"      {counted(number, 'tensor')} {change}" for change, number in self.cast.items()]
        lines += [f"      note: {warning}" for warning in self.warnings]
        return lines


def peak_bytes(plan: Plan) -> int:
    """Return how much memory tensors take at most at one time: one as it is read and as it is written, and a copy."""
    largest = max((t.size_bytes for tensors in plan.files.values() for t in tensors.values()), default=0)
    return plan.largest_source + 2 * max(largest, plan.largest_source)


def casts(before: Mapping[str, StoredTensor], after: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return how many tensors change from which dtype to which."""
    found: dict[str, int] = {}
    for name, tensor in after.items():
        if before[name].dtype != tensor.dtype:
            change = f"{dtype_name(before[name].dtype)} -> {dtype_name(tensor.dtype)}"
            found[change] = found.get(change, 0) + 1
    return found
