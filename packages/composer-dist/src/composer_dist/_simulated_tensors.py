"""Tensors of the simulated accelerator, the dispatch of their operations, and its registration in PyTorch.

All use of PyTorch's private interface is in this module: a backend in Python has no public one, only one in C++ has.
"""

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as tdist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,  # pyright: ignore[reportPrivateUsage]
)

if TYPE_CHECKING:
    from composer_dist.simulated_accelerator import Runtime

DEVICE_TYPE = "simgpu"
_HOST = torch.device("cpu")


class _Current:
    """The device in use, or last used, since its tensors can still be read afterwards."""

    runtime: "Runtime | None" = None
    is_active = False


def current() -> "Runtime":
    """Return the device in use, or last used."""
    if _Current.runtime is None:
        raise RuntimeError("The simulated device exists only within `with SimulatedAccelerator():`.")
    return _Current.runtime


def make_current(runtime: "Runtime | None", *, is_active: bool) -> None:
    """Make a device the one that tensors belong to."""
    _Current.runtime, _Current.is_active = runtime or _Current.runtime, is_active


def is_active() -> bool:
    """Return whether a device is in use."""
    return _Current.is_active


@functools.cache
def device() -> torch.device:
    """Return the device, whose name PyTorch knows after `register_backend`."""
    return torch.device(DEVICE_TYPE, 0)


class _Tensor(Tensor):
    """A tensor of the simulated device; `on_host` holds its values."""

    on_host: Tensor
    allocation: object  # frees the memory when it is deleted
    is_scalar = False  # what `x[mask] = 0` puts, before torch 2.15

    @staticmethod
    def __new__(cls, on_host: Tensor) -> "_Tensor":
        tensor = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]  # documented for subclasses
            cls,
            on_host.size(),
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            layout=on_host.layout,
            device=device(),
        )
        tensor.on_host = on_host
        tensor.allocation = None if _Current.runtime is None else _Current.runtime.memory.allocate(on_host)
        return tensor

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"{repr(self.on_host.detach())[:-1]}, device='{device()}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The form of devices whose tensors have no storage, which a weights-only load accepts.
        rebuild: Any = torch._utils  # pyright: ignore[reportAttributeAccessIssue]
        if getattr(self, "_is_param", False):
            return rebuild._rebuild_parameter, (self.detach(), self.requires_grad, {})
        args = (self.detach().cpu(), self.dtype, str(device()), self.requires_grad)
        return rebuild._rebuild_device_tensor_from_cpu_tensor, args

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            if self.grad is not None:
                copied.grad = self.grad.__deepcopy__(memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def as_subclass(self, cls: type[Any]) -> Any:
        if self.requires_grad:
            raise RuntimeError(f"{DEVICE_TYPE} does not support `as_subclass` of a tensor that requires a gradient.")
        return _combined_with(cls)(self.on_host)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_host.untyped_storage()

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, _Tensor):
            raise RuntimeError(f"Cannot set `data` of a tensor on {device()} to one on {value.device}.")
        _set_data(self, value)
        self.on_host, self.allocation = value.on_host, value.allocation


@functools.cache
def _combined_with(cls: type[Any]) -> type[Any]:
    return cls if issubclass(cls, _Tensor) else type(cls.__name__, (cls, _Tensor), {})


