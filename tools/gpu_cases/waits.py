"""Where a training step waits for the GPU: each row trains a few batches and lists the lines that synchronize."""

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from composer import algorithms, callbacks
from composer.core import Algorithm, Callback
from composer.loggers import ConsoleLogger, InMemoryLogger
from composer.models import ComposerClassifier, ComposerModel
from composer.trainer.divergence import OnDivergence
from composer_dist import Device
from composer_optim import DecoupledAdamW, DecoupledSGDW, Muon
from gpu_cases.methods import IMAGE_METHODS
from gpu_cases.subjects import (
    LENGTH,
    NUM_CLASSES,
    make_batches,
    make_convolutional,
    make_gpt,
    make_images,
    make_network,
    make_sentences,
    make_trainer,
)

WARM_UP, COUNTED = 6, 4
# How often a step may wait, where that is not never.
ALLOWED = {
    "AdamW, amp_fp16": 1.0,  # GradScaler itself, unless the optimizer is fused
    "AdamW, skip": 1.0,  # needs to know before it steps
    "AdamW, spike_factor": 1.0,
    "asynchronous save, every batch": 1.0,  # may only save weights that are finite
    "EarlyStopper, every batch": 1.0,
    "ThresholdStopper, every batch": 1.0,
    "NaNMonitor": 1.0,
    "ConsoleLogger, every 2": 0.5,  # prints numbers
}


def _metrics_model() -> ComposerModel:
    metric = MulticlassAccuracy(NUM_CLASSES, average="micro")
    return ComposerModel.from_module(make_network(), F.cross_entropy, metrics=metric)


def _classifier() -> ComposerModel:
    return ComposerClassifier(make_network(), num_classes=NUM_CLASSES)


Row = Callable[[str | Device], Counter[str]]


def _row(make: Callable[[], Any], batches: Callable[[int], list[Any]], **settings: Any) -> Row:
    def run(device: str | Device) -> Counter[str]:
        monitor, model = callbacks.SyncMonitor(skip_batches=WARM_UP), make()
        made = {
            name: value(model) if name in ("optimizers", "algorithms", "callbacks") else value
            for name, value in settings.items()
        }
        watchers = made.pop("callbacks", [])
        pinned = [_pinned(batch, device) for batch in batches(WARM_UP + COUNTED)]
        with make_trainer(model, pinned, device, callbacks=[monitor, *watchers], **made) as trainer:
            trainer.fit()
        return monitor.lines

    return run


def _pinned(batch: Any, device: str | Device) -> Any:
    if device == "cpu":
        return batch
    if isinstance(batch, dict):
        return {name: value.pin_memory() for name, value in batch.items()}
    return tuple(value.pin_memory() for value in batch)


def _adamw(**settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)


