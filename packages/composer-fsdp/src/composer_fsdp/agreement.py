"""Whether all ranks hold the same weights before these are sharded, which nobody could tell afterwards."""

import warnings

import torch
from torch import nn

from composer_dist import dist

__all__ = ["warn_of_different_weights"]


def warn_of_different_weights(model: nn.Module) -> None:
    """Warn if the ranks have different weights, of which each would keep a part. Every rank must call this."""
    if dist.get_world_size() == 1:
        return
    sums = dist.all_gather_object(_checksums(model))
    for index, (name, _) in enumerate(model.named_parameters()):
        if len({of_rank[index] for of_rank in sums}) > 1:
            warnings.warn(
                f"The ranks begin with different weights, {name!r} for one, and the sharded model is put together of "
                f"parts of them. Seed every rank alike before the model is built, or set sync_module_states=True.",
                UserWarning,
                stacklevel=2,
            )
            return


def _checksums(model: nn.Module) -> list[float]:
    """Return a number for each parameter that its values decide."""
    with torch.no_grad():
        parameters = list(model.parameters())
        if not parameters:
            return []
        sums = [parameter.double().sum() + parameter.flatten()[:1].double().sum() for parameter in parameters]
        return torch.stack([value.cpu() for value in sums]).tolist()