class Mode(TorchDispatchMode):
    """Dispatch of operations that make tensors on the device, or pinned memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # PyTorch only infers a shape
        if any(each.__torch_dispatch__ not in _DISPATCHES for each in types):
            return NotImplemented  # to a DTensor, which comes back with its local tensors
        pins = kwargs.get("pin_memory") or func in (_aten.is_pinned.default, _aten._pin_memory.default)
        has_tensors = any(isinstance(leaf, _Tensor) for leaf in _leaves(args, kwargs))
        if pins or has_tensors or is_simulated(kwargs.get("device")):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


_aten = torch.ops.aten
_DISPATCHES = (cast(Any, Tensor).__torch_dispatch__, _Tensor.__torch_dispatch__)
_READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXES = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_TAKES_SCALARS = {"masked_fill", "masked_fill_", "fill_", "fill"}  # besides pointwise and foreach ones
_FREE = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.detach.default)


_set_data: Any = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Set `Tensor.data`, which here changes the class of a CPU tensor."""
    if isinstance(tensor, _Tensor) or not isinstance(value, _Tensor):
        _set_data(tensor, value)
        return
    moved: Any = value.detach().requires_grad_(tensor.requires_grad)
    moved.__dict__ = {**tensor.__dict__, **moved.__dict__, "_is_param": isinstance(tensor, torch.nn.Parameter)}
    torch.utils.swap_tensors(tensor, moved)


def is_simulated(device: Any) -> bool:
    """Return whether a device is of this type."""
    return device is not None and torch.device(device).type == DEVICE_TYPE


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    return tree_leaves((args, kwargs))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with tensors of the device, or that makes some or pinned memory."""
    if func in _COPIES:
        return _copy(current(), func, args, kwargs)
    if func.namespace == "c10d":
        return _communicate(args, _compute(current(), func, args, kwargs))
    return _SPECIAL[func](*args) if func in _SPECIAL else _compute(current(), func, args, kwargs)


def _compute(runtime: "Runtime", func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, _Tensor)]
    target = kwargs.get("device")
    stays = is_simulated(target) if target is not None else bool(on_device)
    if on_device:
        _reject_mixed_devices(runtime, func, args, tensors)
    _count(runtime, func, args, reads=bool(on_device), writes=stays)
    plain = {**kwargs, "device": _HOST} if is_simulated(target) else dict(kwargs)
    is_pinned = bool(plain.pop("pin_memory", False))
    result = _call(runtime if stays else None, func, *tree_map(_values, (args, plain)))
    for tensor in on_device:
        _follow_shape(tensor)
    if is_pinned:
        return _mark_pinned(result)
    known = {id(tensor.on_host): tensor for tensor in on_device}
    result = tree_map(lambda leaf: _wrap(leaf, known) if stays else known.get(id(leaf), leaf), result)
    if stays and func is _aten.scalar_tensor.default:
        result.is_scalar = True
    return result


def _count(runtime: "Runtime", func: Any, args: Any, *, reads: bool, writes: bool) -> None:
    """Count the synchronization and the kernel of an operation that reads or writes tensors of the device."""
    if reads and _waits(func, args):
        runtime.wait()
    if writes and not func.is_view and func not in _FREE:
        runtime.note("kernels")


def _communicate(args: Any, result: Any) -> Any:
    """Wait for a collective of the CPU, and return its result with a finished one of this device."""
    outputs = [leaf for leaf in _leaves(result, ()) if isinstance(leaf, Tensor)] or _leaves(args[0], ())

    def finish(leaf: Any) -> Any:
        if not isinstance(leaf, torch.ScriptObject):
            return leaf
        tdist.Work.unbox(leaf).wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(outputs)
        return cast(Any, torch._C)._distributed_c10d._create_work_from_future(future).boxed()

    return tree_map(finish, result)


def _wrap(leaf: Any, known: dict[int, _Tensor]) -> Any:
    """Return the tensor of the device for one of the CPU, which is the same one after an operation in place."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, _Tensor):
        return leaf
    if id(leaf) in known:
        return known[id(leaf)]
    is_on_its_way = type(leaf).__name__ == "AsyncCollectiveTensor"  # from a collective of DTensor
    return _Tensor(cast(Any, leaf).wait() if is_on_its_way else leaf)


