"""Callbacks, which observe and extend training."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from composer._former_modules import GONE
from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.callbacks.activation_monitor import ActivationMonitor as ActivationMonitor
    from composer.callbacks.early_stopper import EarlyStopper as EarlyStopper
    from composer.callbacks.export_for_inference import ExportForInferenceCallback as ExportForInferenceCallback
    from composer.callbacks.free_outputs import FreeOutputs as FreeOutputs
    from composer.callbacks.generate import Generate as Generate
    from composer.callbacks.hf_checkpointer import HuggingFaceCheckpointer as HuggingFaceCheckpointer
    from composer.callbacks.image_visualizer import ImageVisualizer as ImageVisualizer
    from composer.callbacks.lr_monitor import LRMonitor as LRMonitor
    from composer.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from composer.callbacks.memory_snapshot import MemorySnapshot as MemorySnapshot
    from composer.callbacks.mlperf import MLPerfCallback as MLPerfCallback
    from composer.callbacks.nan_monitor import NaNMonitor as NaNMonitor
    from composer.callbacks.oom_observer import OOMObserver as OOMObserver
    from composer.callbacks.optimizer_monitor import OptimizerMonitor as OptimizerMonitor
    from composer.callbacks.runtime_estimator import RuntimeEstimator as RuntimeEstimator
    from composer.callbacks.speed_monitor import SpeedMonitor as SpeedMonitor
    from composer.callbacks.system_metrics_monitor import SystemMetricsMonitor as SystemMetricsMonitor
    from composer.callbacks.threshold_stopper import ThresholdStopper as ThresholdStopper
    from composer_checkpoint.loader import LoadCheckpoint as LoadCheckpoint
    from composer_checkpoint.saver import CheckpointSaver as CheckpointSaver

__all__ = [
    "ActivationMonitor",
    "CheckpointSaver",
    "EarlyStopper",
    "ExportForInferenceCallback",
    "FreeOutputs",
    "Generate",
    "HuggingFaceCheckpointer",
    "ImageVisualizer",
    "LRMonitor",
    "LoadCheckpoint",
    "MLPerfCallback",
    "MemoryMonitor",
    "MemorySnapshot",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
    "SystemMetricsMonitor",
    "ThresholdStopper",
]
if find_spec("composer_hf") is None:  # a star import would fail on a name that cannot be imported
    __all__.remove("HuggingFaceCheckpointer")

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer.callbacks.activation_monitor": ["ActivationMonitor"],
        "composer.callbacks.early_stopper": ["EarlyStopper"],
        "composer.callbacks.export_for_inference": ["ExportForInferenceCallback"],
        "composer.callbacks.free_outputs": ["FreeOutputs"],
        "composer.callbacks.generate": ["Generate"],
        "composer.callbacks.hf_checkpointer": ["HuggingFaceCheckpointer"],
        "composer.callbacks.image_visualizer": ["ImageVisualizer"],
        "composer.callbacks.lr_monitor": ["LRMonitor"],
        "composer.callbacks.memory_monitor": ["MemoryMonitor"],
        "composer.callbacks.memory_snapshot": ["MemorySnapshot"],
        "composer.callbacks.mlperf": ["MLPerfCallback"],
        "composer.callbacks.nan_monitor": ["NaNMonitor"],
        "composer.callbacks.oom_observer": ["OOMObserver"],
        "composer.callbacks.optimizer_monitor": ["OptimizerMonitor"],
        "composer.callbacks.runtime_estimator": ["RuntimeEstimator"],
        "composer.callbacks.speed_monitor": ["SpeedMonitor"],
        "composer.callbacks.system_metrics_monitor": ["SystemMetricsMonitor"],
        "composer.callbacks.threshold_stopper": ["ThresholdStopper"],
        "composer_checkpoint.loader": ["LoadCheckpoint"],
        "composer_checkpoint.saver": ["CheckpointSaver"],
    },
    submodules=[
        "activation_monitor",
        "checkpoint_saver",
        "early_stopper",
        "export_for_inference",
        "free_outputs",
        "generate",
        "hf_checkpointer",
        "image_visualizer",
        "load_checkpoint",
        "lr_monitor",
        "memory_monitor",
        "memory_snapshot",
        "mlperf",
        "nan_monitor",
        "oom_observer",
        "optimizer_monitor",
        "runtime_estimator",
        "speed_monitor",
        "system_metrics_monitor",
        "threshold_stopper",
    ],
    removed={
        "EvalOutputLogging": GONE["composer.callbacks.eval_output_logging_callback"],
        "GradMonitor": GONE["composer.callbacks.grad_monitor"],
        "HealthChecker": GONE["composer.callbacks.health_checker"],
    },
)
