"""Datasets that are read while they train, and what a killed run of them left behind."""

from typing import TYPE_CHECKING

from composer._former_modules import GONE
from composer._lazy import lazy_face

if TYPE_CHECKING:
    from streaming import StreamingDataset as StreamingDataset

    from composer_dist.stale_memory import clean_stale_shared_memory as clean_stale_shared_memory

__all__ = ["StreamingDataset", "clean_stale_shared_memory"]

# By the module that they were in.
_FORMER_NAMES = {
    "ade20k": "ADE20k build_ade20k_dataloader build_streaming_ade20k_dataloader build_synthetic_ade20k_dataloader",
    "brats": "PytTrain PytVal build_brats_dataloader",
    "c4": "C4Dataset StreamingC4 build_streaming_c4_dataloader",
    "cifar": "StreamingCIFAR10 build_cifar10_dataloader build_ffcv_cifar10_dataloader "
    "build_streaming_cifar10_dataloader build_synthetic_cifar10_dataloader",
    "coco": "COCODetection StreamingCOCO",
    "imagenet": "StreamingImageNet1k build_ffcv_imagenet_dataloader build_imagenet_dataloader "
    "build_streaming_imagenet1k_dataloader build_synthetic_imagenet_dataloader",
    "in_context_learning_evaluation": "InContextLearningCodeEvalDataset InContextLearningDataset "
    "InContextLearningLMTaskDataset InContextLearningMultipleChoiceTaskDataset InContextLearningQATaskDataset "
    "InContextLearningSchemaTaskDataset get_icl_task_dataloader",
    "lm_dataset": "build_lm_dataloader",
    "mnist": "build_mnist_dataloader build_synthetic_mnist_dataloader",
    "synthetic": "SyntheticBatchPairDataset SyntheticDataLabelType SyntheticDataType SyntheticPILDataset",
}

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer.datasets.streaming": ["StreamingDataset"],
        "composer_dist.stale_memory": ["clean_stale_shared_memory"],
    },
    submodules=["streaming", "utils"],
    removed={name: GONE[f"{__name__}.{module}"] for module, names in _FORMER_NAMES.items() for name in names.split()},
)