def _call(runtime: "Runtime | None", func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the CPU, with the random numbers of the device if the result is to be on it."""
    if runtime is None or torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{DEVICE_TYPE}' device type for generator but found 'cpu'")
    with runtime.drawing():
        return func(*args, **kwargs)


def _follow_shape(tensor: _Tensor) -> None:
    """Adopt a change of shape or strides in place."""
    if tensor.size() != tensor.on_host.size() or tensor.stride() != tensor.on_host.stride():
        changed = _Tensor(tensor.on_host)
        with torch._C._DisableTorchDispatch():  # or setting `data` would come back here
            tensor.data = changed


def _values(leaf: Any) -> Any:
    return leaf.on_host if isinstance(leaf, _Tensor) else leaf


def _reject_mixed_devices(runtime: "Runtime", func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Raise if an operation mixes devices where CUDA does not allow it."""
    on_host = [tensor for tensor in tensors if not isinstance(tensor, _Tensor)]
    name = func.overloadpacket.__name__
    takes_scalars = torch.Tag.pointwise in func.tags or name in _TAKES_SCALARS or name.startswith("_foreach")
    if func in _INDEXES and isinstance(args[0], _Tensor):
        for _ in set(map(id, on_host)) & set(map(id, args[1])):  # indices of the host are copied
            runtime.note("copies_to_device")
            runtime.wait()
        on_host, takes_scalars = [each for each in args[2:3] if not isinstance(each, _Tensor)], True
    elif name.startswith("_fused"):  # a learning rate may be on the host, but no step count
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        on_host = [tensor for tensor in tree_leaves(lists) if not isinstance(tensor, _Tensor)]
    if any(tensor.dim() > 0 or not takes_scalars for tensor in on_host):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {device()} and "
            f"{on_host[0].device}! (when calling {func})"
        )


def _waits(func: Any, args: Any) -> bool:
    """Return whether the host waits for the operation's result."""
    if func in _INDEXES:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        # A scalar of the host is put by `masked_fill`, without `nonzero`.
        fills = len(args) > 2 and args[2].numel() == 1 and getattr(args[2], "is_scalar", True)
        return bool(masks) and not fills
    return not _READS_VALUES.isdisjoint(func.tags)


def _copy(runtime: "Runtime", func: Any, args: Any, kwargs: Any) -> Any:
    """Copy between tensors, of which at least one is on the device."""
    if func is _aten._to_copy.default:
        source, target, place = args[0], None, kwargs.get("device")
        is_async = bool(kwargs.get("non_blocking"))
        goes_to_device = is_simulated(place) if place is not None else isinstance(source, _Tensor)
        to = {**kwargs, "device": _HOST, "non_blocking": False, "pin_memory": None}
        values = func(_values(source), **to)
    else:
        target, source, *rest = args
        is_async = bool(kwargs.get("non_blocking", any(rest)))
        goes_to_device = isinstance(target, _Tensor)
        values = _values(source)
    if isinstance(source, _Tensor) == goes_to_device:
        runtime.note("kernels")
    else:
        runtime.note("copies_to_device" if goes_to_device else "copies_to_host")
        if not is_async:
            runtime.wait()
    if not goes_to_device:
        return _copy_to_host(runtime, target, values, is_async=is_async)
    if target is None:
        target = _Tensor(values)
    else:
        target.on_host.copy_(values)
    if is_async and not isinstance(source, _Tensor) and _is_pinned(source):
        runtime.launch(weakref.ref(source), source._version)
    return target


def _copy_to_host(runtime: "Runtime", target: Tensor | None, values: Tensor, *, is_async: bool) -> Tensor:
    if target is None:
        if not is_async:
            return values
        target = _mark_pinned(torch.empty_like(values))  # as PyTorch does
    if not (is_async and _is_pinned(target)):
        return target.copy_(values)
    arrived = torch.empty_like(target).copy_(values)
    _fill_with_garbage(target, arrived)
    runtime.launch(lambda: target, 0, arrived)
    return target


