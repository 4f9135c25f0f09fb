"""Plan of a conversion, made before anything is written."""

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
    """A conversion: the tensors of each file, and a function to write them.

    Args:
        source: As given on the command line.
        target: As given on the command line.
        formats: Formats of the source and of the target.
        files: Tensors of each file.
        write: Writes everything under its final name, completely or not at all, and reports the bytes written.
        cast: Number of tensors whose dtype changes, by `'float32 -> bfloat16'`.
        dropped_aliases: Names that are left out, because the target has the tensor under another name.
        renamed: New names by old names.
        warnings: Notes for the user.
        check: Compares tensors that must be equal, before anything is written, also in a dry run.
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
        """Size of all tensors to write, in bytes."""
        return sum(tensor.size_bytes for tensors in self.files.values() for tensor in tensors.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as `convert --json` prints it."""
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
        """Return the plan as text."""
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
    """Return the peak memory of tensors in bytes: one as read and as written, and a copy."""
    largest = max((t.size_bytes for tensors in plan.files.values() for t in tensors.values()), default=0)
    return plan.largest_source + 2 * max(largest, plan.largest_source)


def casts(before: Mapping[str, StoredTensor], after: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the number of tensors for each change of dtype."""
    found: dict[str, int] = {}
    for name, tensor in after.items():
        if before[name].dtype != tensor.dtype:
            change = f"{dtype_name(before[name].dtype)} -> {dtype_name(tensor.dtype)}"
            found[change] = found.get(change, 0) + 1
    return found
