"""Former modules. Moved modules forward to their new location; removed modules raise an error with a replacement."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

__all__ = ["GONE", "FormerModules"]

# New modules by former modules.
_MOVED = {
    "composer.algorithms.fused_layernorm.fused_layernorm": "composer.algorithms.fused_layernorm",
    "composer.callbacks.utils": "composer.utils",
    "composer.distributed.mosaic_fsdp": "composer.distributed.mosaic_parallelism",
    "composer.loggers.object_store_logger": "composer.loggers",
    "composer.models.classify_mnist": "composer.models",
    "composer.models.classify_mnist.model": "composer.models",
    "composer.models.resnet": "composer.models",
    "composer.models.resnet.model": "composer.models",
    "composer.models.timm": "composer.models",
    "composer.models.timm.model": "composer.models",
    "composer.core.logging": "composer.loggers",
    "composer.trainer.ddp": "composer.distributed",
    "composer.trainer.devices": "composer.devices",
    "composer.trainer.devices.device": "composer.devices",
    "composer.trainer.devices.device_cpu": "composer.devices",
    "composer.trainer.devices.device_gpu": "composer.devices",
    "composer.trainer.devices.device_mps": "composer.devices",
    "composer.trainer.devices.device_tpu": "composer.devices",
    "composer.trainer.dist_strategy": "composer.distributed",
    "composer.trainer.meta_safe_apply": "composer.distributed.meta_safe_apply",
    "composer.trainer.mosaic_fsdp": "composer.distributed.mosaic_parallelism",
    "composer.trainer.mosaic_fsdp_utils": "composer.distributed.mosaic_parallelism",
}

_HPARAMS = "the classes for yahp are gone. Call the class that is described with its arguments, read from any file."
_LOG_LEVEL = "a logger takes everything. Give it its log_interval=, or call logger.log_metrics on the event you want."
_DATA = "build a torch.utils.data.DataLoader of"
_TASKS = "in-context learning tasks are left out; lm-evaluation-harness has them."
_WRAP = "wrap it with ComposerClassifier(module, num_classes=...)."
_SUBCLASS = "call it in the forward method of a ComposerModel."
_FSDP1 = "it was for PyTorch's FSDP1, and models are sharded with fully_shard now."
_DEEPSPEED = "give the configuration to Trainer(deepspeed_config=...), which reads it and casts batches by itself."

GONE = {
    "composer.callbacks.eval_output_logging_callback": "it belonged to the in-context learning tasks, which are left "
    "out; composer.callbacks.Generate logs generated text.",
    "composer.callbacks.grad_monitor": "composer.callbacks.OptimizerMonitor logs the norms of gradients.",
    "composer.callbacks.health_checker": "composer.callbacks.SystemMetricsMonitor logs the load of the GPUs.",
    "composer.datasets.ade20k": f"{_DATA} a dataset of your own, with torchvision.transforms.v2 for image and mask.",
    "composer.datasets.brats": f"{_DATA} a dataset of your own, or one of MONAI's.",
    "composer.datasets.c4": f"{_DATA} datasets.load_dataset('allenai/c4', 'en', streaming=True).",
    "composer.datasets.cifar": f"{_DATA} torchvision.datasets.CIFAR10.",
    "composer.datasets.coco": f"{_DATA} torchvision.datasets.CocoDetection.",
    "composer.datasets.ffcv_utils": "composer.datasets.StreamingDataset reads large datasets.",
    "composer.datasets.imagenet": f"{_DATA} torchvision.datasets.ImageFolder, or of a StreamingDataset.",
    "composer.datasets.in_context_learning_evaluation": _TASKS,
    "composer.datasets.lm_dataset": f"{_DATA} tokenized text, with transformers.DataCollatorForLanguageModeling.",
    "composer.datasets.mnist": f"{_DATA} torchvision.datasets.MNIST.",
    "composer.datasets.synthetic": f"{_DATA} torchvision.datasets.FakeData, or of a TensorDataset.",
    "composer.datasets.synthetic_lm": f"{_DATA} a TensorDataset of random tokens.",
    "composer.distributed.deepspeed": _DEEPSPEED,
    "composer.loggers.LogLevel": _LOG_LEVEL,
    "composer.loggers.logger.LogLevel": _LOG_LEVEL,
    "composer.models.bert": f"load transformers.AutoModelForMaskedLM, and {_SUBCLASS}",
    "composer.models.deeplabv3": f"make the network with torchvision.models.segmentation, and {_SUBCLASS}",
    "composer.models.efficientnetb0": f"make the network with torchvision.models.efficientnet_b0, and {_WRAP}",
    "composer.models.gpt2": f"load transformers.AutoModelForCausalLM, and {_SUBCLASS}",
    "composer.models.mmdetection": f"make the network with torchvision.models.detection, and {_SUBCLASS}",
    "composer.models.resnet_cifar": f"build a ResNet for small images, and {_WRAP}",
    "composer.models.ssd": f"make the network with torchvision.models.detection, and {_SUBCLASS}",
    "composer.models.unet": f"take a U-Net from a library for segmentation, and {_SUBCLASS}",
    "composer.models.vit_small_patch16": "call composer.models.composer_timm('vit_small_patch16_224', ...).",
    "composer.trainer.TrainerHparams": _HPARAMS,
    "composer.trainer._deepspeed": _DEEPSPEED,
    "composer.trainer._patch_pytorch": _FSDP1,
    "composer.utils.eval_client": f"it executed generated code: {_TASKS}",
    "composer.utils.fx_utils": "modify graphs with torch.fx, for example with torch.fx.replace_pattern, or let "
    "torch.compile fuse operators.",
}
"""Replacements by removed module or name. Submodules of a removed module need no entries."""


class FormerModules:
    """Finder for `sys.meta_path`, after the finders of existing modules."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that has moved."""
        if not name.startswith("composer."):
            return None
        if name in _MOVED:
            loader: Any = _Forwarding(_MOVED[name])  # not an importlib.abc.Loader, whose import takes time
            return ModuleSpec(name, loader, is_package=True)  # a package, since its submodules may have moved as well
        hint = _HPARAMS if name.endswith(("hparams", "hparams_registry")) else GONE.get(name)
        if hint is None or not _is_import(sys._getframe(1)):
            return None
        raise ModuleNotFoundError(f"{name} is gone: {hint}", name=name)


def _is_import(search: FrameType) -> bool:
    """Return whether a finder was called by an import, not by `importlib.util.find_spec`."""
    # Scripts use `find_spec` to test whether a module exists, which must not raise.
    begun_by = search.f_back
    return begun_by is not None and begun_by.f_globals.get("__name__") == "importlib._bootstrap"


class _Forwarding:
    """Loader of a module with the names of another one."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default module creation."""

    def exec_module(self, module: ModuleType) -> None:
        """Forward the module's names to the new module, and warn about the old location."""
        if module.__name__.rpartition(".")[0] not in _MOVED:  # one warning per import is enough
            message = f"{module.__name__} is now {self._target}; the old address goes away in 1.0."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        target = import_module(self._target)

        def __getattr__(name: str) -> object:
            if name.startswith("__") and name != "__all__":  # attributes of the module itself, such as `__file__`
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(target, name)

        vars(module).update(__doc__=target.__doc__, __getattr__=__getattr__, __dir__=lambda: dir(target))


# After all other finders, so that imports of existing modules are not slower. Installed at import, since any thread may
# import a former module once `composer` is imported.
if FormerModules not in sys.meta_path:
    sys.meta_path.append(FormerModules)
