"""Letting every rank know of a failure before it waits for the rank that has failed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves  # its public face, `optree`, is another package

__all__ = ["checked_meetings"]


@contextmanager
def checked_meetings(roots: Sequence[FSDPModule], check: Callable[[], None]) -> Iterator[None]:
    """Return a context in which sharded modules call a function each time before the ranks meet.

    They meet where weights are gathered, before a unit's forward and backward pass, and where gradients are reduced,
    after its backward pass. After an error everything that was begun is forgotten, so that the modules can run anew.

    Args:
        roots: The outermost sharded modules.
        check: Raises if any rank has failed; called equally often on all ranks until then.
    """
    handles: list[Any] = []
    begun: set[nn.Module] = set()
    for root in roots:
        assert isinstance(root, nn.Module)
        handles.append(root.register_forward_pre_hook(lambda module, _: begun.add(module)))
        for module in root.modules():
            if isinstance(module, FSDPModule):
                handles += _watch(module, check, is_root=module is root)
    try:
        yield
    except BaseException:
        for root in roots:
            if root in begun:  # one that has never run has nothing to forget, and torch fails on it
                root.reset_iter_state()
        raise
    finally:
        for handle in handles:
            handle.remove()


def _watch(module: nn.Module, check: Callable[[], None], *, is_root: bool) -> list[Any]:
    def before_gathering(_: nn.Module, args: Any) -> None:
        check()

    def before_reducing(_: nn.Module, args: Any, kwargs: Any) -> None:
        # FSDP, whose own hook has run by now, has put a node behind the inputs that reduces in its backward pass.
        for tensor in _with_gradient((args, kwargs)):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: check())
                return

    def before_gathering_again(_: nn.Module, __: Any, outputs: Any) -> None:
        once = _Once(check, is_root)
        for tensor in _with_gradient(outputs):
            tensor.register_hook(once)

    return [
        module.register_forward_pre_hook(before_gathering, prepend=True),
        module.register_forward_pre_hook(before_reducing, with_kwargs=True),
        module.register_forward_hook(before_gathering_again, prepend=True),
    ]


class _Once:
    """Checks when the first of several gradients arrives."""

    def __init__(self, check: Callable[[], None], is_root: bool) -> None:
        self._check = check
        self._is_root = is_root
        self._is_done = False

    def __call__(self, _: torch.Tensor) -> None:
        if self._is_done:
            return
        self._is_done = True
        if self._is_root:
            # At the end of the backward pass a root reduces what has no input to wait for. Its callback comes after
            # this one, in the order in which they are queued; torch has no public way to queue one.
            Variable._execution_engine.queue_callback(self._check)  # pyright: ignore[reportAttributeAccessIssue]
        self._check()


def _with_gradient(values: Any) -> Iterator[torch.Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            yield value