def make_rows() -> Mapping[str, Row]:
    """Return what trains each kind of step on a device, and returns the lines that synchronize."""
    plain, text = (make_network, make_batches), (make_gpt, make_sentences)
    fused = {"optimizers": _adamw(fused=True)}
    sharded = {"parallelism_config": {"fsdp": {}}, **fused}
    optimizers: dict[str, Callable[[nn.Module], Any]] = {
        "AdamW": _adamw(),
        "AdamW, fused": _adamw(fused=True),
        "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "Adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
        "RAdam": lambda model: torch.optim.RAdam(model.parameters()),
        "DecoupledAdamW": lambda model: DecoupledAdamW(model.parameters(), lr=1e-3),
        "DecoupledSGDW": lambda model: DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9),
        "Muon": lambda model: Muon(model, lr=1e-2),
        "two optimizers": lambda model: [
            torch.optim.SGD(list(model.parameters())[:2], lr=0.1),
            torch.optim.AdamW(list(model.parameters())[2:], lr=1e-3),
        ],
    }
    others = torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Rprop
    for kind in others:
        optimizers[kind.__name__] = lambda model, kind=kind: kind(model.parameters(), lr=1e-3)
    rows = {name: _row(*plain, optimizers=make) for name, make in optimizers.items()}
    rows |= {  # fused by default
        "DecoupledAdamW, skip": _row(*plain, optimizers=optimizers["DecoupledAdamW"], on_divergence="skip"),
        "DecoupledAdamW, amp_fp16": _row(*plain, optimizers=optimizers["DecoupledAdamW"], precision="amp_fp16"),
        "DecoupledSGDW, amp_fp16": _row(*plain, optimizers=optimizers["DecoupledSGDW"], precision="amp_fp16"),
    }
    rows |= {
        "AdamW, skip": _row(*plain, optimizers=_adamw(), on_divergence="skip"),
        "AdamW fused, skip": _row(*plain, on_divergence="skip", **fused),
        "AdamW, spike_factor": _row(*plain, optimizers=_adamw(), on_divergence=OnDivergence(spike_factor=1e6)),
        "AdamW, rollback": _row(*plain, optimizers=_adamw(), on_divergence="rollback"),
        "progress bar": _row(*plain, progress_bar=True, **fused),
        "ConsoleLogger, every 2": _row(*plain, loggers=ConsoleLogger(log_interval="2ba"), **fused),
        "InMemoryLogger": _row(*plain, loggers=InMemoryLogger(), **fused),
        "torchmetrics, progress bar": _row(_metrics_model, make_batches, progress_bar=True, **fused),
        "4 microbatches": _row(*plain, device_train_microbatch_size=8, **fused),
        "amp_bf16": _row(*plain, precision="amp_bf16", **fused),
        "amp_fp16": _row(*plain, precision="amp_fp16", **fused),
        "AdamW, amp_fp16": _row(*plain, precision="amp_fp16", optimizers=_adamw()),
        "GPT": _row(*text, precision="amp_bf16", **fused),
        "GPT, FSDP": _row(*text, **sharded),
        "GPT, FSDP, amp_bf16": _row(*text, precision="amp_bf16", **sharded),
        "GPT, FSDP, DecoupledAdamW": _row(
            *text, parallelism_config={"fsdp": {}}, optimizers=optimizers["DecoupledAdamW"]
        ),
        "GPT, FSDP, amp_fp16": _row(*text, precision="amp_fp16", **sharded),
        "GPT, FSDP, AdamW": _row(*text, parallelism_config={"fsdp": {}}, optimizers=_adamw()),
        "bfloat16 weights": _row(
            lambda: make_network().to(torch.bfloat16), make_batches, precision="amp_bf16", **fused
        ),
        "compiled": _row(*plain, compile_config={}, **fused),
    }
    for kind, threshold in (("norm", 1.0), ("value", 1.0), ("adaptive", 0.1)):
        clip = functools.partial(algorithms.GradientClipping, kind, threshold)
        rows[f"clipping by {kind}"] = _row(*plain, algorithms=_made(clip), **fused)
        rows[f"clipping by {kind}, FSDP"] = _row(*text, algorithms=_made(clip), **sharded)
    image_methods: dict[str, Callable[[], Algorithm]] = {
        **IMAGE_METHODS,
        "ChannelsLast": algorithms.ChannelsLast,
        "LayerFreezing": lambda: algorithms.LayerFreezing(freeze_start=0.0, freeze_level=0.6),
        "SWA": lambda: algorithms.SWA(swa_start="0.2dur", swa_end="0.9dur", update_interval="1ba"),
        "Factorize": lambda: algorithms.Factorize(min_channels=8, min_features=8, latent_channels=4, latent_features=4),
        "NoOpModel": algorithms.NoOpModel,
    }
    for name, make in image_methods.items():
        rows[name] = _row(make_convolutional, make_images, algorithms=_made(make), precision="amp_bf16", **fused)
    with_dropout = functools.partial(make_network, dropout=0.1)
    rows["GyroDropout"] = _row(with_dropout, make_batches, algorithms=_made(algorithms.GyroDropout), **fused)
    text_methods: dict[str, Callable[[], Algorithm]] = {
        "SeqLengthWarmup": lambda: algorithms.SeqLengthWarmup(max_seq_length=LENGTH),
        "LowPrecisionLayerNorm": algorithms.LowPrecisionLayerNorm,
        "Alibi": lambda: algorithms.Alibi(max_sequence_length=LENGTH),
        "MuP": lambda: algorithms.MuP(base_width=16),
    }
    for name, make in text_methods.items():
        rows[name] = _row(*text, algorithms=_made(make), precision="amp_bf16", **fused)
    watchers: dict[str, Callable[[], Callback]] = {
        "SpeedMonitor": lambda: callbacks.SpeedMonitor(window_size=2),
        "LRMonitor": callbacks.LRMonitor,
        "MemoryMonitor": callbacks.MemoryMonitor,
        "NaNMonitor": callbacks.NaNMonitor,
        "RuntimeEstimator": callbacks.RuntimeEstimator,
        "OptimizerMonitor": callbacks.OptimizerMonitor,
        "ActivationMonitor": lambda: callbacks.ActivationMonitor(interval="10ba"),
        "SystemMetricsMonitor": callbacks.SystemMetricsMonitor,
    }
    for name, make in watchers.items():
        rows[name] = _row(*plain, callbacks=lambda _, make=make: [make()], **fused)
    stoppers: dict[str, Callable[[], Callback]] = {
        "EarlyStopper, every batch": lambda: callbacks.EarlyStopper("MulticlassAccuracy", "train", patience="99ba"),
        "ThresholdStopper, every batch": lambda: callbacks.ThresholdStopper(
            "MulticlassAccuracy", "train", 2.0, stop_on_batch=True
        ),
    }
    for name, make in stoppers.items():
        rows[name] = _row(_classifier, make_batches, callbacks=lambda _, make=make: [make()], **fused)
    rows["asynchronous save, every batch"] = _row(*plain, callbacks=lambda _: [_saver()], **fused)
    return rows


