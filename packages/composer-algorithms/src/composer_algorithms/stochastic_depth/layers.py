"""Residual blocks that are randomly dropped, for a whole batch or for single examples."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from composer_algorithms._arguments import check_choice, check_interval
from composer_algorithms._draws import generator_for

__all__ = [
    "BlockStochasticModule",
    "Converter",
    "layer_mapping",
    "make_resnet_basic_block_stochastic",
    "make_resnet_bottleneck_stochastic",
]

Converter = Callable[..., nn.Module]
Rescale = Literal["eval", "train"]


class BlockDraws:
    """Decide for each block and forward pass whether the block is kept.

    Without a seed the decisions come from PyTorch's CPU generator, like dropout's: they differ between ranks,
    checkpoints restore them, and activation checkpointing repeats them. With a seed they are the same on all ranks, as
    a sharded model requires, whose ranks have to gather the weights of a block together.
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


class BlockStochasticModule(nn.Module):
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
        is_kept = not self.training or self._draw(self.drop_rate)
        if not is_kept:
            return identity
        return _scaled(self.main(x), self.drop_rate, self.rescale, self.training) + identity

    def _draw(self, drop_rate: Tensor) -> bool:
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__
            return bool(torch.rand(()) >= drop_rate)
        return self.draws.keep(drop_rate)


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
    """Make a torchvision `Bottleneck` drop its main branch in training.

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
    rate = block_drop_rate(module_index, module_count, drop_rate, drop_distribution)
    return _make_stochastic(module, _BottleneckBranch, rate, stochastic_method, draws, rescale)


def make_resnet_basic_block_stochastic(
    module: nn.Module,
    module_index: int,
    module_count: int,
    drop_rate: float,
    drop_distribution: str,
    stochastic_method: str,
    draws: BlockDraws | None = None,
    rescale: Rescale = "eval",
) -> nn.Module:
    """Make a torchvision `BasicBlock` drop its main branch in training, as `make_resnet_bottleneck_stochastic` does.

    Example:
        >>> from torchvision.models.resnet import BasicBlock
        >>> block = make_resnet_basic_block_stochastic(BasicBlock(16, 16), 3, 4, 0.2, "linear", "sample")
        >>> block.drop_rate
        tensor(0.2000)

    Reference:
        Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, arXiv:1603.09382.
    """
    rate = block_drop_rate(module_index, module_count, drop_rate, drop_distribution)
    return _make_stochastic(module, _BasicBranch, rate, stochastic_method, draws, rescale)


@functools.cache
def layer_mapping() -> dict[str, tuple[type[nn.Module], Converter]]:
    """Map names of layers to their classes and the functions that convert them."""
    from torchvision.models.resnet import BasicBlock, Bottleneck  # slow to import, and only needed for these layers

    return {
        "ResNetBottleneck": (Bottleneck, make_resnet_bottleneck_stochastic),
        "ResNetBasicBlock": (BasicBlock, make_resnet_basic_block_stochastic),
    }


def block_drop_rate(module_index: int, module_count: int, drop_rate: float, drop_distribution: str) -> float:
    """Return the rate of one block: equation (4) of the paper for `'linear'`, a constant for `'uniform'`."""
    return (module_index + 1) / module_count * drop_rate if drop_distribution == "linear" else drop_rate


class _Stochastic(nn.Module):
    """Base class that precedes a residual block's own class, in a form that `torch.jit.script` accepts."""

    if TYPE_CHECKING:  # at run time torch.jit.script would read these as attribute types
        drop_rate: Tensor
        rescale: Any
        stochastic_method: Any
        draws: Any
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

    def _draw(self, drop_rate: Tensor) -> bool:
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__
            return bool(torch.rand(()) >= drop_rate)
        return self.draws.keep(drop_rate)

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


def _make_stochastic(
    module: nn.Module,
    branch: type[_Stochastic],
    drop_rate: float,
    stochastic_method: str,
    draws: BlockDraws | None,
    rescale: Rescale,
) -> nn.Module:
    block: Any = module
    if not isinstance(block, _Stochastic):
        # A class instead of a `forward` on the instance, which a shallow copy would bind to the original block.
        block.__class__ = _class_of(branch, type(block))
    # Not a buffer: state dicts stay those of the plain block, and the rate stays on the CPU when the model moves.
    block.drop_rate = torch.tensor(drop_rate)
    block.rescale = rescale
    block.stochastic_method = stochastic_method
    block.draws = draws or BlockDraws()
    return module


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
