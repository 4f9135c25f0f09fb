"""Train neural networks with PyTorch: events, algorithms that act on them, and one Trainer.

Most names, here and in the modules below, belong to the other libraries of the family, such as `composer_time`; the
modules under `composer.` are their one address. Each name loads on first use.
"""

import sys
from typing import TYPE_CHECKING

from composer._former_modules import FormerModules
from composer._lazy import lazy_face

# Behind all other finders: it slows nothing down that exists. At once, since other threads may import what is below.
if FormerModules not in sys.meta_path:
    sys.meta_path.append(FormerModules)

if TYPE_CHECKING:
    from composer._version import __version__ as __version__
    from composer.trainer.trainer import Trainer as Trainer
    from composer_events.algorithm import Algorithm as Algorithm
    from composer_events.callback import Callback as Callback
    from composer_events.data_spec import DataSpec as DataSpec
    from composer_events.engine import Engine as Engine
    from composer_events.evaluator import Evaluator as Evaluator
    from composer_events.event import Event as Event
    from composer_events.logger import Logger as Logger
    from composer_events.state import State as State
    from composer_models import ComposerModel as ComposerModel
    from composer_time import Time as Time
    from composer_time import Timestamp as Timestamp
    from composer_time import TimeUnit as TimeUnit

__all__ = [
    "Algorithm",
    "Callback",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "State",
    "Time",
    "Timestamp",
    "TimeUnit",
    "Logger",
    "ComposerModel",
    "Trainer",
    "__version__",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_events.algorithm": ["Algorithm"],
        "composer_events.callback": ["Callback"],
        "composer_events.data_spec": ["DataSpec"],
        "composer_events.engine": ["Engine"],
        "composer_events.evaluator": ["Evaluator"],
        "composer_events.event": ["Event"],
        "composer_events.logger": ["Logger"],
        "composer_events.state": ["State"],
        "composer_models": ["ComposerModel"],
        "composer_time": ["Time", "Timestamp", "TimeUnit"],
        "composer._version": ["__version__"],
        "composer.trainer.trainer": ["Trainer"],
    },
    submodules=[
        "cli",
        "algorithms",
        "callbacks",
        "checkpoint",
        "core",
        "datasets",
        "devices",
        "distributed",
        "functional",
        "loggers",
        "loss",
        "metrics",
        "models",
        "optim",
        "profiler",
        "report",
        "trainer",
        "utils",
    ],
)
