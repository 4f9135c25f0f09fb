"""Stochastic depth as a function on a model and as an Algorithm."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer_algorithms._arguments import check_choice, check_interval, check_is_module
from composer_algorithms._method import ModelSurgery, elapsed_fraction
from composer_algorithms.module_surgery import count_module_instances, replace_module_classes
from composer_algorithms.stochastic_depth.layers import BlockDraws, Rescale, layer_mapping
from composer_dist import dist
from composer_events.event import Event
from composer_time import Time, TimeUnit, ensure_time

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["StochasticDepth", "apply_stochastic_depth"]

_log = logging.getLogger("composer.algorithms.stochastic_depth")


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: str,
    stochastic_method: str = "block",
    drop_rate: float = 0.2,
    drop_distribution: str = "linear",
    *,
    rescale: Rescale = "eval",
) -> None:
    """Randomly drop the main branches of a model's residual blocks in training.

    Evaluation keeps all main branches, by default scaled by how often they are kept in training. Parameters and their
    names stay. Random numbers come from PyTorch's generators: for whole batches on the CPU, for examples on the device.

    Args:
        model: Changed in place.
        target_layer_name: `'ResNetBottleneck'` or `'ResNetBasicBlock'`, torchvision's blocks.
        stochastic_method: `'block'` drops for the whole batch, and saves the work; `'sample'` for single examples.
        drop_rate: Drop probability of the last block, in [0, 1].
        drop_distribution: `'linear'` from near 0 in the first block to `drop_rate` in the last, or `'uniform'`.
        rescale: `'eval'`: main branches are scaled in evaluation, as in the paper. `'train'`: main branches kept in
            training are divided by their probability of being kept, as in `torchvision.ops.StochasticDepth`, and
            evaluation is that of the unchanged model. Weights trained in one way do not fit the other.

    Raises:
        ValueError: If a name is unknown, or `drop_rate` is outside [0, 1].

    Example:
        >>> from torchvision.models import resnet50
        >>> model = resnet50()
        >>> apply_stochastic_depth(model, "ResNetBottleneck", drop_rate=0.2)
        >>> model.layer4[-1].drop_rate
        tensor(0.2000)

    Reference:
        Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, arXiv:1603.09382.
    """
    check_is_module(model, "blocks to drop")
    _check(target_layer_name, stochastic_method, drop_rate, drop_distribution, rescale)
    _convert(model, target_layer_name, stochastic_method, drop_rate, drop_distribution, BlockDraws(), rescale)


def _convert(
    model: nn.Module,
    layer_name: str,
    method: str,
    drop_rate: float,
    distribution: str,
    draws: BlockDraws,
    rescale: Rescale,
) -> list[nn.Module]:
    layer_class, converter = layer_mapping()[layer_name]
    count = count_module_instances(model, layer_class) + isinstance(model, layer_class)  # which is not counted
    if not count:
        _log.warning(
            "StochasticDepth has no effect on this %s: it has no %s, which is what target_layer_name=%r stands for.",
            type(model).__qualname__,
            layer_class.__qualname__,
            layer_name,
        )

    def policy(module: nn.Module, module_index: int) -> nn.Module:
        return converter(module, module_index, count, drop_rate, distribution, method, draws, rescale)

    return list(replace_module_classes(model, {layer_class: policy}, include_root=True))


class StochasticDepth(ModelSurgery):
    """Randomly drop the residual blocks of `state.model`, which is changed in place on `INIT`.

    With `drop_warmup`, the rates rise from 0 to their values in that time, on `BATCH_START`. Parameters and their
    names stay. With `stochastic_method='block'`, dropped blocks have no gradients, for which `DistributedDataParallel`
    is configured. The ranks drop different blocks, unless the model is sharded: then all drop the same ones.

    Args:
        target_layer_name: `'ResNetBottleneck'` or `'ResNetBasicBlock'`, torchvision's blocks.
        stochastic_method: `'block'` drops for the whole microbatch, `'sample'` for single examples.
        drop_rate: Drop probability of the last block, in [0, 1].
        drop_distribution: `'linear'` from near 0 in the first block to `drop_rate` in the last, or `'uniform'`.
        drop_warmup: A fraction of training (`0.1`, `'0.1dur'`) or a time (`'500ba'`). Not with `'sample'`.
        use_same_gpu_seed: Whether all ranks drop the same blocks. `None`: only if the model is sharded, which requires
            it.
        rescale: `'eval'` or `'train'`; see `apply_stochastic_depth`.

    Raises:
        ValueError: If a name is unknown, `drop_rate` is outside [0, 1], or there is a warm-up with `'sample'`; on
            `INIT`, if the ranks of a sharded model are to drop different blocks.

    Example:
        >>> StochasticDepth("ResNetBottleneck", drop_rate=0.1)  # doctest: +ELLIPSIS
        StochasticDepth(target_layer_name='ResNetBottleneck', stochastic_method='block', drop_rate=0.1, ...

    Reference:
        Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, arXiv:1603.09382. As in the paper, activations
        are by default scaled in evaluation, not in training.
    """

    surgery_rank = 1
    acts_on = frozenset({Event.INIT, Event.BATCH_START})

    def __init__(
        self,
        target_layer_name: str,
        stochastic_method: str = "block",
        drop_rate: float = 0.2,
        drop_distribution: str = "linear",
        drop_warmup: float | str | Time[Any] = 0.0,
        use_same_gpu_seed: bool | None = None,
        *,
        rescale: Rescale = "eval",
    ) -> None:
        _check(target_layer_name, stochastic_method, drop_rate, drop_distribution, rescale)
        self.target_layer_name = target_layer_name
        self.stochastic_method = stochastic_method
        self.drop_rate = drop_rate
        self.drop_distribution = drop_distribution
        self.drop_warmup = _warmup_time(drop_warmup)
        self.use_same_gpu_seed = use_same_gpu_seed
        self.rescale: Rescale = rescale
        if stochastic_method == "sample" and self.drop_warmup.value != 0:
            raise ValueError(
                f"drop_warmup={drop_warmup!r} requires stochastic_method='block': leave it out, or drop whole blocks."
            )
        if self.drop_warmup.value == 0:
            self.acts_on = frozenset({Event.INIT})
        self._draws = BlockDraws()
        self._final_rates: list[tuple[nn.Module, torch.Tensor]] = []
        self._fraction = 1.0 if self.drop_warmup.value == 0 else 0.0

    @property
    def find_unused_parameters(self) -> bool:
        """Return whether dropped blocks leave parameters without a gradient."""
        return self.stochastic_method == "block"

    def apply(self, event: Event, state: "State", logger: "Logger | None") -> None:
        """Convert the blocks, or raise their rates."""
        if event == Event.INIT:
            self._convert_blocks(state, logger)
        elif event == Event.BATCH_START and self._fraction < 1:
            self._set_fraction(min(1.0, self._elapsed_fraction(state)))
            if logger is not None:
                logger.log_metrics({"stochastic_depth/drop_rate": self.drop_rate * self._fraction})

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, the progress of the warm-up, and the number of draws shared by all ranks."""
        return {**super().state_dict(), "fraction": self._fraction, "num_draws": self._draws.num_draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the rates and the shared draws of a checkpoint; Composer's own checkpoints have neither."""
        self._draws.num_draws = int(state.get("num_draws", 0))
        self._set_fraction(float(state.get("fraction", self._fraction)))

    def _convert_blocks(self, state: "State", logger: "Logger | None") -> None:
        is_sharded = state.fsdp_config is not None or state.deepspeed_enabled
        stage = ((state.deepspeed_config or {}).get("zero_optimization") or {}).get("stage", 0)
        is_exchanging = dist.get_world_size() > 1 and (state.fsdp_config is not None or bool(stage))
        if self.use_same_gpu_seed is False and self.find_unused_parameters and is_exchanging:
            by = f"DeepSpeed's stage {stage}" if stage else "FSDP"
            raise ValueError(
                f"StochasticDepth(use_same_gpu_seed=False) lets each rank drop other blocks, but under {by} the ranks "
                f"exchange the gradients of the same ones. Leave use_same_gpu_seed out, or use "
                f"stochastic_method='sample'."
            )
        if self.use_same_gpu_seed or (self.use_same_gpu_seed is None and is_sharded):
            # The same decisions on all ranks: sharded ranks gather the weights of a block together.
            self._draws.seed = state.rank_zero_seed
        settings = (self.target_layer_name, self.stochastic_method, self.drop_rate, self.drop_distribution)
        blocks = _convert(state.model, *settings, self._draws, self.rescale)
        self._final_rates = [(block, torch.as_tensor(block.drop_rate)) for block in blocks]
        self._set_fraction(self._fraction)
        _log.info("StochasticDepth: %d blocks are dropped at random.", len(blocks))
        if logger is not None:
            logger.log_metrics(
                {
                    "stochastic_depth/num_stochastic_layers": len(blocks),
                    "stochastic_depth/drop_rate": self.drop_rate * self._fraction,
                }
            )

    def _set_fraction(self, fraction: float) -> None:
        self._fraction = fraction
        for block, final_rate in self._final_rates:
            block.drop_rate = final_rate * fraction

    def _elapsed_fraction(self, state: "State") -> float:
        if self.drop_warmup.unit != TimeUnit.DURATION:
            return float(state.timestamp.get(self.drop_warmup.unit) / self.drop_warmup)
        return float(elapsed_fraction(state, f"drop_warmup={str(self.drop_warmup)!r}") / self.drop_warmup)


def _warmup_time(drop_warmup: Any) -> Time[Any]:
    try:
        time = ensure_time(drop_warmup, TimeUnit.DURATION)
    except (ValueError, TypeError, RuntimeError) as error:  # its message does not name the argument
        raise type(error)(f"drop_warmup={drop_warmup!r} is not a time: {error}") from error
    if time.value < 0:
        raise ValueError(f"drop_warmup={drop_warmup!r} must be 0 or more: pass a fraction of training, or a time.")
    return time


def _check(layer_name: str, method: str, drop_rate: float, distribution: str, rescale: str) -> None:
    check_choice(tuple(layer_mapping()), target_layer_name=layer_name)
    check_choice(("block", "sample"), stochastic_method=method)
    check_choice(("linear", "uniform"), drop_distribution=distribution)
    check_choice(("eval", "train"), rescale=rescale)
    check_interval("[0, 1]", drop_rate=drop_rate)
