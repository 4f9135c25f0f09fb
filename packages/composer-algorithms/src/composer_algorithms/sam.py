"""Sharpness-aware minimization (SAM): step with the gradient at a nearby point of higher loss, towards flat minima."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer_algorithms._arguments import check_counts, check_interval, takes_keyword
from composer_algorithms._draws import ResumableDraws
from composer_algorithms._method import Method
from composer_algorithms._optimizer_surgery import as_optimizers
from composer_algorithms.gradient_clipping import joint_norm, local_part
from composer_algorithms.metadata import METHODS
from composer_dist import reproducibility
from composer_events import Event, Logger, State

__all__ = ["SAM", "SAMOptimizer", "METADATA"]

METADATA = METHODS["sam"]


class SAMOptimizer(Optimizer):
    """Optimizer wrapper that steps with the gradient at a nearby point of higher loss.

    Every `interval`-th step calls the closure twice. With the gradient `g` of the first call, the weights are moved to
    `w + rho * g / (norm(g) + epsilon)`, where the second call computes the gradient. The weights are then restored
    exactly, and the base optimizer steps. All other steps are those of the base optimizer.

    Parameter groups and state are shared with the base optimizer, so schedulers may use either of the two. The state
    dict is that of the base optimizer, with the number of steps in its groups.

    Args:
        base_optimizer: Optimizer to wrap.
        rho: Distance to the other point, 0 or more. A parameter group may have its own.
        epsilon: Added to the norm to keep the division finite, 0 or more.
        interval: Number of steps from one two-point step to the next.
        replay: Whether the second call of the closure repeats the random draws of the first, such as those of dropout,
            so that both evaluate the same function. Only draws from PyTorch's generators and those of `algorithms` are
            repeated.
        **defaults: Additional options for parameter groups without them.

    Attributes:
        algorithms: Algorithms that act inside the closure and draw random numbers, such as MixUp.

    Raises:
        TypeError: If `base_optimizer` is not an optimizer.
        ValueError: If `rho` or `epsilon` is negative, or `interval` less than 1.

    Example:
        >>> weight = torch.tensor([3.0], requires_grad=True)
        >>> optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.1), rho=0.5)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = (weight**2).sum() / 2
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)  # the gradient at 3.5 is 3.5
        >>> round(weight.item(), 4)
        2.65

    Reference:
        Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR 2021,
        arXiv:2010.01412, algorithm 1. Weight decay is left to the base optimizer.
    """

    # Makes the training loop step with a closure, and use a gradient scaler that supports closures.
    _step_supports_amp_closure = True

    def __init__(
        self,
        base_optimizer: Optimizer,
        rho: float = 0.05,
        epsilon: float = 1.0e-12,
        interval: int = 1,
        *,
        replay: bool = True,
        **defaults: Any,
    ) -> None:
        check_interval("[0, inf)", rho=rho, epsilon=epsilon)
        check_counts(interval=interval)
        as_optimizers(base_optimizer)
        self._sam_defaults: dict[str, Any] = {"rho": rho, "epsilon": epsilon, "global_step": 0, **defaults}
        super().__init__(base_optimizer.param_groups, self._sam_defaults)
        self.base_optimizer = base_optimizer
        self.interval = interval
        self.replay = replay
        self.algorithms: Iterable[object] = ()
        self._share_with_base()

    @property
    def global_step(self) -> int:
        """Number of steps."""
        return self.param_groups[0]["global_step"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the base optimizer and thereby to this one."""
        if not hasattr(self, "base_optimizer"):  # called by the base class constructor
            super().add_param_group(param_group)
            return
        self.base_optimizer.add_param_group(param_group)
        self._share_with_base()

    @torch.no_grad()
    def step(self, closure: Callable[..., Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # the closure may take arguments
        """Perform a single optimization step.

        Args:
            closure: Zeroes the gradients, computes the loss, calls backward and returns the loss, or `None` to skip the
                step because the gradients are not finite. If it takes `loss_dict`, the second call passes an empty
                dict, so that its losses are not logged.

        Returns:
            Result of the first call of the closure.

        Raises:
            RuntimeError: If `closure` is `None`.
        """
        if closure is None:
            raise RuntimeError(
                "step() of SAMOptimizer needs a closure, since it computes the loss at two points: pass a function "
                "that zeroes the gradients, computes the loss, calls backward and returns the loss."
            )
        if (self.global_step + 1) % self.interval == 0:
            loss, is_finite = self._look_twice(closure)
        else:
            with torch.enable_grad():
                loss = closure()
            is_finite = loss is not None
        if is_finite:
            self.base_optimizer.step()
        for group in self.param_groups:  # in the groups, so that the state dict includes it
            group["global_step"] += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, the base optimizer or Composer's SAM into the base optimizer.

        Args:
            state_dict: Not changed.
        """
        saved = state_dict
        if "base" in saved:  # a nested layout, with the base optimizer's own state dict
            groups = [{**group, "global_step": saved["global_step"]} for group in saved["base"]["param_groups"]]
            saved = {**saved["base"], "param_groups": groups}
        # Composer saves no state of the base optimizer, only the ascent `e_w` of each parameter, which no step needs.
        state = {
            key: {name: value for name, value in values.items() if name != "e_w"}
            for key, values in saved["state"].items()
        }
        saved = {**saved, "state": {key: values for key, values in state.items() if values}}
        self.base_optimizer.load_state_dict(saved)
        self._share_with_base()

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers wrap `step` in the instance's dict. In a copy, that wrapper would still step this optimizer. State
        # and groups are left out, since a copy takes them from its own base optimizer.
        own = {name: value for name, value in self.__dict__.items() if name != "step"}
        return {**own, "state": None, "param_groups": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A copy shares groups and state with its own base optimizer, not with the original one.
        if "base_optimizer" in state:
            self._share_with_base()
        # Only for torch's setup of step hooks and profiling; everything else is set already.
        super().__setstate__({})

    def _share_with_base(self) -> None:
        # Again after each load, as torch replaces both objects of the base optimizer.
        self.param_groups = self.base_optimizer.param_groups
        self.state = self.base_optimizer.state
        for group in self.param_groups:
            for name, default in self._sam_defaults.items():
                group.setdefault(name, default)

    def _look_twice(self, closure: Callable[..., Any]) -> tuple[Any, bool]:
        """Compute the gradients at the nearby point; return the first loss, and whether both gradients are finite."""
        second = partial(closure, loss_dict={}) if takes_keyword(closure, "loss_dict") else closure
        devices = {parameter.device for group in self.param_groups for parameter in group["params"]}
        draws = Draws(devices, self.algorithms) if self.replay else None
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            return None, False
        parameters = [local_part(p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        # Keep copies, since adding and then subtracting the ascent would leave rounding errors in the weights.
        weights = [parameter.clone() for parameter in parameters]
        try:
            self._ascend()
            self.zero_grad()
            if draws is not None:
                # Another dropout mask would be another function, and `rho` would not measure a distance on one loss
                # surface.
                draws.repeat()
            with torch.enable_grad():
                is_finite = second() is not None
        finally:  # an error in the closure, such as out of memory, must not leave the weights moved
            for moved, kept in _by_kind(zip(parameters, weights, strict=True)):
                torch._foreach_copy_(moved, kept)  # pyright: ignore[reportPrivateImportUsage]  # it has no public name
        return loss, is_finite

    def _ascend(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        norm = joint_norm(gradients)  # over all groups: the paper's step has length rho in the space of all weights
        for group in self.param_groups:
            scale = group["rho"] / (norm + group["epsilon"])
            pairs = [(local_part(p), local_part(p.grad)) for p in group["params"] if p.grad is not None]
            for parameters, steps in _by_kind(pairs):
                # The gradients may be overwritten, since the second call of the closure computes new ones.
                torch._foreach_mul_(steps, scale.to(steps[0].device))  # pyright: ignore[reportPrivateImportUsage]  # it has no public name
                torch._foreach_add_(parameters, steps)  # pyright: ignore[reportPrivateImportUsage]  # it has no public name


def _by_kind(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Group pairs, as torch's multi-tensor functions are fast only if all tensors have one device and dtype."""
    groups: defaultdict[object, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for one, other in pairs:
        ones, others = groups[one.device, one.dtype]
        ones.append(one)
        others.append(other)
    return groups.values()


class SAM(Method):
    """Wrap each optimizer in a `SAMOptimizer`.

    On `BEFORE_LOAD`, or on `AFTER_LOAD` in loops without it, it replaces `state.optimizers` by wrappers. In a two-point
    step, all events from `BEFORE_TRAIN_BATCH` to `AFTER_TRAIN_BATCH` occur twice, and algorithms such as MixUp repeat
    their random draws.

    The training loop must step with a closure. All ranks ascend along the gradient of the whole batch, so that the
    weights do not depend on the world size; in the paper's experiments each rank ascends along the gradient of its own
    part. DeepSpeed is not supported, because its engine steps without a closure.

    Args:
        rho: See `SAMOptimizer`.
        epsilon: See `SAMOptimizer`.
        interval: See `SAMOptimizer`.

    Raises:
        ValueError: If `rho` or `epsilon` is negative, or `interval` less than 1.

    Example:
        >>> SAM(rho=0.5, interval=10)
        SAM(rho=0.5, epsilon=1e-12, interval=10)

    Reference:
        Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR 2021,
        arXiv:2010.01412.
    """

    # The wrapper must exist before its state, with the number of steps in the groups, is loaded. AFTER_LOAD is for
    # loops that do not run BEFORE_LOAD.
    acts_on = frozenset({Event.BEFORE_LOAD, Event.AFTER_LOAD})

    def __init__(self, rho: float = 0.05, epsilon: float = 1.0e-12, interval: int = 1) -> None:
        check_interval("[0, inf)", rho=rho, epsilon=epsilon)
        check_counts(interval=interval)
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval

    def match(self, event: Event, state: State) -> bool:
        """Return whether a checkpoint may be loaded at this event, and an optimizer is not wrapped."""
        is_load = event in (Event.BEFORE_LOAD, Event.AFTER_LOAD)
        return is_load and not all(isinstance(one, SAMOptimizer) for one in state.optimizers)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Wrap the optimizers that are not yet wrapped."""
        if state.deepspeed_enabled:
            raise ValueError(
                f"{self!r} cannot be used under DeepSpeed, whose engine steps without a closure: train with DDP or "
                f"parallelism_config={{'fsdp': {{}}}} instead, or leave SAM out."
            )
        optimizers = list(state.optimizers)
        for i, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, SAMOptimizer):
                optimizers[i] = wrapped = SAMOptimizer(optimizer, self.rho, self.epsilon, self.interval)
                wrapped.algorithms = state.algorithms  # not a copy: algorithms may be added later
        state.optimizers = optimizers


class Draws:
    """Snapshot of the random number generators, to repeat the draws that follow."""

    def __init__(self, devices: Iterable[torch.device], algorithms: Iterable[object]) -> None:
        self._cpu = torch.get_rng_state()
        self._accelerators = [own for device in devices if (own := reproducibility.device_rng(device)) is not None]
        self._algorithms = [one for one in algorithms if isinstance(one, ResumableDraws)]
        self._num_draws = [algorithm._num_draws for algorithm in self._algorithms]

    def repeat(self) -> None:
        torch.set_rng_state(self._cpu)
        for restore, state in self._accelerators:
            restore(state)
        for algorithm, num_draws in zip(self._algorithms, self._num_draws, strict=True):
            algorithm._num_draws = num_draws
