"""A model's weights, whole and on the host of one rank, however they are spread."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_hf.adapters import is_adapter_weight
from composer_hf.model import HuggingFaceModel
from composer_hf.published_weights import published_name

__all__ = ["gather_weights"]


def gather_weights(model: HuggingFaceModel, dtype: torch.dtype | None, *, keep: bool) -> dict[str, Tensor]:
    """Return copies of the weights, gathered one after the other. Every rank must call this.

    Args:
        model: The model, without what spreads it. Of one with an adapter, what was trained is returned.
        dtype: What floating point weights are converted to.
        keep: Whether this rank gets them; others get nothing.
    """
    seen: dict[int, Tensor | None] = {}
    weights: dict[str, Tensor] = {}
    beside = model.names_trained_beside_adapter()
    for name, value in model.state_dict(keep_vars=True).items():
        plain = published_name(name)
        if model.using_peft and not is_adapter_weight(plain) and plain not in beside:
            continue
        if id(value) not in seen:  # what is tied is one weight
            whole: Tensor = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
            target = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            seen[id(value)] = whole.to("cpu", target, copy=True) if keep else None
        if (copied := seen[id(value)]) is not None:
            weights[name] = copied
    return weights
