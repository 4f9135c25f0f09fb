"""The Trainer: it wires model, data, algorithms and callbacks to the training loop."""

from composer._lazy import lazy_face
from composer.trainer.trainer import Trainer

__all__ = ["Trainer"]

__getattr__, __dir__ = lazy_face(__name__, {})
