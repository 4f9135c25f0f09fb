"""Plan of a conversion, made before anything is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_checkpoint.tensors import StoredTensor
from composer_ckpt.output import counted, first_few, format_size

Progress = Callable[[int], object]


@dataclass(slots=True)
class Plan:
    """A conversion: the tensors of each file, and a function to write them."""

    source: str
    target: str
    formats: tuple[str, str]
    files: Mapping[str, Mapping[str, StoredTensor]]
    write: Callable[[Progress], None]  # everything under its final name, completely or not at all
    largest_source: int  # bytes
    cast: Mapping[str, int]  # number of tensors by the change of dtype
    renamed: Mapping[str, str]  # new names by old ones
    names_with_nan: Mapping[str, None]  # known after the weights were read
    warnings: list[str]
    dropped_aliases: Mapping[str, str] = field(default_factory=dict)  # left out, since the target has the kept names
    check: Callable[[], None] | None = None  # compares tensors that must be equal, also in a dry run

    @property
    def size_bytes(self) -> int:
        """Size of all tensors to write, in bytes."""
        return sum(tensor.size_bytes for tensors in self.files.values() for tensor in tensors.values())

    @property
    def peak_bytes(self) -> int:
        """Peak memory of tensors, in bytes: one as read and as written, and a copy."""
        largest = max((t.size_bytes for tensors in self.files.values() for t in tensors.values()), default=0)
        return self.largest_source + 2 * max(largest, self.largest_source)

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
            "peak_bytes": self.peak_bytes,
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """Return the plan as text."""
        count = sum(len(tensors) for tensors in self.files.values())
        lines = [
            f"plan: {self.formats[0]} {self.source} -> {self.formats[1]} {self.target}",
            f"      {counted(count, 'tensor')}, {format_size(self.size_bytes)}, in "
            f"{counted(len(self.files), 'file')}; tensors take at most {format_size(self.peak_bytes)} of memory",
        ]
        if self.dropped_aliases:
            aliases = [f"{alias} -> {name}" for alias, name in self.dropped_aliases.items()]
            lines.append(f"      {len(aliases)} tied dropped ({first_few(aliases, 3)})")
        lines += [f"      {counted(number, 'tensor')} {change}" for change, number in self.cast.items()]
        return lines + [f"      note: {warning}" for warning in self.warnings]
