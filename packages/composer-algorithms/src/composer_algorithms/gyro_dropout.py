"""Gyro dropout: train a few subnetworks, each for longer."""

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from composer_algorithms._arguments import check_counts, check_interval
from composer_algorithms._draws import generator_for
from composer_algorithms._method import ModelSurgery
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import replace_module_classes
from composer_dist.wrapping import unwrap_model
from composer_events import Event, Logger, NoEffectWarning, State
from composer_time import TimeUnit

__all__ = ["GyroDropout", "GyroDropoutLayer", "apply_gyro_dropout", "METADATA"]

METADATA = METHODS["gyro_dropout"]

_log = logging.getLogger("composer.algorithms.gyro_dropout")


class GyroDropoutLayer(nn.Module):
    """Dropout with `tau` out of `sigma` fixed masks, chosen again at intervals.

    Each chosen mask applies to an equal part of the batch (as far as possible), over the last dim of the input. The
    masks and the choice depend only on a seed and the number of steps. Evaluation changes nothing.

    Args:
        iters_per_epoch: Steps per epoch, 0 or more.
        max_epoch: Epochs of training, 0 or more.
        p: Drop probability of a feature, in [0, 1).
        sigma: Number of masks.
        tau: Number of masks in use at a time.

    Attributes:
        dropout_mask: Mask of the last training batch, in the shape of the batch or one that expands to it.

    Raises:
        ValueError: If `p` is outside [0, 1), `sigma` or `tau` is not above 0, or a length of training is negative.

    Example:
        >>> layer = GyroDropoutLayer(iters_per_epoch=10, max_epoch=2, p=0.5, sigma=16, tau=2)
        >>> x = torch.rand(4, 8)
        >>> y = layer(x)
        >>> torch.equal(layer.dropout_mask[0], layer.dropout_mask[1]), layer.dropout_mask.shape
        (True, torch.Size([4, 8]))

    Reference:
        Lee et al., "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.
    """

    def __init__(self, iters_per_epoch: int, max_epoch: float, p: float, sigma: int, tau: int) -> None:
        super().__init__()
        _check(p, sigma, tau)
        check_interval("[0, inf)", iters_per_epoch=iters_per_epoch, max_epoch=max_epoch)
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self._chosen: Tensor | None = None
        self.set_schedule(iters_per_epoch * max_epoch)
        self.seed: str | None = None
        self.counts_calls = True
        self.num_steps = 0
        self.dropout_mask: Tensor | None = None
        # Drawn from the seed when needed, so a checkpoint does not keep them.
        self._masks: Tensor | None = None

    def set_schedule(self, num_steps: float) -> None:
        """Set the number of training steps, which determines how often masks are chosen."""
        self.iter_num = max(1, int(num_steps / self.sigma)) * self.tau
        self._chosen = None  # a resumed run could not reproduce a choice of another schedule

    def begin_step(self, num_steps: int) -> None:
        """Choose the masks of a training step, given the number of earlier steps. Forward then stops counting steps."""
        self.counts_calls = False
        if self._chosen is None or num_steps // self.iter_num != self.num_steps // self.iter_num:
            self._choose(num_steps)
        self.num_steps = num_steps

    def forward(self, x: Tensor) -> Tensor:
        """Drop features in training."""
        if not self.training:
            return x
        if x.ndim < 2:  # one example
            return self(x.reshape(1, -1)).reshape(x.shape)
        if self._chosen is None or (self.counts_calls and self.num_steps % self.iter_num == 0):
            self._choose(self.num_steps)
        self.num_steps += self.counts_calls
        assert self._chosen is not None
        if self._masks is None or self._masks.shape[1] != x.shape[-1] or self._masks.device != x.device:
            # From a generator of their own on the CPU, so that a resumed run gets the same masks on any device.
            masks = torch.rand(self.sigma, x.shape[-1], generator=self._generator("masks")) > self.p
            self._masks = masks.to(x.device)
        # For any batch size: with fewer examples than masks, some masks are not used.
        part_of_example = torch.arange(len(x)) * min(self.tau, len(x)) // max(len(x), 1)
        rows = self._chosen[part_of_example].to(x.device, non_blocking=True)
        mask = self._masks[rows].to(x.dtype)
        self.dropout_mask = mask.reshape(len(x), *[1] * (x.ndim - 2), x.shape[-1])
        return x * self.dropout_mask * (1 / (1 - self.p))

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}"

    def _choose(self, num_steps: int) -> None:
        generator = self._generator(str(num_steps // self.iter_num))
        self._chosen = torch.randint(self.sigma, (self.tau,), generator=generator)

    def _generator(self, purpose: str) -> torch.Generator:
        if self.seed is None:
            self.seed = str(int(torch.randint(2**62, ())))
        return generator_for(f"{self.seed}/{purpose}")


def apply_gyro_dropout(
    model: nn.Module, iters_per_epoch: int, max_epoch: float, p: float, sigma: int, tau: int
) -> None:
    """Replace each `torch.nn.Dropout` in a model with a `GyroDropoutLayer`.

    A second call changes nothing. Random numbers depend on PyTorch's CPU generator.

    Args:
        model: Changed in place.
        iters_per_epoch: Steps per epoch.
        max_epoch: Epochs of training.
        p: Drop probability of a feature, in [0, 1). That of the replaced layer is not used.
        sigma: Number of masks.
        tau: Number of masks in use at a time.

    Raises:
        ValueError: If `p` is outside [0, 1), `sigma` or `tau` is not above 0, or a length of training is negative.

    Warns:
        NoEffectWarning: If the model has no `torch.nn.Dropout` below it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        >>> apply_gyro_dropout(model, iters_per_epoch=100, max_epoch=10, p=0.5, sigma=256, tau=16)
        >>> model[1]
        GyroDropoutLayer(p=0.5, sigma=256, tau=16)

    Reference:
        Lee et al., "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.
    """
    _check(p, sigma, tau)
    check_interval("[0, inf)", iters_per_epoch=iters_per_epoch, max_epoch=max_epoch)

    def gyro(module: nn.Module, module_index: int) -> GyroDropoutLayer:
        return GyroDropoutLayer(iters_per_epoch, max_epoch, p, sigma, tau)

    replace_module_classes(model, {nn.Dropout: gyro})
    if not _gyro_layers(model):
        warnings.warn(
            f"GyroDropout has no effect on this {type(model).__qualname__}: it has no torch.nn.Dropout below it. "
            f"Leave GyroDropout out.",
            NoEffectWarning,
            stacklevel=2,
        )


class GyroDropout(ModelSurgery):
    """Replace each `torch.nn.Dropout` in `state.model` on `INIT`, to train a few subnetworks, each for longer.

    The schedule is that of the run, known on `FIT_START`, and advances on `BATCH_START`, so that microbatches of one
    batch have the same masks. Each rank has its own. Masks depend on the run's seed, the rank and the number of
    batches, so a resumed run has the same masks as an uninterrupted one. Parameters and their names stay.

    Args:
        p: Drop probability of a feature, in [0, 1). That of the replaced layers is not used.
        sigma: Number of masks per layer.
        tau: Number of masks in use at a time.

    Raises:
        ValueError: If `p` is outside [0, 1), or `sigma` or `tau` is not above 0; on `FIT_START`, if the number of
            training steps is unknown.

    Example:
        >>> GyroDropout(p=0.5, sigma=1024, tau=8)
        GyroDropout(p=0.5, sigma=1024, tau=8)

    Reference:
        Lee et al., "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.
    """

    surgery_rank = 1
    acts_on = frozenset({Event.INIT, Event.FIT_START, Event.BATCH_START})

    def __init__(self, p: float = 0.5, sigma: int = 256, tau: int = 16) -> None:
        _check(p, sigma, tau)
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self._num_steps = 0
        self._layers: list[GyroDropoutLayer] = []

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Replace the layers, set their schedule, or begin a step."""
        if event == Event.INIT:
            self._replace(state)
        elif event == Event.FIT_START:
            if not self._layers:
                self._replace(state)
            duration, num_batches = state.max_duration, state.dataloader_len
            per_unit = {TimeUnit.BATCH: 1, TimeUnit.EPOCH: num_batches and num_batches.value}
            factor = None if duration is None else per_unit.get(duration.unit)
            if duration is None or factor is None:
                raise ValueError(
                    f"GyroDropout needs the number of training steps, which max_duration={duration!r} with "
                    f"{num_batches!r} batches per epoch does not define: give max_duration in batches ('5000ba'), or "
                    f"in epochs with a dataloader of known length."
                )
            for layer in self._layers:
                layer.set_schedule(duration.value * factor)
        elif event == Event.BATCH_START:
            for layer in self._layers:
                layer.begin_step(self._num_steps)
            self._num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the number of steps."""
        return {**super().state_dict(), "num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the step after the last one before the checkpoint."""
        self._num_steps = int(state.get("num_steps", 0))

    def _replace(self, state: State) -> None:
        model = unwrap_model(state.model)
        # The schedule is unknown before FIT_START; until then it is the shortest possible.
        apply_gyro_dropout(model, iters_per_epoch=1, max_epoch=1, p=self.p, sigma=self.sigma, tau=self.tau)
        self._layers = _gyro_layers(model)
        for i, layer in enumerate(self._layers):
            layer.seed = f"{state.rank_zero_seed}/{state.seed}/GyroDropout/{i}"
        _log.info("GyroDropout: %d dropout layers were replaced.", len(self._layers))


def _gyro_layers(model: nn.Module) -> list[GyroDropoutLayer]:
    return [module for module in model.modules() if isinstance(module, GyroDropoutLayer)]


def _check(p: float, sigma: int, tau: int) -> None:
    check_interval("[0, 1)", p=p)
    check_counts(sigma=sigma, tau=tau)
