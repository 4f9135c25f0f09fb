"""The commands `composer-ckpt inspect`, `diff` and `verify`, for checkpoints of all formats."""

import argparse
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from composer_ckpt.output import ExitCode, Result, as_lines, counted, first_few, format_size, progress_bar
from composer_ckpt.places import fetched, find_files, kind_of, opened, place_of, verify_hashes
from composer_ckpt.weights import BLOCK_NUMEL, blocks_of, dtype_name, has_numbers, layout_of, num_unequal, select

_MOST_TENSORS = 200


def inspect(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt inspect`."""
    store = {"tmp_dir": options.tmp_dir, "jobs": options.jobs}
    with opened(options.source, options.kind, **store, record_unknown=True) as source:  # lists unsafe globals
        tensors = select(source.tensors, options.keys, option="--keys")
        data = describe(source, options.source, tensors)
        if options.stats:
            with progress_bar("reading", sum(tensor.size_bytes for tensor in tensors.values())) as progress:
                for entry in data["tensors"]:
                    entry["stats"] = statistics(tensors[entry["name"]])
                    progress(entry["bytes"])
    return Result(_text(data, options.tree), data, ExitCode.UNSAFE if data["unsafe"] else ExitCode.FINE)


def describe(source: TensorSource, name: str, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the content of a checkpoint, as `inspect --json` prints it."""
    info: Mapping[str, Any] = {} if source.manifest is None else source.manifest.info
    state = source.state
    metadata = _dict(state.get("metadata"))
    environment = _dict(metadata.get("composer_env_info"))
    hugging_face = describe_hugging_face(_dict(saved_description(source)))
    aliases = aliases_of(tensors)
    # Old checkpoints and other formats lack entries, and any value may have an unexpected type: nothing here raises.
    entries = [
        {
            "name": tensor_name,
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "bytes": tensor.size_bytes,
            "alias_of": aliases.get(tensor_name),
            **layout_of(tensor),
        }
        for tensor_name, tensor in tensors.items()
    ]
    return {
        "source": name,
        "format": source.format,
        "bytes": source.size_bytes,
        "files": dict(source.files),
        "has_manifest": source.manifest is not None,
        "composer_version": environment.get("composer_version") or info.get("composer_version"),
        "torch_version": _text_or_none(metadata.get("torch_version") or info.get("torch_version")),
        "transformers_version": (hugging_face or {}).get("transformers_version"),
        "deepspeed_version": _text_or_none(_dict(source.tree).get("ds_version")),
        "world_size": metadata.get("world_size") or info.get("world_size") or _dict(source.tree).get("dp_world_size"),
        "timestamp": _timestamp(state, info),
        "run_name": state.get("run_name") or info.get("run_name"),
        "rank_zero_seed": state.get("rank_zero_seed"),
        "algorithms": [_algorithm(item) for item in state.get("algorithms") or ()],
        "optimizers": _optimizers(state),
        "schedulers": _names(state.get("schedulers")),
        "callbacks": _names(state.get("callbacks")),
        "huggingface": hugging_face,
        "tensors": entries,
        "totals": _totals(tensors, aliases),
        "missing": list(source.missing),
        "unsafe": list(source.unsafe_globals),
    }


def describe_hugging_face(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a summary of the Hugging Face part, read without importing transformers."""
    if not saved:
        return None
    config = _dict(_dict(saved.get("model")).get("config"))
    content = _dict(config.get("content"))
    return {
        "model_class": _text_or_none(config.get("class")),
        "model_type": _text_or_none(content.get("model_type")),
        "transformers_version": _text_or_none(content.get("transformers_version")),
        "tokenizer_files": sorted(map(str, _dict(saved.get("tokenizer")))),
        "peft": _dict(_dict(_dict(saved.get("model")).get("peft_config")).get("content")).get("peft_type"),
    }


def statistics(tensor: StoredTensor) -> dict[str, Any]:
    """Return the minimum, maximum, mean and number of NaN and infinite values, computed piece by piece.

    All are `None` for dtypes that torch cannot compute with, and `none_since` has the reason.
    """
    if not has_numbers(tensor.dtype):
        told = f"torch does not compute with elements of {dtype_name(tensor.dtype)}"
        return {**dict.fromkeys(("min", "max", "mean", "nan", "inf")), "none_since": told}
    if tensor.dtype.is_complex or not tensor.numel:
        return {"min": None, "max": None, "mean": None, "nan": 0, "inf": 0}
    least, most, total, count, num_nan, num_inf = float("inf"), float("-inf"), 0.0, 0, 0, 0
    num_left = tensor.numel
    for piece in _pieces(tensor):
        num_left -= piece.numel()
        finite = piece[piece.isfinite()]
        num_nan += int(piece.isnan().sum())
        num_inf += int(piece.isinf().sum())
        if finite.numel():
            least, most = min(least, float(finite.min())), max(most, float(finite.max()))
            total, count = total + float(finite.sum()), count + finite.numel()
    if num_left:  # the implicit zeros of a sparse tensor
        least, most, count = min(least, 0.0), max(most, 0.0), count + num_left
    found = (least, most, total / count) if count else (None, None, None)
    return {"min": found[0], "max": found[1], "mean": found[2], "nan": num_nan, "inf": num_inf}


def _pieces(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    """Yield the elements piece by piece in float64; for a sparse tensor, only the explicit ones."""
    if tensor.sparse is None:
        yield from (piece.to(torch.float64) for (piece,) in blocks_of(tensor))
        return
    whole = tensor.read()
    values = (whole.coalesce() if whole.layout == torch.sparse_coo else whole).values()
    yield from (piece.to(torch.float64) for piece in values.reshape(-1).split(BLOCK_NUMEL))


def _timestamp(state: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    time = _dict(state.get("timestamp")) or _dict(info.get("timestamp"))
    return {str(name): _plain(value) for name, value in _dict(time.get("Timestamp", time)).items()}


def _algorithm(item: Any) -> dict[str, Any]:
    """Return the name and repr of an algorithm, which Composer saves as a pair of its class and its state."""
    name, state = item if isinstance(item, list | tuple) and len(item) == 2 else (item, {})
    return {"name": str(name), "repr": _text_or_none(_dict(state).get("repr"))}


def _optimizers(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, optimizer in _dict(state.get("optimizers")).items():
        groups = _list(_dict(optimizer).get("param_groups"))
        # Counts parameters in groups rather than in the state: SGD without momentum keeps no state.
        trained = sum(len(_list(_dict(group).get("params"))) for group in groups)
        found.append({"name": str(name), "groups": len(groups), "params": trained})
    return found


def _names(saved: Any) -> list[str]:
    if isinstance(saved, Mapping):
        return [str(name) for name in saved]
    return [str(item[0]) if isinstance(item, list | tuple) and item else str(item) for item in saved or ()]


def _totals(tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> dict[str, Any]:
    by_dtype: Counter[str] = Counter()
    by_prefix: Counter[str] = Counter()
    # Tied weights count once.
    own = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    for name, tensor in own.items():
        by_dtype[dtype_name(tensor.dtype)] += tensor.size_bytes
        parts = name.split("/")
        by_prefix["/".join(parts[:2]) if len(parts) > 1 else name.split(".")[0]] += tensor.size_bytes
    return {
        "tensors": len(tensors),
        "params": sum(tensor.numel for tensor in own.values()),
        "bytes": sum(tensor.size_bytes for tensor in own.values()),
        "by_dtype": dict(by_dtype),
        "by_prefix": dict(by_prefix),
    }


def _text(data: Mapping[str, Any], everything: bool) -> str:
    lines = [f"{data['source']}: {data['format']}, {format_size(data['bytes'])}"]
    lines += [f"  {label}: {value}" for label, value in _facts(data) if value not in (None, "", [], {})]
    if data["unsafe"]:
        lines.append(f"  UNSAFE: asks for {', '.join(data['unsafe'])}; nothing of it was run")
    if data["missing"]:
        lines.append(f"  MISSING: {len(data['missing'])} tensors of the index: {', '.join(data['missing'][:5])}")
    lines.append("")
    lines += draw_tree(data["tensors"], None if everything else _MOST_TENSORS)
    if statistics_of_all := list(_statistics(data["tensors"])):
        lines += ["", *statistics_of_all]
    totals = data["totals"]
    shares = ", ".join(f"{format_size(size)} {dtype}" for dtype, size in sorted(totals["by_dtype"].items()))
    size = format_size(totals["bytes"])
    return as_lines([*lines, "", f"{totals['tensors']} tensors, {totals['params']:,} numbers, {size} ({shares})"])


def _statistics(tensors: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for entry in tensors:
        if (found := entry.get("stats")) is None:
            continue
        if why := found.get("none_since"):
            yield f"no statistics of {entry['name']}: {why}"
            continue
        numbers = [f"{key} {found[key]:.6g}" for key in ("min", "max", "mean") if found[key] is not None]
        odd = [f"{found[key]:,} {word}" for key, word in (("nan", "NaN"), ("inf", "infinite")) if found[key]]
        yield f"{entry['name']}: {', '.join([*numbers, *odd]) or 'no statistics'}"


def _facts(data: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    time = data["timestamp"]
    yield "run", data["run_name"]
    units = ("epoch", "batch", "sample", "token")
    yield "time", ", ".join(f"{name} {time[name]}" for name in units if time.get(name) is not None)
    versions = ("composer", "torch", "transformers", "deepspeed")
    yield "written by", ", ".join(f"{name} {data[key]}" for name in versions if data[key := f"{name}_version"])
    yield "world size", data["world_size"]
    yield "seed", data["rank_zero_seed"]
    yield "algorithms", ", ".join(item["repr"] or item["name"] for item in data["algorithms"])
    optimizers = [f"{o['name']} ({o['groups']} groups, {o['params']} parameters)" for o in data["optimizers"]]
    yield "optimizers", ", ".join(optimizers)
    yield "schedulers", ", ".join(data["schedulers"])
    yield "callbacks", ", ".join(data["callbacks"])
    yield "model", _model(data["huggingface"])
    yield "files", len(data["files"]) if len(data["files"]) > 1 else None
    yield "verified", "has a manifest with hashes" if data["has_manifest"] else "no manifest: changes cannot be seen"


def _model(hugging_face: Mapping[str, Any] | None) -> str | None:
    if hugging_face is None:
        return None
    adapter = f", {hugging_face['peft']} adapter" if hugging_face["peft"] else ""
    files = hugging_face["tokenizer_files"]
    tokenizer = f", tokenizer of {len(files)} files" if files else ""
    return f"{hugging_face['model_class'] or hugging_face['model_type']}{adapter}{tokenizer}"


def _dict(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def draw_tree(tensors: Sequence[Mapping[str, Any]], limit: int | None = None) -> list[str]:
    r"""Return lines with the shape, dtype and size of each tensor, and the total of each branch.

    Names below a branch continue its name after a dot, or after the slash that ends it. Branches are folded to stay
    below `limit` lines.

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


_PREFIX = "model."


def diff(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt diff`."""
    store = {"tmp_dir": options.tmp_dir, "jobs": options.jobs}
    with opened(options.a, **store) as a, opened(options.b, **store) as b:
        both = (dict(side.tensors if options.all else side.weights) for side in (a, b))
        of_a, of_b = _aligned(*(select(tensors, options.keys, option="--keys") for tensors in both))
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
    return Result(_diff_text(data, options.most, len(of_a)), data, ExitCode.FINE if data["equal"] else ExitCode.FAILURE)


def _aligned(
    a: dict[str, StoredTensor], b: dict[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return both with matching names: Composer checkpoints prefix those of a Hugging Face folder with `model.`."""
    # The variant with the most common names wins; on a tie, the names stay as they are.
    ways = [(a, b), (_without_prefix(a), b), (a, _without_prefix(b))]
    return max(ways, key=lambda pair: len(pair[0].keys() & pair[1].keys()))


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
        if count := num_unequal(a, b):
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


def _diff_text(data: Mapping[str, Any], most: int, count: int) -> str:
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
    tensors = source.tensors.items()
    whys = (
        ([name for name, t in tensors if t.sparse is not None], "sparse tensor", "whose elements have no order"),
        ([name for name, t in tensors if t.is_quantized], "quantized tensor", "whose bytes need a scale"),
    )
    return [
        {"name": "hashed", "ok": True, "detail": f"not {counted(len(names), kind)}, {why}: {first_few(names)}"}
        for names, kind, why in whys
        if names
    ]
