"""Stochastic depth: randomly skip residual blocks in training."""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from composer_algorithms._arguments import check_choice, check_interval
from composer_algorithms._draws import generator_for
from composer_algorithms._method import ModelSurgery, elapsed_fraction, log_no_effect
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import count_module_instances, replace_module_classes
from composer_dist import dist
from composer_events import Event, Logger, State
from composer_time import Time, TimeUnit, ensure_time

__all__ = [
    "StochasticDepth",
    "apply_stochastic_depth",
    "BlockStochasticModule",
    "make_resnet_basic_block_stochastic",
    "make_resnet_bottleneck_stochastic",
    "METADATA",
]

METADATA = METHODS["stochastic_depth"]

_log = logging.getLogger("composer.algorithms.stochastic_depth")

Converter = Callable[..., nn.Module]
Rescale = Literal["eval", "train"]


class BlockDraws:
    """Decide for each block and forward pass whether the block is kept.

    Without a seed the decisions come from PyTorch's CPU generator, like dropout's. With a seed they are the same on all
    ranks, as a sharded model requires, whose ranks have to gather the weights of a block together.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.num_draws = 0

    def keep(self, drop_rate: Tensor) -> bool:
        """Return false with a probability of `drop_rate`, a tensor on the CPU."""
        if self.seed is None:
            return bool(torch.rand(()) >= drop_rate)
        # A generator per draw, so that a checkpoint has to keep only the number of draws.
        generator = generator_for(f"{self.seed}/StochasticDepth/{self.num_draws}")
        self.num_draws += 1
        return bool(torch.rand((), generator=generator) >= drop_rate)


class _Drawing(nn.Module):
    """Base of the modules that ask `draws` whether to keep the main branch, also in a form for `torch.jit.script`."""

    if TYPE_CHECKING:  # at run time torch.jit.script would read this as an attribute's type
        draws: Any

    def _draw(self, drop_rate: Tensor) -> bool:
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__
            return bool(torch.rand(()) >= drop_rate)
        return self.draws.keep(drop_rate)


class BlockStochasticModule(_Drawing):
    """A residual block of two given branches, whose main branch is randomly dropped in training.

    Evaluation keeps the main branch, by default scaled by its probability of being kept in training.

    Args:
        main: Branch that may be dropped.
        residual: The other branch; the input itself when `None`. Both return tensors of one shape.
        drop_rate: Drop probability of the main branch, in [0, 1].
        rescale: `'eval'`: the main branch is scaled in evaluation. `'train'`: a main branch kept in training is divided
            by its probability of being kept, as in `torchvision.ops.StochasticDepth`; evaluation is unchanged.

    Raises:
        ValueError: If `drop_rate` is outside [0, 1], or `rescale` is unknown.

    Example:
        >>> block = BlockStochasticModule(nn.Linear(4, 4), drop_rate=1.0)
        >>> x = torch.rand(2, 4)
        >>> torch.equal(block(x), x)
        True

    Reference:
        Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, arXiv:1603.09382, eq. (2) and (5).
    """

    def __init__(
        self,
        main: nn.Module,
        residual: nn.Module | None = None,
        drop_rate: float = 0.2,
        *,
        rescale: Rescale = "eval",
    ) -> None:
        super().__init__()
        check_interval("[0, 1]", drop_rate=drop_rate)
        check_choice(("eval", "train"), rescale=rescale)
        self.rescale: Rescale = rescale
        self.main = main
        self.residual = residual
        self.drop_rate = torch.tensor(drop_rate)
        self.draws = BlockDraws()

    def forward(self, x: Tensor) -> Tensor:
        """Add the branches, or drop the main one."""
        identity = x if self.residual is None else self.residual(x)
        if self.training and not self._draw(self.drop_rate):
            return identity
        return _scaled(self.main(x), self.drop_rate, self.rescale, self.training) + identity


def make_resnet_bottleneck_stochastic(
    module: nn.Module,
    module_index: int,
    module_count: int,
    drop_rate: float,
    drop_distribution: str,
    stochastic_method: str,
    draws: BlockDraws | None = None,
    rescale: Rescale = "eval",
) -> nn.Module:
    """Make a `Bottleneck` or `BasicBlock` of torchvision drop its main branch in training.

    Its `drop_rate` is a CPU tensor, since it is compared with random numbers there.

    Args:
        module: Block, changed in place: a subclass of its class gives it another `forward`.
        module_index: Its position among the blocks of the model, from 0.
        module_count: Number of these blocks.
        drop_rate: Drop probability of the last block, in [0, 1].
        drop_distribution: `'linear'` from near 0 in the first block to `drop_rate` in the last, or `'uniform'`.
        stochastic_method: `'block'` drops for the whole batch, `'sample'` for single examples.
        draws: Source of the decisions about whole batches.
        rescale: `'eval'` or `'train'`; see `apply_stochastic_depth`.

    Returns:
        The block.

    Example:
        >>> from torchvision.models.resnet import Bottleneck
        >>> block = make_resnet_bottleneck_stochastic(Bottleneck(16, 4), 0, 4, 0.2, "linear", "block")
        >>> block.drop_rate
        tensor(0.0500)

    Reference:
        Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, arXiv:1603.09382. Examples are sampled as in
        EfficientNet's code for TPUs.
    """
    block: Any = module
    if not isinstance(block, _Stochastic):
        # A class instead of a `forward` on the instance, which a shallow copy would bind to the original block.
        block.__class__ = _class_of(_BottleneckBranch if hasattr(block, "conv3") else _BasicBranch, type(block))
    # Equation (4) of the paper for `'linear'`.
    part = (module_index + 1) / module_count if drop_distribution == "linear" else 1.0
    # Not a buffer: state dicts stay those of the plain block, and the rate stays on the CPU when the model moves.
    block.drop_rate = torch.tensor(part * drop_rate)
    block.rescale = rescale
    block.stochastic_method = stochastic_method
    block.draws = draws or BlockDraws()
    return module


make_resnet_basic_block_stochastic = make_resnet_bottleneck_stochastic


@functools.cache
def layer_mapping() -> dict[str, tuple[type[nn.Module], Converter]]:
    """Map names of layers to their classes and the functions that convert them."""
    from torchvision.models.resnet import BasicBlock, Bottleneck  # slow to import, and only needed for these layers

    return {
        "ResNetBottleneck": (Bottleneck, make_resnet_bottleneck_stochastic),
        "ResNetBasicBlock": (BasicBlock, make_resnet_bottleneck_stochastic),
    }


class _Stochastic(_Drawing):
    """Base class that precedes a residual block's own class, in a form that `torch.jit.script` accepts."""

    if TYPE_CHECKING:  # at run time torch.jit.script would read these as attribute types
        drop_rate: Tensor
        rescale: Any
        stochastic_method: Any
        downsample: Any
        relu: Any
        conv1: Any
        conv2: Any
        conv3: Any
        bn1: Any
        bn2: Any
        bn3: Any

    def forward(self, x: Tensor) -> Tensor:
        """Add the branches, or drop the main one."""
        is_kept = not self.training or self.stochastic_method != "block" or self._draw(self.drop_rate)
        if not is_kept:
            return x if self.downsample is None else self.relu(self.downsample(x))
        main = _scaled(self._branch(x), self.drop_rate, self.rescale, self.training)
        if self.training and self.stochastic_method == "sample":
            main = _without_some(main, self.drop_rate)
        identity = x if self.downsample is None else self.downsample(x)
        return self.relu(main.add(identity))

    def _branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is created at run time, so pickle cannot find it by name.
        branch, block = type(self).__bases__
        return _new, (branch, block), self.__getstate__()


