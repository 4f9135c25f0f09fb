"""The command `composer-ckpt inspect`, which shows the content of a checkpoint."""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from composer_checkpoint.tensors import StoredTensor, TensorSource, aliases_of
from composer_ckpt.folders import saved_description
from composer_ckpt.output import ExitCode, Result, as_lines, counted, format_size, progress_bar
from composer_ckpt.sources import opened
from composer_ckpt.weights import BLOCK_NUMEL, blocks_of, dtype_name, has_numbers, layout_of, select

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
        by_prefix[_prefix(name)] += tensor.size_bytes
    return {
        "tensors": len(tensors),
        "params": sum(tensor.numel for tensor in own.values()),
        "bytes": sum(tensor.size_bytes for tensor in own.values()),
        "by_dtype": dict(by_dtype),
        "by_prefix": dict(by_prefix),
    }


def _prefix(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if len(parts) > 1 else name.split(".")[0]


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
