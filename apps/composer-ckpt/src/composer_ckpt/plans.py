"""Plan of a conversion, made before anything is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_checkpoint.tensors import StoredTensor
from composer_ckpt.output import counted, first_few, format_size

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
        largest_source: Size in bytes of the largest tensor that is read.
        cast: Number of tensors whose dtype changes, by `'float32 -> bfloat16'`.
        renamed: New names by old names.
        names_with_nan: Names of weights with NaN, which are known after they were read.
        warnings: Notes for the user.
        dropped_aliases: Names that are left out, because the target has the tensor under another name.
        check: Compares tensors that must be equal, before anything is written, also in a dry run.
    """

    source: str
    target: str
    formats: tuple[str, str]
    files: Mapping[str, Mapping[str, StoredTensor]]
    write: Callable[[Progress], None]
    largest_source: int
    cast: Mapping[str, int]
    renamed: Mapping[str, str]
    names_with_nan: Mapping[str, None]
    warnings: list[str]
    dropped_aliases: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], None] | None = None

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
