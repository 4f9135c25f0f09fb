"""The Trainer: it wires model, data, algorithms and callbacks to the training loop."""

from composer.trainer.trainer import Trainer

__all__ = ["Trainer"]