def _fill_with_garbage(target: Tensor, arrived: Tensor) -> None:
    if target.dtype == torch.bool:
        target.copy_(~arrived)
    elif target.is_floating_point() or target.is_complex():
        target.fill_(torch.nan)
    else:
        target.fill_(torch.iinfo(target.dtype).min)


def _mark_pinned(tensor: Tensor) -> Tensor:
    storage: Any = tensor.untyped_storage()
    storage._is_simulated_pinned = True
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return not isinstance(tensor, _Tensor) and getattr(tensor.untyped_storage(), "_is_simulated_pinned", False)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten.is_pinned.default: lambda tensor, *_: _is_pinned(tensor),
    _aten._pin_memory.default: lambda tensor, *_: _mark_pinned(tensor.clone()),
    # The plain implementation, since fused kernels of the CPU have operations of their own.
    _aten._fused_sdp_choice.default: lambda *_: 0,
}


class _Backend(SimpleNamespace):
    """The module `torch.simgpu`, which PyTorch asks about the device."""

    @staticmethod
    def is_available() -> bool:
        return _Current.is_active

    @staticmethod
    def is_initialized() -> bool:
        return _Current.is_active

    @staticmethod
    def device_count() -> int:
        return int(_Current.is_active)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        if _Current.runtime is not None and _Current.runtime.generator is not None:
            _Current.runtime.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, Any]:
        return torch.accelerator.memory_stats()  # replaced by SimulatedAccelerator within its `with` statement

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        return (current().generator or torch.default_generator).get_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        (current().generator or torch.default_generator).set_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_LOWER = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input linear matmul mm mv bmm addmm "
    "addmv addbmm baddbmm prelu scaled_dot_product_attention"
)
_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm group_norm norm.Scalar nuclear_norm cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp cumprod cumsum prod "
    "prod.dim_int sum sum.dim_IntList softmax.int log_softmax.int"
)
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add tensordot"
_libraries: tuple[Any, ...] = ()  # keeps the kernels registered


def register_backend(**streams: Any) -> None:
    """Make the device type known to PyTorch, for the rest of the process, with its streams and events."""
    global _libraries
    if _libraries:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", DEVICE_TYPE):
        raise RuntimeError(f"PyTorch's only slot for other devices is in use for {name!r}. Use another process.")
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Backend(**streams))
    library = torch.library.Library("aten", "IMPL")
    for names, dtype_for in ((_LOWER, _autocast_dtype), (_FLOAT32, lambda _: torch.float32), (_WIDEST, _widest)):
        for each in names.split():
            packet, _, overload = each.partition(".")
            operation = getattr(getattr(_aten, packet), overload or "default")
            library.impl(operation, _autocast_kernel(operation, dtype_for), "AutocastPrivateUse1")
    # `torch.tensor` and threads without the mode reach the first ones; autograd would decompose the last ones, of which
    # CPU and CUDA have kernels.
    made = _aten.empty.memory_format, _aten.empty_strided.default, _aten.copy_.default
    for operation in (*made, _aten.silu_backward.default, _aten.mish_backward.default):
        library.impl(operation, _kernel(operation), "PrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries = library, others


def _kernel(operation: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(operation, args, kwargs)


def _autocast_dtype(tensors: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE_TYPE)


def _widest(tensors: list[Tensor]) -> torch.dtype:
    has_float32 = any(tensor.dtype == torch.float32 for tensor in tensors)
    return torch.float32 if has_float32 else torch.get_autocast_dtype(DEVICE_TYPE)


def _autocast_kernel(operation: Any, dtype_for: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    """Return an operation that converts the floating point tensors of the device first."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        def is_converted(leaf: Any) -> bool:
            return isinstance(leaf, _Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64

        dtype = dtype_for([leaf for leaf in _leaves(args, kwargs) if is_converted(leaf)])
        keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if is_converted(leaf) else leaf, (args, kwargs))
            return operation(*args, **kwargs)

    return kernel
