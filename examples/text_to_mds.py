"""Tokenize text or JSON lines, pack the documents into windows, and write them as shards for StreamingDataset.

    python examples/text_to_mds.py data/*.jsonl --out shards --window 2048 --tokenizer gpt2

Each `.txt` file is one document; each line of a `.jsonl` file is one, in the entry `--field`. `--tokenizer` is a
folder or name for transformers, or `bytes`, which needs no file. The documents are packed in groups of `--group`, each
into a folder of its own. A command that was stopped continues after the last complete group, and writes the same files
as one that was not; before the first complete group, its arguments may change. `Windows` reads the result:

    dataset = Windows(remote="s3://bucket/shards", local="cache", shuffle=True, batch_size=8)
    loader = DataLoader(dataset, batch_size=8, num_workers=4)
    Trainer(train_dataloader=packed_data_spec(loader, model), ...)
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataset
from tqdm import tqdm

from composer_models import PackedDataset, pack_window


class Windows(StreamingDataset):
    """Packed windows as `PackedDataset` returns them: `input_ids`, `labels` and `position_ids`."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one window."""
        sample = super().__getitem__(index)
        tokens = torch.from_numpy(sample["tokens"].astype(np.int64))
        documents = tokens[: sample["lengths"].sum()].split(sample["lengths"].tolist())
        return pack_window([(one, one) for one in documents], len(tokens), padding=int(tokens[-1]))


class Bytes:
    """Tokenizer with a token for each byte, and one for the end of a document."""

    eos_token_id = 256

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode())

    def __len__(self) -> int:
        """Return the number of tokens."""
        return 257


def read_documents(paths: Iterable[Path], field: str) -> Iterator[tuple[str, int]]:
    """Yield the text of each document, and its size in the file in bytes."""
    for path in paths:
        if path.suffix == ".txt":
            yield path.read_text(encoding="utf-8"), path.stat().st_size
            continue
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    entries = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: not JSON: {error}.") from None
                if not isinstance(entries, dict) or not isinstance(entries.get(field), str):
                    raise ValueError(f"{path}, line {number}: must be a mapping with a text in {field!r}. See --field.")
                yield entries[field], len(line.encode())


def write_windows(windows: Any, folder: Path, tokenizer: Any, window: int) -> None:
    """Write packed windows into a folder, which exists only when it is complete."""
    dtype = "uint16" if len(tokenizer) <= 2**16 else "int32"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    columns = {"tokens": f"ndarray:{dtype}:{window}", "lengths": "ndarray:int32"}
    with MDSWriter(out=str(partial), columns=columns, progress_bar=False) as writer:
        for sample in windows:
            # Documents begin at position 0; so does each token of the padding, which is left out.
            positions = torch.cat([sample["position_ids"], torch.zeros(1, dtype=torch.long)])
            lengths = positions[:-1][positions.diff() < 0] + 1
            writer.write(
                {"tokens": sample["input_ids"].numpy().astype(dtype), "lengths": lengths.numpy().astype("int32")}
            )
    partial.rename(folder)


def convert(paths: list[Path], out: Path, tokenizer: Any, settings: dict[str, Any]) -> None:
    """Write all groups that are not yet complete, and the index of all of them."""
    if others := [str(path) for path in paths if path.suffix not in (".txt", ".jsonl")]:
        raise ValueError(f"Only files .txt and .jsonl are read; got {', '.join(others)}.")
    out.mkdir(parents=True, exist_ok=True)
    files = [[str(path), path.stat().st_size, path.stat().st_mtime] for path in paths]
    described, note = {**settings, "files": files}, out / "settings.json"
    is_begun = (out / "00000").exists()  # a group that is complete
    if is_begun and note.exists() and json.loads(note.read_text()) != described:
        raise ValueError(
            f"{out} was begun with other arguments, or the files have changed since: {note.read_text()} Choose another "
            "folder."
        )
    note.write_text(json.dumps(described))
    folders: list[Path] = []
    with tqdm(total=sum(path.stat().st_size for path in paths), unit="B", unit_scale=True) as progress:
        documents = read_documents(paths, settings["field"])
        while group := list(islice(documents, settings["group"])):
            folders.append(out / f"{len(folders):05}")
            if not folders[-1].exists():
                texts = [tokenizer.encode(text, add_special_tokens=False) for text, _ in group]
                packed = PackedDataset(
                    texts, settings["window"], end_of_document=tokenizer, too_long=settings["too_long"]
                )
                write_windows(packed, folders[-1], tokenizer, settings["window"])
            progress.update(sum(size for _, size in group))
    if not folders:
        raise ValueError(f"The files have no document: {', '.join(map(str, paths))}.")
    shards: list[dict[str, Any]] = []
    for folder in folders:
        for shard in json.loads((folder / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{folder.name}/{shard['raw_data']['basename']}"
            shards.append(shard)
    (out / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, and convert."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=2048, help="tokens in a window")
    parser.add_argument("--tokenizer", default="bytes", help="'bytes', or a folder or name for AutoTokenizer")
    parser.add_argument("--too-long", choices=["split", "truncate", "drop"], default="split")
    parser.add_argument("--field", default="text", help="the entry of a JSON line that is the text")
    parser.add_argument("--group", type=int, default=10_000, help="documents that are packed together")
    settings = vars(parser.parse_args(arguments))
    paths, out = settings.pop("paths"), settings.pop("out")
    try:
        tokenizer: Any = Bytes()
        if settings["tokenizer"] != "bytes":
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
        convert(paths, out, tokenizer, settings)
    except (ValueError, OSError) as error:  # of the arguments and files
        parser.error(str(error))


if __name__ == "__main__":
    main()
