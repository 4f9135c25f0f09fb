"""Transforms of image datasets."""

from composer._lazy import lazy_face
from composer_algorithms.dataset_transforms import add_vision_dataset_transform

__all__ = ["add_vision_dataset_transform"]

_GENERATION = "pass stop_strings=... with tokenizer=... to the generate of transformers."

__getattr__, __dir__ = lazy_face(
    __name__,
    {},
    removed={
        "NormalizationFn": "torchvision.transforms.v2.Normalize does it, in the dataset or as a DataSpec's "
        "batch_transforms.",
        "pil_image_collate": "turn images into tensors in the dataset, with torchvision.transforms.v2.ToImage.",
        "MultiTokenEOSCriteria": _GENERATION,
        "stop_sequences_criteria": _GENERATION,
    },
)
