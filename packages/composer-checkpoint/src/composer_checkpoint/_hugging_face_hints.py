"""Telling who names the weights of a Hugging Face model as a checkpoint how to make one of them."""

import os
from collections.abc import Iterable

from composer_checkpoint.errors import IncompatibleCheckpointError

__all__ = ["hint_for_file", "refuse_hugging_face_folder"]

_CONFIG = "config.json"
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_ENDS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_PREFIX = "model."  # what a HuggingFaceModel puts before the names of the model inside it


def refuse_hugging_face_folder(path: str) -> None:
    """Raise if a path is a folder that is a Hugging Face model's, and no sharded checkpoint.

    Raises:
        IncompatibleCheckpointError: If it is.
    """
    names = set(os.listdir(path)) if os.path.isdir(path) else set[str]()
    if _CONFIG in names and not names.isdisjoint(_WEIGHTS) and ".metadata" not in names:
        raise IncompatibleCheckpointError(
            f"{path} is the folder of a Hugging Face model, with {_CONFIG} and weights, and no checkpoint of ours. "
            f"{_remedy(path)}"
        )


def hint_for_file(path: str, names: Iterable[str] = (), own: Iterable[str] = ()) -> str:
    """Return a sentence, with a blank before it, if a file seems to be the weights of a Hugging Face model.

    Args:
        path: The file.
        names: Its weights.
        own: The weights of the model that they do not fit.
    """
    if not path.endswith(_ENDS):
        return ""
    folder = os.path.dirname(path)
    has_config = os.path.isfile(os.path.join(folder, _CONFIG))
    if not has_config and {_PREFIX + name for name in names}.isdisjoint(own):
        return ""
    return " It seems to be of a Hugging Face model. " + _remedy(folder if has_config else "HF_DIR")


def _remedy(folder: str) -> str:
    return (
        f"Make a checkpoint of it, with composer-ckpt convert {folder or '.'} x.pt, and load x.pt with "
        f"load_weights_only=True."
    )
