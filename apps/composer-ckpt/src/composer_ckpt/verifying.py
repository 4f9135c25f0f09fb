"""`composer-ckpt verify`: whether a checkpoint is whole."""

import argparse
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_checkpoint import CheckpointError, UnsafeCheckpointError, hash_tensor
from composer_checkpoint.tensors import TensorSource, find_kind
from composer_ckpt.dtypes import has_numbers
from composer_ckpt.inspecting import statistics
from composer_ckpt.outcomes import ExitCode, Result
from composer_ckpt.printable import as_lines
from composer_ckpt.progress import progress_bar
from composer_ckpt.sizes import counted
from composer_ckpt.sources import fetched, find_files, kind_of, opened, place_of, verify_hashes

__all__ = ["verify"]

_MAX_NAMES = 5
_FINITE, _ALL_FINITE = "finite", "all are finite"
Check = dict[str, Any]


def verify(options: argparse.Namespace) -> Result:
    """Run the command."""
    checks: list[Check] = []
    hashes: dict[str, str] = {}
    with fetched(options.source, options.tmp_dir, options.jobs) as local:
        find = find_kind if place_of(local).exists() else kind_of  # what is there may be damaged
        kind = options.kind if options.kind != "auto" else find(str(place_of(local)))
        code = _hold(checks, "hashes", lambda: _hashes(place_of(local), kind))
        code = max(code, _hold(checks, "opens", lambda: _read(local, kind, options, checks, hashes)))
    is_fine = all(check["ok"] for check in checks)
    data: dict[str, Any] = {"ok": is_fine, "source": options.source, "format": kind, "checks": checks}
    if options.hash:
        data["hashes"] = hashes
    found = "whole" if is_fine else "refused" if code == ExitCode.UNSAFE else "NOT whole"
    lines = [f"{options.source}: {found} ({kind})"]
    lines += [f"  {_mark(check)} {check['name']}: {check['detail']}" for check in checks]
    lines += [f"  {digest}  {name}" for name, digest in hashes.items()]
    return Result(as_lines(lines), data, ExitCode.FINE if is_fine else max(code, ExitCode.FAILURE))


def _mark(check: Check) -> str:
    if not check["ok"]:
        return "FAIL"
    # Numbers that are not finite are no fault, since masks are made of infinities, and nothing to pass over either.
    return "note" if check["name"] == _FINITE and check["detail"] != _ALL_FINITE else "ok  "


def _hold(checks: list[Check], name: str, check: Callable[[], str]) -> int:
    """Add a check's outcome; return the exit code that it asks for."""
    try:
        checks.append({"name": name, "ok": True, "detail": check()})
    except UnsafeCheckpointError as error:
        checks.append({"name": name, "ok": False, "detail": str(error)})
        return ExitCode.UNSAFE
    except (CheckpointError, OSError) as error:
        checks.append({"name": name, "ok": False, "detail": str(error)})
        return ExitCode.FAILURE
    return ExitCode.FINE


def _hashes(place: Path, kind: str) -> str:
    """Compare every byte with its hash, as far as there are any."""
    sealed = verify_hashes(place, kind)
    if not all(sealed):
        for path in find_files(place, kind):
            _check_zip(path)
        bare = f"{sealed.count(False)} of {counted(len(sealed), 'file')}"
        return f"no manifest in {bare}: only structure and checksums were looked at"
    return f"every byte of {counted(len(sealed), 'file')} is as it was written"


def _check_zip(path: Path) -> None:
    """Compare the checksums of a zip, which files of torch have."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return
    from composer_checkpoint import CorruptCheckpointError

    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CorruptCheckpointError(
            f"{path}: the bytes of {damaged!r} do not have their checksum. Use another checkpoint."
        )


def _read(local: str, kind: str, options: argparse.Namespace, checks: list[Check], hashes: dict[str, str]) -> str:
    """Read all tensors, and note what is missing, tied or not finite."""
    with opened(local, kind) as source:
        if options.hash:
            checks += _not_hashed(source)
        if source.missing:
            detail = f"{len(source.missing)} tensors of the index are in no file: {_listed([*source.missing])}"
            checks.append({"name": "complete", "ok": False, "detail": detail})
        odd: list[str] = []
        total = sum(tensor.size_bytes for tensor in source.tensors.values())
        with progress_bar("reading", total) as progress:
            for name, tensor in source.tensors.items():
                if tensor.dtype.is_floating_point and has_numbers(tensor.dtype) and _is_odd(statistics(tensor)):
                    odd.append(name)
                if options.hash and tensor.sparse is None and not tensor.is_quantized:
                    hashes[name] = hash_tensor(tensor.read())
                progress(tensor.size_bytes)
        listed = f"NaN or infinite numbers in {counted(len(odd), 'tensor')}: {_listed(odd)}" if odd else _ALL_FINITE
        checks.append({"name": _FINITE, "ok": True, "detail": listed})
        return _summary(source)


def _not_hashed(source: TensorSource) -> list[Check]:
    """Return a check, which holds, for each kind of tensors that have no bytes of their own to be hashed."""
    sparse = [name for name, tensor in source.tensors.items() if tensor.sparse is not None]
    quantized = [name for name, tensor in source.tensors.items() if tensor.is_quantized]
    whys = (
        (sparse, "sparse tensor", "whose elements have no order"),
        (quantized, "quantized tensor", "whose bytes say nothing without a scale"),
    )
    return [
        {"name": "hashed", "ok": True, "detail": f"not {counted(len(names), kind)}, {why}: {_listed(names)}"}
        for names, kind, why in whys
        if names
    ]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES])


def _is_odd(found: dict[str, Any]) -> bool:
    return bool(found["nan"] or found["inf"])


def _summary(source: TensorSource) -> str:
    return f"{len(source.tensors)} tensors can be read"
