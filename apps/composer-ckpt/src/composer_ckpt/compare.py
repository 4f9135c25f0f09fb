"""The commands `composer-ckpt diff` and `composer-ckpt verify`, for checkpoints of all formats."""

import argparse
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsafeCheckpointError,
    hash_tensor,
)
from composer_checkpoint.tensors import StoredTensor, TensorSource, aliases_of, find_kind, refuse_quantized
from composer_ckpt.folders import saved_description
from composer_ckpt.inspect import describe, statistics
from composer_ckpt.output import ExitCode, Result, as_lines, counted, first_few, progress_bar
from composer_ckpt.sources import fetched, find_files, kind_of, opened, place_of, verify_hashes
from composer_ckpt.weights import BLOCK_NUMEL, blocks_of, dtype_name, has_numbers, layout_of, select

_PREFIX = "model."


def diff(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt diff`."""
    store = {"tmp_dir": options.tmp_dir, "jobs": options.jobs}
    with opened(options.a, **store) as a, opened(options.b, **store) as b:
        of_a, of_b = _tensors(a, options), _tensors(b, options)
        of_a, of_b = _aligned(of_a, of_b)
        data: dict[str, Any] = {
            "a": options.a,
            "b": options.b,
            "only_a": _only(of_a, of_b),
            "only_b": _only(of_b, of_a),
            "shape": [],
            "dtype": [],
            "value": [],
        }
        with progress_bar("comparing", sum(tensor.size_bytes for tensor in of_a.values())) as progress:
            for name, tensor in of_a.items():
                if name in of_b:
                    _compare(name, tensor, of_b[name], options, data)
                progress(tensor.size_bytes)
        # Without tensors, of which `describe` would list each.
        data["timestamp"] = _different(*(describe(side, "", {})["timestamp"] for side in (a, b)))
        data["config"] = _different(_config(a), _config(b))
    faults = ("only_a", "only_b", "shape", "dtype", "value")
    data["first_divergent"] = _first(of_a, data)
    data["equal"] = not any(data[key] for key in faults)
    return Result(_text(data, options.most, len(of_a)), data, ExitCode.FINE if data["equal"] else ExitCode.FAILURE)


def _tensors(source: TensorSource, options: argparse.Namespace) -> dict[str, StoredTensor]:
    return select(dict(source.tensors if options.all else source.weights), options.keys, option="--keys")


def _aligned(
    a: dict[str, StoredTensor], b: dict[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return both with matching names: Composer checkpoints prefix those of a Hugging Face folder with `model.`."""
    # The variant with the most common names wins; on a tie, the names stay as they are.
    ways = {
        (False, False): (a, b),
        (True, False): (_without_prefix(a), b),
        (False, True): (a, _without_prefix(b)),
    }
    return max(ways.values(), key=lambda pair: len(pair[0].keys() & pair[1].keys()))


def _without_prefix(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    without = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    return without if len(without) == len(tensors) else tensors  # two equal names would hide a tensor


def _only(ours: dict[str, StoredTensor], theirs: dict[str, StoredTensor]) -> list[str]:
    """Return the names only in `ours`, except of tensors that `theirs` has under an alias.

    Formats that store tied weights once, as those of Hugging Face do, keep only one of the names.
    """
    aliases = aliases_of(ours)
    shared = {aliases.get(name, name) for name in ours if name in theirs}
    return [name for name in ours if name not in theirs and aliases.get(name, name) not in shared]


def _compare(name: str, a: StoredTensor, b: StoredTensor, options: argparse.Namespace, data: dict[str, Any]) -> None:
    if a.shape != b.shape:
        data["shape"].append({"name": name, "a": list(a.shape), "b": list(b.shape)})
        return
    if (kind_a := _kind(a)) != (kind_b := _kind(b)):
        data["dtype"].append({"name": name, "a": kind_a, "b": kind_b})
    if layout_of(a) != layout_of(b):  # reported above; their elements cannot be compared
        return
    if not (has_numbers(a.dtype) and has_numbers(b.dtype)):
        if a.dtype != b.dtype:
            return  # the difference in dtype is reported above
        refuse_quantized({name: a}, "diff")
        if count := _num_unequal(a, b):
            data["value"].append({"name": name, **dict.fromkeys(("max_abs", "max_rel", "cosine")), "unequal": count})
        return
    found = _Difference()
    for piece_a, piece_b in blocks_of(a, b) if a.sparse is None else _explicit_elements(name, a, b):
        found.add(piece_a, piece_b, options.rtol, options.atol)
    if found.is_different:
        data["value"].append({"name": name, **found.numbers()})


def _explicit_elements(name: str, a: StoredTensor, b: StoredTensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, piece by piece, the elements that are explicit in at least one of two sparse tensors of one layout."""
    try:
        pair = [(t if t.layout == torch.sparse_coo else t.to_sparse_coo()).coalesce() for t in (a.read(), b.read())]
        # Adding zeros at the indices of the other tensor gives both the same indices.
        zeros = [torch.zeros_like(t.values(), dtype=u.dtype) for t, u in (pair, pair[::-1])]
        added = [torch.sparse_coo_tensor(t.indices(), z, t.shape) for t, z in zip(pair, zeros, strict=True)]
        values = [(t + z).coalesce().values() for t, z in zip(pair, reversed(added), strict=True)]
    except (RuntimeError, NotImplementedError) as error:  # torch lacks these operations for some dtypes and layouts
        raise IncompatibleCheckpointError(
            f"{name} is a tensor of layout {a.read().layout}, of a kind that is not compared ({error!s:.200}). Choose "
            f"others with --keys, or load the files with load_file() and compare it dense."
        ) from error
    yield from zip(*(each.reshape(-1).split(BLOCK_NUMEL) for each in values), strict=True)


def _num_unequal(a: StoredTensor, b: StoredTensor) -> int:
    size = a.dtype.itemsize
    return sum(
        int((one.view(torch.uint8) != other.view(torch.uint8)).reshape(-1, size).any(1).sum())
        for one, other in blocks_of(a, b)
    )


def _kind(tensor: StoredTensor) -> str:
    return " ".join([dtype_name(tensor.dtype), *layout_of(tensor).values()])


@dataclass(slots=True)
class _Difference:
    """Differences between two tensors, accumulated over their pieces."""

    is_different: bool = False
    max_abs: float = 0.0
    max_rel: float = 0.0
    dot: float = 0.0
    norm_a: float = 0.0
    norm_b: float = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> None:
        # Identical pieces, NaN included, need no comparison.
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            wide = _wide(a)
            square = float(wide.dot(wide))
            self.dot, self.norm_a, self.norm_b = self.dot + square, self.norm_a + square, self.norm_b + square
            return
        wide_a, wide_b = _wide(a), _wide(b)
        if not torch.allclose(wide_a, wide_b, rtol=rtol, atol=atol, equal_nan=True):
            self.is_different = True
        elif a.dtype == b.dtype and not (a.is_floating_point() or a.is_complex() or rtol or atol):
            # Integers beyond 2**53 that differ but are equal in float64.
            self.is_different, self.max_abs = True, max(self.max_abs, 1.0)
        # As in `allclose` above, two NaN at one place are equal.
        gap = (wide_a - wide_b).abs().masked_fill(wide_a.isnan() & wide_b.isnan(), 0)
        self.max_abs = max(self.max_abs, _largest(gap))
        # Clamped, so that a difference of 0 from 0 is 0 and not NaN.
        self.max_rel = max(self.max_rel, _largest(gap / wide_b.abs().clamp_min(torch.finfo(torch.float64).tiny)))
        self.dot += float(wide_a.dot(wide_b))
        self.norm_a += float(wide_a.dot(wide_a))
        self.norm_b += float(wide_b.dot(wide_b))

    def numbers(self) -> dict[str, float | None]:
        length = math.sqrt(self.norm_a) * math.sqrt(self.norm_b)
        cosine = self.dot / length if length > 0 and math.isfinite(length) else None
        return {"max_abs": _finite(self.max_abs), "max_rel": _finite(self.max_rel), "cosine": cosine}


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
    return plain.to(torch.float64)


def _largest(values: torch.Tensor) -> float:
    # A difference that is NaN counts as infinite.
    return float(values.nan_to_num(nan=math.inf, posinf=math.inf).max()) if values.numel() else 0.0


def _finite(value: float) -> float | None:
    """Return the number, or `None` if JSON cannot represent it."""
    return value if math.isfinite(value) else None


def _config(source: TensorSource) -> dict[str, Any]:
    config: Any = saved_description(source)
    for key in ("model", "config", "content"):
        config = config.get(key) if isinstance(config, dict) else None
    return dict(_flat("", config)) if isinstance(config, dict) else {}


def _flat(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(f"{path}.{key}" if path else str(key), item)]
    return [(path, value)]


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values that differ, or are in only one of two non-empty mappings."""
    if not a or not b:
        return {}  # formats without this information are not different in it
    return {key: [a.get(key), b.get(key)] for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)}


def _first(tensors: Mapping[str, StoredTensor], data: Mapping[str, Any]) -> str | None:
    listed = {item["name"] for key in ("shape", "dtype", "value") for item in data[key]} | {*data["only_a"]}
    return next((name for name in tensors if name in listed), next(iter(data["only_b"]), None))


def _text(data: Mapping[str, Any], most: int, count: int) -> str:
    if data["equal"]:
        lines = [f"equal: {counted(count, 'tensor')} of {data['a']} and {data['b']}"]
    else:
        lines = [f"different: the first is {data['first_divergent']}"]
    for key, side in (("only_a", data["a"]), ("only_b", data["b"])):
        lines += [f"  only in {side}: {name}" for name in data[key][:most]] + _more(data[key], most)
    for key in ("shape", "dtype"):
        lines += [f"  {key} of {item['name']}: {item['a']} and {item['b']}" for item in data[key][:most]]
        lines += _more(data[key], most)
    largest = sorted(data["value"], key=lambda item: -(math.inf if item["max_abs"] is None else item["max_abs"]))
    lines += [f"  value of {item['name']}: {_measures(item)}" for item in largest[:most]] + _more(largest, most)
    for key in ("timestamp", "config"):
        lines += [f"  {key} {path}: {a!r} and {b!r}" for path, (a, b) in list(data[key].items())[:most]]
    return as_lines(lines)


def _measures(item: Mapping[str, Any]) -> str:
    if "unequal" in item:
        return f"{counted(item['unequal'], 'element')} of other bytes, of a dtype with which torch does not compute"
    names = {"max_abs": "largest difference", "max_rel": "relative", "cosine": "cosine"}
    return ", ".join(
        f"{text} {'NaN' if item[key] is None else format(item[key], '.6g')}" for key, text in names.items()
    )


def _more(items: list[Any], most: int) -> list[str]:
    return [f"  ... and {len(items) - most} more"] if len(items) > most else []


_FINITE, _ALL_FINITE = "finite", "all are finite"
Check = dict[str, Any]


def verify(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt verify`."""
    checks: list[Check] = []
    hashes: dict[str, str] = {}
    with fetched(options.source, options.tmp_dir, options.jobs) as local:
        find = find_kind if place_of(local).exists() else kind_of  # an existing checkpoint may be damaged
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
    # Infinities and NaN are not an error, since masks contain infinities, but worth a note.
    return "note" if check["name"] == _FINITE and check["detail"] != _ALL_FINITE else "ok  "


def _hold(checks: list[Check], name: str, check: Callable[[], str]) -> int:
    try:
        checks.append({"name": name, "ok": True, "detail": check()})
    except (CheckpointError, OSError) as error:
        checks.append({"name": name, "ok": False, "detail": str(error)})
        return ExitCode.UNSAFE if isinstance(error, UnsafeCheckpointError) else ExitCode.FAILURE
    return ExitCode.FINE


def _hashes(place: Path, kind: str) -> str:
    sealed = verify_hashes(place, kind)
    if not all(sealed):
        for path in (path for path in find_files(place, kind) if path.is_file() and zipfile.is_zipfile(path)):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise CorruptCheckpointError(
                    f"{path}: the bytes of {damaged!r} do not have their checksum. Use another checkpoint."
                )
        bare = f"{sealed.count(False)} of {counted(len(sealed), 'file')}"
        return f"no manifest in {bare}: only structure and checksums were checked"
    return f"every byte of {counted(len(sealed), 'file')} is as it was written"


def _read(local: str, kind: str, options: argparse.Namespace, checks: list[Check], hashes: dict[str, str]) -> str:
    with opened(local, kind) as source:
        if options.hash:
            checks += _not_hashed(source)
        if source.missing:
            detail = f"{len(source.missing)} tensors of the index are in no file: {first_few(source.missing)}"
            checks.append({"name": "complete", "ok": False, "detail": detail})
        odd: list[str] = []
        total = sum(tensor.size_bytes for tensor in source.tensors.values())
        with progress_bar("reading", total) as progress:
            for name, tensor in source.tensors.items():
                if tensor.dtype.is_floating_point and has_numbers(tensor.dtype):
                    found = statistics(tensor)
                    odd += [name] if found["nan"] or found["inf"] else []
                # Others have no canonical bytes; see `_not_hashed`.
                if options.hash and tensor.sparse is None and not tensor.is_quantized:
                    hashes[name] = hash_tensor(tensor.read())
                progress(tensor.size_bytes)
        listed = f"NaN or infinite numbers in {counted(len(odd), 'tensor')}: {first_few(odd)}" if odd else _ALL_FINITE
        checks.append({"name": _FINITE, "ok": True, "detail": listed})
        return f"{len(source.tensors)} tensors can be read"


def _not_hashed(source: TensorSource) -> list[Check]:
    """Return passing checks that name the tensors without canonical bytes to hash."""
    sparse = [name for name, tensor in source.tensors.items() if tensor.sparse is not None]
    quantized = [name for name, tensor in source.tensors.items() if tensor.is_quantized]
    whys = (
        (sparse, "sparse tensor", "whose elements have no order"),
        (quantized, "quantized tensor", "whose bytes have no meaning without a scale"),
    )
    return [
        {"name": "hashed", "ok": True, "detail": f"not {counted(len(names), kind)}, {why}: {first_few(names)}"}
        for names, kind, why in whys
        if names
    ]
