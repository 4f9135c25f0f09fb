"""Pickles of tensors that have attributes of their own, as DeepSpeed's parameters do.

`load_file` refuses them: whoever loads gives a tensor attributes that a stranger has chosen. To read the tensor's
elements, the attributes are not needed, and they are left out here.
"""

from collections.abc import Mapping
from typing import Any

from composer_checkpoint._geometry import check_geometry
from composer_checkpoint._pickle_calls import Call
from composer_checkpoint._rehearsal import AnyTensorSpec, Rehearsal, RehearsingUnpickler
from composer_checkpoint.unpickler import run_restricted, scan

__all__ = ["rehearse_with_attributes"]


def rehearse_with_attributes(data: bytes) -> Rehearsal:
    """Rehearse a pickle as `rehearse` does, with inert objects for what is not allowed, and tensors without attributes.

    Raises:
        UnsafeCheckpointError: If it has instructions that no checkpoint needs.
        CorruptCheckpointError: If it is damaged, or a tensor does not fit its storage.
    """
    scan(data)
    rehearsal = Rehearsal()
    rehearsal.tree = run_restricted(_Unpickler(data, rehearsal, True))
    rehearsal.name_tensors()
    for tensor in rehearsal.views:
        item_bytes = tensor.dtype.item_bytes
        numel = tensor.storage.size_bytes // item_bytes
        check_geometry("a tensor", tensor.shape, tensor.stride, tensor.offset, numel, item_bytes)
    return rehearsal


class _Unpickler(RehearsingUnpickler):
    def find_unknown(self, name: str) -> Any:
        found = _EXTRA.get(name)
        return super().find_unknown(name) if found is None else Call(found, self.budget)


def _tensor_without_attributes(function: Any, kind: Any, args: Any, state: Any) -> AnyTensorSpec:
    tensor = function(*args)
    if not isinstance(tensor, AnyTensorSpec):
        raise ValueError("only a tensor is rebuilt from its type")
    return tensor


def _tensor_class(*_: Any) -> None:
    raise ValueError("tensors are rebuilt, not called for")


_EXTRA: Mapping[str, Any] = {
    "torch._tensor._rebuild_from_type_v2": _tensor_without_attributes,
    "torch.Tensor": _tensor_class,
}
