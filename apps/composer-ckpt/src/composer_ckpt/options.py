"""Options of `convert` and `merge`, checked against the formats of target and source."""

import argparse
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from composer_checkpoint.remote.fetch import is_uri, parse_uri
from composer_ckpt.output import UsageError

Accept = Callable[[str], object]
_HAVE_STATE = ("pt", "dcp", "local")
_FOLDERS = ("hf", "dcp")
_SUFFIXES = {".pt": "pt", ".pth": "pt", ".safetensors": "safetensors"}
# A folder with such a name would look like the file that was meant.
_UNKNOWN_ENDING = re.compile(r".*[^/.](\.[A-Za-z][A-Za-z0-9]*)")  # not a version, as in llama-3.1-8b
_OTHER_FILE = re.compile(r".*(\.(?:bin|ckpt|gguf|json|npz|onnx|pkl|tar|tgz|zip)|\.(?:pt|pth|tar)\.[a-z0-9]+)")
_OF_HF = ("peft", "base_model", "format", "max_shard_size", "config", "config_override", "tokenizer", "push_to_hub")

# Options, the formats that they apply to, and the two parts of the message for any other format.
_Rule = tuple[tuple[str, ...], tuple[str, ...], str, str]
_FOR_TARGET: tuple[_Rule, ...] = (
    (("world_size",), ("local", "dcp"), "of per-rank files and sharded folders", "this writes {format}"),
    (("optimizer", "resumption"), _HAVE_STATE, "of what resumes a run", "this writes {format}, of weights alone"),
    (_OF_HF, ("hf",), "of Hugging Face folders", "this writes {format}"),
)
_FOR_SOURCE: tuple[_Rule, ...] = (
    (("trust",), ("composer", "pt"), "of .pt files", "SRC={source!r} is {format}"),
    (("deepspeed_weights",), ("deepspeed",), "of DeepSpeed's folders", "SRC={source!r} is {format}"),
    (
        ("optimizer", "resumption"),
        ("composer", "deepspeed", *_HAVE_STATE),
        "of what resumes a run",
        "SRC={source!r} is {format}, of which weights alone are read",
    ),
)


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
        options._refuse_unfitting(_FOR_TARGET, options.to)
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

    def check_source(self, kind: str) -> None:
        """Raise a `UsageError` if options do not apply to the kind of the source."""
        self._refuse_unfitting(_FOR_SOURCE, kind)
        if self.trust_remote_code and "hf" not in (kind, self.to):
            found = f"SRC={self.source!r} is {kind}, and this writes {self.to}"
            raise UsageError(f"--trust-remote-code is of Hugging Face folders, and {found}. Leave it out.")

    def _refuse_unfitting(self, rules: tuple[_Rule, ...], format: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for names, accepted, whose, found in rules:
            given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) != defaults[name]]
            if given and format not in accepted:
                verb, them = ("is", "it") if len(given) == 1 else ("are", "them")
                found = found.format(format=format, source=self.source)
                raise UsageError(f"{', '.join(given)} {verb} {whose}, and {found}. Leave {them} out.")


@contextmanager
def reaching_stores(address: str) -> Iterator[None]:
    """Raise a `UsageError` if no object store has the scheme of a URI."""
    try:
        yield
    except NotImplementedError as error:
        raise UsageError(
            f"{address!r} cannot be read: there is no store for {parse_uri(address).backend}:// addresses. Use s3, gs, "
            f"oci, azure, sftp, hf, dbfs, or another scheme that fsspec knows; of the web, name a file with its ending."
        ) from error


def _format_of(target: str, to: str | None) -> str:
    """Return the format to write. An explicit `--to` takes precedence over the name of the target."""
    is_local = "{rank}" in target
    suffix = _suffix_format(target, is_free=to is not None or is_local or os.path.isdir(target))
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


def _suffix_format(target: str, *, is_free: bool) -> str | None:
    """Return the format of a file's suffix; raise for an unknown one, unless the name is free."""
    for end, kind in _SUFFIXES.items():
        if target.endswith(end):
            return kind
    ending = _OTHER_FILE.fullmatch(target) or (None if is_free else _UNKNOWN_ENDING.fullmatch(target))
    if ending is not None:
        raise UsageError(
            f"DST={target!r} ends in {ending[1]!r}, which is not a known target. Known are {', '.join(_SUFFIXES)} for "
            f"files, and for a Hugging Face folder a name without an ending; with --to pt, safetensors, dcp, local or "
            f"hf, a name may have an ending that no other kind of file has."
        )
    return None