class _BottleneckBranch(_Stochastic):
    def _branch(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.bn3(self.conv3(out))


class _BasicBranch(_Stochastic):
    def _branch(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.bn2(self.conv2(out))


@functools.cache
def _class_of(branch: type[_Stochastic], block: type[nn.Module]) -> Any:
    """Return a class for blocks of one class, with the same name."""
    return type(block.__name__, (branch, block), {"__module__": block.__module__, "__doc__": block.__doc__})


def _new(branch: type[_Stochastic], block: type[nn.Module]) -> nn.Module:
    kind = _class_of(branch, block)
    return kind.__new__(kind)


def _without_some(main: Tensor, drop_rate: Tensor) -> Tensor:
    """Zero the main branch of randomly drawn examples."""
    # The shortcut for a rate of 0 depends on a tensor, at which a compiled graph would break.
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__
        pass
    elif not torch.compiler.is_compiling() and not bool(drop_rate > 0):
        return main
    shape = [len(main)] + [1] * (main.ndim - 1)
    kept = torch.rand(shape, dtype=torch.float32, device=main.device) >= drop_rate
    return main * kept.to(main.dtype)


def _scaled(main: Tensor, drop_rate: Tensor, rescale: str, is_training: bool) -> Tensor:
    """Scale the main branch, so that its mean is the same in training and evaluation."""
    if rescale == "eval":
        return main if is_training else main * (1 - drop_rate)
    # With a rate of 1 nothing is kept that could be scaled.
    return main / (1 - drop_rate) if is_training and bool(drop_rate < 1) else main


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
    _check(target_layer_name, stochastic_method, drop_rate, drop_distribution, rescale)
    layer_class, converter = layer_mapping()[target_layer_name]
    count = count_module_instances(model, layer_class) + isinstance(model, layer_class)  # which is not counted
    if not count:
        why = f"it has no {layer_class.__qualname__}, which is what {target_layer_name=} stands for"
        log_no_effect(_log, "StochasticDepth", model, why)

    def policy(module: nn.Module, module_index: int) -> nn.Module:
        return converter(module, module_index, count, drop_rate, drop_distribution, stochastic_method, rescale=rescale)

    replace_module_classes(model, {layer_class: policy}, include_root=True)


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
    schedulable = ("drop_rate",)
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
        self._drop_rate = drop_rate
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
        self._shares: list[tuple[nn.Module, float]] = []  # of each block in the rate of the last one
        self._fraction = 1.0 if self.drop_warmup.value == 0 else 0.0

    @property
    def drop_rate(self) -> float:
        """Drop probability of the last block. An assignment changes all blocks."""
        return self._drop_rate

    @drop_rate.setter
    def drop_rate(self, drop_rate: float) -> None:
        check_interval("[0, 1]", drop_rate=drop_rate)
        self._drop_rate = drop_rate
        self._set_fraction(self._fraction)

    @property
    def find_unused_parameters(self) -> bool:
        """Return whether dropped blocks leave parameters without a gradient."""
        return self.stochastic_method == "block"

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Convert the blocks, or raise their rates."""
        if event == Event.INIT:
            self._convert_blocks(state, logger)
        elif event == Event.BATCH_START and self._fraction < 1:
            warmup = self.drop_warmup
            elapsed: Any = state.timestamp.get(warmup.unit) if warmup.unit != TimeUnit.DURATION else None
            if elapsed is None:
                elapsed = elapsed_fraction(state, f"drop_warmup={str(warmup)!r}")
            self._set_fraction(min(1.0, float(elapsed / warmup)))
            if logger is not None:
                logger.log_metrics({"stochastic_depth/drop_rate": self.drop_rate * self._fraction})

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, the progress of the warm-up, and the number of draws shared by all ranks."""
        return {**super().state_dict(), "fraction": self._fraction, "num_draws": self._draws.num_draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the rates and the shared draws of a checkpoint; Composer's own checkpoints have neither."""
        self._draws.num_draws = int(state.get("num_draws", 0))
        self._set_fraction(float(state.get("fraction", self._fraction)))

    def _convert_blocks(self, state: State, logger: Logger | None) -> None:
        is_sharded = state.fsdp_config is not None or state.deepspeed_enabled
        stage = ((state.deepspeed_config or {}).get("zero_optimization") or {}).get("stage", 0)
        is_exchanging = dist.get_world_size() > 1 and (state.fsdp_config is not None or bool(stage))
        if self.use_same_gpu_seed is False and self.find_unused_parameters and is_exchanging:
            raise ValueError(
                "StochasticDepth(use_same_gpu_seed=False) lets each rank drop other blocks, but under FSDP and the "
                "stages of DeepSpeed the ranks exchange the gradients of the same ones. Leave it out, or use "
                "stochastic_method='sample'."
            )
        if self.use_same_gpu_seed or (self.use_same_gpu_seed is None and is_sharded):
            # The same decisions on all ranks: sharded ranks gather the weights of a block together.
            self._draws.seed = state.rank_zero_seed
        settings = (self.target_layer_name, self.stochastic_method, 1.0, self.drop_distribution)
        apply_stochastic_depth(state.model, *settings, rescale=self.rescale)
        layer_class, _ = layer_mapping()[self.target_layer_name]
        blocks: list[Any] = list(filter(lambda module: isinstance(module, layer_class), state.model.modules()))
        for block in blocks:
            block.draws = self._draws
        self._shares = [(block, float(block.drop_rate)) for block in blocks]
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
        for block, share in self._shares:
            block.drop_rate = torch.tensor(share * self._drop_rate * fraction)


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
