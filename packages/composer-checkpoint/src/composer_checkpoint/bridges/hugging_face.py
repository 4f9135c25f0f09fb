"""Resume a Hugging Face Trainer from its newest complete checkpoint.

The Trainer itself writes its folders in place and resumes from the one with the highest step, even if it is incomplete
because the run was killed, or damaged.
"""

import json
import os
import re
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    UnsafeCheckpointError,
    first_few,
)
from composer_checkpoint.file_io import FileReader, hash_file
from composer_checkpoint.files import verify_file
from composer_checkpoint.formats._zip import LOCAL_MAGIC, check_checksums
from composer_checkpoint.formats.archives import INDEX_SUFFIX, plain_file
from composer_checkpoint.formats.pt import open_pt_source
from composer_checkpoint.formats.safetensors import merge_files, read_index
from composer_checkpoint.inspection import inspect_file
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, first_difference

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["latest_valid", "seal_folder", "sealing_callback", "verify_folder"]

log = getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STATE_NAME = "trainer_state.json"  # the last file that the Trainer writes
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "pytorch_model_fsdp*", "adapter_model.*", "global_step*")
# Written by the Trainer itself, by FSDP to a file or folder, or by DeepSpeed; absent if only weights are saved.
_SCHEDULER_NAME = "scheduler.pt"
_OPTIMIZERS = ("optimizer*", "global_step*")
# Pickled with classes of the Trainer, for information only: the Trainer does not read it.
_ARGUMENTS_NAME = "training_args.bin"
_PICKLED = (".pt", ".pth", ".bin")
_BIN_INDEX_SUFFIX = ".bin.index.json"


def latest_valid(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the complete checkpoint with the highest step, or `None`, for `resume_from_checkpoint`.

    A sealed folder is compared with its hashes. Other folders are checked less strictly, which is logged as a warning:
    the Trainer finished the save, all files that other files refer to exist, no file that the Trainer reads has more
    than data, and the checksums of the file formats are correct. Skipped folders are logged as warnings too.

    Args:
        output_dir: Output folder of the Trainer.

    Example:
        trainer.train(resume_from_checkpoint=latest_valid(args.output_dir))
    """
    folder = Path(output_dir)
    found = [(int(match[1]), path) for path in folder.glob("*/") if (match := _CHECKPOINT.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        try:
            manifest = verify_folder(path)
        except (CheckpointError, OSError) as error:
            log.warning("Skipped %s: %s", path, error)
            continue
        if manifest is None:
            log.warning(
                "%s is unverified: it was not sealed, so changes to its bytes cannot be detected. Pass "
                "sealing_callback() to the Trainer.",
                path,
            )
        return str(path)
    return None


def seal_folder(folder: str | os.PathLike[str], info: Mapping[str, Any] | None = None) -> Manifest:
    """Write the hashes of all files of a folder to its `composer_manifest.json`.

    Args:
        folder: A finished checkpoint.
        info: Further entries of the manifest.

    Returns:
        The manifest.
    """
    root = Path(folder)
    files = {name: FileEntry((root / name).stat().st_size, hash_file(root / name)) for name in _file_names(root)}
    manifest = Manifest(files=files, info=dict(info or {}))
    with write_atomically(root / MANIFEST_NAME) as unfinished:
        unfinished.write_text(manifest.to_json())
    return manifest


def verify_folder(folder: str | os.PathLike[str]) -> Manifest | None:
    """Verify a checkpoint of a Trainer.

    Returns:
        The manifest; `None` if the folder was not sealed.

    Raises:
        NoCheckpointError: If a file that each checkpoint has is missing, because the save did not finish.
        CorruptCheckpointError: If a file is damaged, or a listed file is missing, with the name of the file and, where
            known, of the tensor.
        UnsafeCheckpointError: If a file that the Trainer would read has more than data, in a folder that was not
            sealed.
    """
    root = Path(folder)
    if not (root / MANIFEST_NAME).exists():
        _check_unsealed(root)
        return None
    manifest = Manifest.from_json((root / MANIFEST_NAME).read_bytes())
    path = first_difference(root, manifest)
    if path is None:
        return manifest
    if path.exists():
        raise CorruptCheckpointError(f"{path} is not what was sealed. Resume from another checkpoint.")
    raise CorruptCheckpointError(
        f"{root} lacks {path.relative_to(root)}, which it had when it was sealed. Resume from another."
    )


def sealing_callback() -> "TrainerCallback":
    """Return a callback that seals each checkpoint saved by a Trainer.

    Raises:
        ImportError: If transformers is not installed.

    Example:
        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[sealing_callback()])
    """
    from transformers import TrainerCallback  # late, since it is optional and slow to import

    from composer_dist.collectives import barrier, is_initialized

    class SealCheckpoints(TrainerCallback):
        """Callback that seals a checkpoint once all ranks have written their parts."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # After the barrier, all ranks have written their parts.
            if is_initialized():
                barrier()
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            if state.is_world_process_zero and folder.is_dir():
                seal_folder(folder, {"global_step": state.global_step, "epoch": state.epoch})

    return SealCheckpoints()


def _check_unsealed(root: Path) -> None:
    state = root / _STATE_NAME
    if not state.exists():
        raise NoCheckpointError(
            f"{root} has no {_STATE_NAME}: its save did not finish. Resume from another checkpoint."
        )
    if not any(any(root.glob(pattern)) for pattern in _WEIGHTS):
        raise NoCheckpointError(f"{root} has no weights: its save did not finish. Resume from another checkpoint.")
    if (root / _SCHEDULER_NAME).exists() and not any(any(root.glob(pattern)) for pattern in _OPTIMIZERS):
        raise NoCheckpointError(
            f"{root} has {_SCHEDULER_NAME} and no optimizer: its save did not finish, or it was lost. Resume from "
            f"another checkpoint."
        )
    for path in (root / name for name in _file_names(root)):
        _check_by_format(path)
        # Subfolders, as of DeepSpeed, have objects of their own, which the Trainer does not read.
        is_read = path.parent == root and path.suffix in _PICKLED and path.name != _ARGUMENTS_NAME
        if is_read and (names := inspect_file(path).unsafe_globals):
            raise UnsafeCheckpointError(
                f"{path} asks for {first_few(names)}, more than data; nothing of it was run. Resume from "
                f"a checkpoint of a Trainer."
            )


def _check_by_format(path: Path) -> None:
    """Compare a file with the checksums and the structure of its own format."""
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        verify_file(path)
    elif path.name.endswith(_BIN_INDEX_SUFFIX):
        with merge_files(read_index(path, ".bin"), open_pt_source) as source:
            if source.missing:
                raise CorruptCheckpointError(
                    f"the files of {path} lack {source.missing[0]!r:.200}: they are of another save. Resume from "
                    f"another checkpoint."
                )
    elif path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path} is not JSON: {error}. Resume from another checkpoint.") from error
    elif path.suffix in _PICKLED:
        with plain_file(os.fspath(path)) as plain, FileReader(plain) as reader:
            check_checksums(reader)
    elif path.suffix == ".distcp":  # several archives in a row
        with plain_file(os.fspath(path)) as plain, FileReader(plain) as reader:
            if not reader.read(0, min(reader.size_bytes, 4)) == LOCAL_MAGIC:
                raise CorruptCheckpointError("it does not begin as torch.save's files do. Resume from another.")


def _file_names(root: Path) -> list[str]:
    names = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST_NAME)