def _saver() -> Callback:
    folder = tempfile.mkdtemp()
    return callbacks.CheckpointSaver(folder, save_interval="1ba", num_checkpoints_to_keep=1, async_save=True)


def _made(make: Callable[[], Algorithm]) -> Callable[[nn.Module], Algorithm]:
    return lambda model: make()


def named(device: str) -> str:
    """`SyncMonitor` names the line of a callback that reads the loss, and counts it once per batch."""
    monitor = callbacks.SyncMonitor()
    optimizers = _adamw(fused=True)(network := make_network())
    batches = [_pinned(batch, device) for batch in make_batches(6)]
    with make_trainer(network, batches, device, callbacks=[ReadsLoss(), monitor], optimizers=optimizers) as trainer:
        trainer.fit()
    ((place, count),) = monitor.lines.items()
    assert place.endswith(" after_loss"), place
    assert count == monitor.num_batches == 4, (count, monitor.num_batches)
    return place.rpartition("/")[2]


class ReadsLoss(Callback):
    """Waits in each batch."""

    def after_loss(self, state: Any, logger: Any) -> None:
        """Read the loss."""
        state.loss.item()


def steps(device: str) -> str:
    """Every kind of step waits for the GPU as often as it is allowed to, and no more."""
    too_often, rows = [], make_rows()
    for name, run in rows.items():
        lines = run(device)
        each_step = sum(lines.values()) / COUNTED
        print(f"{name:28} {each_step:g} a step", flush=True)
        for place, count in lines.most_common(4):
            print(f"    {count:3} times at {place}", flush=True)
        if each_step > ALLOWED.get(name, 0.0):
            too_often.append(f"{name} waits {each_step:g} times a step, first {lines.most_common(1)[0][0]}")
    assert not too_often, "; ".join(too_often)
    return f"{len(rows) - len(ALLOWED)} kinds of step never wait, {len(ALLOWED)} as they must"
