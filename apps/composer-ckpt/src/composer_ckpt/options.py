"""Options of `convert` and `merge`, checked against the formats, and the plan that is made of them."""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from composer_checkpoint.stores.base import is_uri
from composer_checkpoint.tensors import StoredTensor
from composer_ckpt.output import UsageError, counted, first_few, format_size

Progress = Callable[[int], object]
_HAVE_STATE = ("pt", "dcp", "local")
_FOLDERS = ("hf", "dcp")
_SUFFIXES = {".pt": "pt", ".pth": "pt", ".safetensors": "safetensors"}
_OF_HF = ("peft", "base_model", "format", "max_shard_size", "config", "config_override", "tokenizer", "push_to_hub")

# The formats of the target, and of the source, that an option applies to.
_FOR_TARGET = {
    "world_size": ("local", "dcp"),
    **dict.fromkeys(("optimizer", "resumption"), _HAVE_STATE),
    **dict.fromkeys(_OF_HF, ("hf",)),
}
_FOR_SOURCE = {
    "trust": ("composer", "pt", "pickle"),
    "deepspeed_weights": ("deepspeed",),
    **dict.fromkeys(("optimizer", "resumption"), ("composer", "deepspeed", "pickle", *_HAVE_STATE)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of `convert`; the defaults are those of its options that `merge` lacks."""

    source: str
    target: str
    to: str
    kind: str
    tmp_dir: str | None
    jobs: int
    overwrite: bool
    dry_run: bool
    quiet: bool
    no_verify: bool
    output_precision: str
    trust_remote_code: bool
    include: list[str] | None
    exclude: list[str] | None
    rename: list[str] | None
    strip_prefix: list[str] | None
    world_size: int | None = None
    format: str = "safetensors"
    max_shard_size: int | None = None
    config: str | None = None
    config_override: list[str] | None = None
    tokenizer: str | None = None
    peft: str = "auto"
    base_model: str | None = None
    optimizer: bool = False
    resumption: bool = False
    deepspeed_weights: str = "fp32"
    trust: bool = False
    push_to_hub: str | None = None
    private: bool = False
    test_uploaded_model: bool = False

    @classmethod
    def parse(cls, arguments: argparse.Namespace) -> "ConvertOptions":
        """Return the options of a command line, with the format of the target in `to`."""
        given: dict[str, Any] = {f.name: getattr(arguments, f.name) for f in fields(cls) if hasattr(arguments, f.name)}
        given["to"] = _format_of(arguments.target, arguments.to)
        options = cls(**given)
        if options.to == "local" and options.world_size is None:
            raise UsageError("--to local needs --world-size N, for how many ranks.")
        options._check_options(_FOR_TARGET, "DST", options.to)
        if options.push_to_hub is None and (options.private or options.test_uploaded_model):
            name = "--private" if options.private else "--test-uploaded-model"
            raise UsageError(f"{name} needs --push-to-hub REPO, such as 'me/my-model'.")
        return options

    @property
    def is_folder(self) -> bool:
        """Return whether the target is a folder."""
        return self.to in _FOLDERS

    @property
    def opening(self) -> dict[str, Any]:
        """Return the arguments of `opened` for each source."""
        verify = not (self.no_verify or self.dry_run)
        return {"kind": self.kind, "tmp_dir": self.tmp_dir, "jobs": self.jobs, "verify": verify}

    def check_source(self, format: str) -> None:
        """Raise a `UsageError` if options do not apply to the format of the source."""
        self._check_options(_FOR_SOURCE, "SRC", format)
        if self.trust_remote_code and "hf" not in (format, self.to):
            raise UsageError(f"--trust-remote-code does not apply to {format} and {self.to}. Leave it out.")

    def _check_options(self, accepted: Mapping[str, tuple[str, ...]], what: str, format: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        given = [name for name, formats in accepted.items() if format not in formats]
        unfit = [f"--{name.replace('_', '-')}" for name in given if getattr(self, name) != defaults[name]]
        if unfit:
            raise UsageError(f"{', '.join(unfit)} does not apply to {what}, which is {format}. Leave it out.")


def _format_of(target: str, to: str | None) -> str:
    """Return the format to write. An explicit `--to` takes precedence over the name of the target."""
    is_local = "{rank}" in target
    suffix = _SUFFIXES.get(os.path.splitext(target)[1])
    found = to or ("local" if is_local else suffix or "hf")
    if (found == "local") != (is_local and suffix == "pt"):
        raise UsageError(
            f"DST={target!r} and --to {found}: per-rank files, and only they, have {{rank}} in their name, which ends "
            f"in .pt, as ba2_rank{{rank}}.pt."
        )
    if found == "local" and is_uri(target):
        raise UsageError(f"DST={target!r} is in a store, and per-rank files are written on this machine.")
    if suffix is not None and found in _FOLDERS:
        raise UsageError(f"DST={target!r} is a file's name, and --to {found} writes a folder. Name a folder.")
    return found


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
