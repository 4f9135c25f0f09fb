"""What callbacks and loggers add to training: ratios to the same run without them, and a budget for each.

    python benchmarks/callbacks.py [--quick] [--rounds N] [--steps N]

Ten callbacks and three loggers watch a network whose step takes about 10 ms of one thread. Runs with and without them
take turns, so that a machine that slows down slows both, and the ratio is the median of those of the rounds, of
processor time. The weights must come out equal.

The second table is about long runs, with a step that takes next to nothing: what the last steps cost beside the same
steps of a run without, compared with what the first ones did, and what memory the callbacks take at the end beside what
they took at first. A logger that keeps everything, such as the one in memory, grows by what it is for, and is left out.
The exit status is 1 if a budget is broken.
"""

import argparse
import contextlib
import io
import statistics
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import composer.callbacks
from composer import Trainer
from composer.callbacks import (
    ActivationMonitor,
    EarlyStopper,
    Generate,
    ImageVisualizer,
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    SystemMetricsMonitor,
    ThresholdStopper,
)
from composer.core import Callback
from composer.loggers import ConsoleLogger, InMemoryLogger, ProgressBarLogger
from composer.models import ComposerClassifier

BATCH, NUM_CLASSES = 32, 10
STEP_BUDGET = 1.02  # ten callbacks and three loggers, of a step of 10 ms
GROWTH_BUDGET = 1.25  # what they add late in a run, of what they add early; mostly noise
MEMORY_BUDGET_BYTES = 16 * 1024


def ten_callbacks() -> list[Callback]:
    """Return ten that work on a CPU; those that are slow by nature as seldom as their users would have them."""
    return [
        SpeedMonitor(window_size=100),
        LRMonitor(),
        RuntimeEstimator(),
        MemoryMonitor(),
        OptimizerMonitor(batch_log_interval=100),
        ActivationMonitor(interval="100ba", whole_outputs=True),
        NaNMonitor(),
        EarlyStopper("MulticlassAccuracy", "train", patience="1000ep"),
        ThresholdStopper("MulticlassAccuracy", "train", 2.0),
        SystemMetricsMonitor(),
    ]
