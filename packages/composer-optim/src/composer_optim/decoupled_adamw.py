"""AdamW with weight decay that does not depend on the choice of the learning rate."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as tdist
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from composer_dist import dist
from composer_optim._decay import Decoupled, check_group, decay_rate, evaluate, fit_for_fused, get_initial_lr, shrink

__all__ = ["DecoupledAdamW"]

_NORM = "l2_norm"
_CHANGES = ("cautious_updates", "clip_updates")
_OPTIONS = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "capturable")


def _norm(tensor: Any) -> Tensor:
    return torch.linalg.vector_norm(_local(tensor))


def last_update(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Return the decrease of this rank's part of `param` by the last step, computed with the current `lr`."""
    beta1, beta2 = group["betas"]
    second_moment = _local(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
    denominator = second_moment.sqrt() / (1 - beta2 ** state["step"]).sqrt() + group["eps"]
    adam = _local(state["exp_avg"]) / denominator * (group["lr"] / (1 - beta1 ** state["step"]))
    if param.grad is not None and any(group[name] for name in _CHANGES):
        adam *= _local(_update_factor(param.grad, state, group))
    # p_new = (1 - rate) * p_old - adam, solved for p_old - p_new without subtracting nearly equal numbers.
    rate = decay_rate(group["lr"], get_initial_lr(group), group["weight_decay"])
    return (adam + rate * _local(param)) / (1 - rate)


def _update_factor(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Return the factor of Adam's update, of its shape or a scalar, from the moments after the step."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    factor: Any = 1.0
    if group["clip_updates"]:
        dtype = torch.promote_types(square.dtype, torch.float32)
        unbiased = square.to(dtype) / (1 - group["betas"][1] ** state["step"])
        ratios = grad.to(dtype).square().div_(unbiased.clamp_(min=group["eps"] ** 2))
        # The update of a skipped step is 0, but its gradient may be NaN.
        factor = ratios.mean().sqrt().clamp(min=1).reciprocal().nan_to_num(0.0)
    if group["cautious_updates"]:
        agrees = mean * grad < 0 if group["maximize"] else mean * grad > 0
        # Of a sharded tensor, this counts elements of the whole tensor.
        factor = agrees * (factor * agrees.numel() / (agrees.sum() + 1))
    return factor.to(mean.dtype)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as real numbers and detached."""
    part = tensor.detach()
    to_local = getattr(part, "to_local", None)  # by name, because DTensor is slow to import
    if to_local is not None:
        part = to_local()
    return torch.view_as_real(part) if part.is_complex() else part


def _is_captured() -> bool:
    is_safe = torch.compiler.is_compiling() or not torch.cuda.is_initialized()
    return not is_safe and torch.cuda.is_current_stream_capturing()


class DecoupledAdamW(Decoupled, AdamW):
    """AdamW with weight decay that does not depend on the choice of the learning rate.

    Each step multiplies the weights by `1 - (lr / initial_lr) * weight_decay` and then performs the step of
    `torch.optim.Adam` without weight decay, which equals `torch.optim.AdamW` with a weight decay of
    `weight_decay / initial_lr`. `initial_lr` is the initial learning rate of a parameter group and is stored in the
    group. If it is 0, `lr / initial_lr` counts as 1.

    Two options change Adam's update `u` of a parameter with `n` elements and gradient `g`, but not the weight decay:

    - `cautious_updates`: elements of `u` that increase the loss to first order become 0, and the `k` others are
      multiplied by `n / (k + 1)`.
    - `clip_updates`: `u` is divided by `max(1, RMS)`, where `RMS` is the root of the mean of `g^2 / v` and `v` the
      running mean of squares that includes `g`. Updates stay small if gradients suddenly grow, as in StableAdamW.

    Both need memory for one more copy of the weights during the step.

    Args:
        params: Parameters, named parameters, or groups of them.
        lr: The learning rate.
        betas: Decay rates of the running means of the gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Fraction of the weights that a step at the initial learning rate removes.
        amsgrad: Whether to use the AMSGrad variant, in which the denominator never decreases.
        maximize: Whether to maximize the objective instead of minimizing it.
        foreach: Whether to use multi-tensor kernels; by default PyTorch decides, where steps are not fused.
        capturable: Whether steps can be captured in a CUDA graph.
        fused: Whether to use the fused kernel. By default it steps groups whose weights are all on a GPU when the step
            begins, unless `foreach` is set.
        cautious_updates: Whether to update only elements whose update has the direction of the gradient.
        clip_updates: Whether to reduce updates of parameters whose gradients are larger than their running mean.

    Raises:
        TypeError: If an option, also of a parameter group, has the wrong type.
        ValueError: If a number is NaN, infinite, or out of its range, or a parameter is complex and these options are
            used.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)

    Reference:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, arXiv:1711.05101, algorithm 2. Liang
        et al., "Cautious Optimizers", arXiv:2411.16085. Wortsman et al., "Stable and low-precision
        training for large-scale vision-language models", NeurIPS 2023, arXiv:2304.13013.
    """

    metric_functions: ClassVar[dict[str, Callable[[Tensor, dict[str, Any], Tensor], Tensor]]] = {
        f"{_NORM}/moment": lambda param, optim_state, step_tensor: _norm(optim_state["exp_avg"]),
        f"{_NORM}/param": lambda param, optim_state, step_tensor: _norm(param),
        f"{_NORM}/update": lambda param, optim_state, step_tensor: _norm(step_tensor),
        f"{_NORM}/grad": lambda param, optim_state, step_tensor: _norm(param.grad),
    }

    _fuses_shards = True

    # Group index and position of each parameter by id, as of the last search.
    _places: Mapping[int, tuple[int, int]] = MappingProxyType({})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        # As in Composer and common for language models; the default of torch's AdamW is (0.9, 0.999).
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        cautious_updates: bool = False,
        clip_updates: bool = False,
    ) -> None:
        check_group({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._changes = {"cautious_updates": cautious_updates, "clip_updates": clip_updates}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )
        self._warn_of_large_decay()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see `DecoupledSGDW.add_param_group`."""
        # The constructor of AdamW, which makes the defaults, adds the first groups.
        self.defaults |= vars(self).pop("_changes", {})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(group[name] for name in _CHANGES) and any(param.is_complex() for param in group["params"]):
            self.param_groups.pop()
            raise ValueError("cautious_updates and clip_updates must be False for complex parameters.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        defaults: dict[str, Any] = vars(self)["defaults"]
        for group in self.param_groups:  # of a torch.optim.AdamW, or saved by an earlier release
            for name in _CHANGES:
                group.setdefault(name, defaults.get(name, False))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step.

        Args:
            closure: Reevaluates the model, calls `backward` and returns the loss.

        Returns:
            The result of `closure`.

        Raises:
            RuntimeError: If a gradient is sparse, or the step is captured in a CUDA graph without `capturable`.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            if not group["capturable"] and _is_captured():
                # The count of steps is on the host, and would not increase when the graph is replayed.
                raise RuntimeError(
                    "capturable=False, but the step is captured in a CUDA graph, which would repeat the bias "
                    "correction of this step in every replay. Make the optimizer with capturable=True."
                )
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        grads: list[Any] = [param.grad for param in params]
        fused = self._uses_fused(group)
        states = [self._initialized_state(param, group, fused=fused) for param in params]
        if fused:
            grads = fit_for_fused(params, grads, states)
        lists = (
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
        )
        options: dict[str, Any] = {name: group[name] for name in _OPTIONS}
        # `fused=False` would also keep PyTorch from choosing foreach.
        options |= {"initial_lr": get_initial_lr(group), "fused": fused or group["fused"]}
        options |= {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        options["beta1"], options["beta2"] = group["betas"]
        if any(group[name] for name in _CHANGES):
            self._step_with_changes(group, params, states, lists, options)
        else:
            self.adamw(params, *lists, **options)

    def _step_with_changes(
        self, group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]], lists: Any, options: Any
    ) -> None:
        shrink(params, decay_rate(group["lr"], options["initial_lr"], group["weight_decay"]), options["found_inf"])
        # From weights of 0, every kernel computes the update itself, not rounded to multiples of the weights' eps.
        updates = [torch.zeros_like(param) for param in params]
        self.adamw(updates, *lists, **{**options, "weight_decay": 0.0})
        for param, update, grad, state in zip(params, updates, lists[0], states, strict=True):
            param.addcmul_(update, _update_factor(grad, state, group))

    @staticmethod
    def adamw(
        params: list[Tensor],
        *tensors: Any,
        lr: float | Tensor,
        initial_lr: float,
        weight_decay: float,
        maximize: bool = False,
        found_inf: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Perform one step on lists of tensors, in place.

        Args:
            params: The weights.
            *tensors: `grads`, `exp_avgs`, `exp_avg_sqs`, `max_exp_avg_sqs` (empty without `amsgrad`), `state_steps`, as
                for PyTorch's function `adamw`.
            lr: The current learning rate.
            initial_lr: The initial learning rate.
            weight_decay: As for the class.
            maximize: As for the class.
            found_inf: Not 0 to skip the step, because a gradient is not finite; only with `fused`.
            **options: Other options of PyTorch's function, such as `beta1`.
        """
        # Left to PyTorch's kernel where possible, since `shrink` is another pass over the weights.
        if initial_lr == 0:  # cannot be divided by, so the decay is applied here
            shrink(params, decay_rate(lr, initial_lr, weight_decay), found_inf)
            weight_decay = 0.0
        elif weight_decay != 0:
            weight_decay /= initial_lr  # PyTorch multiplies it by `lr`
        has_complex = any(torch.is_complex(param) for param in params)
        options |= {"lr": lr, "weight_decay": weight_decay, "maximize": maximize, "found_inf": found_inf}
        adamw(params, *tensors, has_complex=has_complex, **options)

    def report_per_parameter_metrics(
        self, param: Tensor, name: str, optimizer_metrics: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add the norms of a parameter, its gradient, its momentum and its last update on this rank.

        They stay on the parameter's device. The last update is computed with the current learning rate. A parameter
        without a gradient, or that was never stepped, adds nothing.

        Args:
            param: A parameter of this optimizer.
            name: Its name in the metrics.
            optimizer_metrics: Changed in place: gets a `"<metric>/<name>"` for each of `metric_functions`.

        Returns:
            `optimizer_metrics`.
        """
        state = self.state.get(param)
        if param.grad is None or not state:
            return optimizer_metrics
        update = last_update(param, state, self._group_of(param))
        for metric, function in self.metric_functions.items():
            optimizer_metrics[f"{metric}/{name}"] = function(param, state, update)
        return optimizer_metrics

    @staticmethod
    def pre_reduce_metrics(optimizer_metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Square the norms, in place, so that norms of shards on different ranks can be added.

        Args:
            optimizer_metrics: Metrics from `report_per_parameter_metrics`.

        Returns:
            `optimizer_metrics`.
        """
        for name in optimizer_metrics:
            if name.startswith(_NORM):
                optimizer_metrics[name] = optimizer_metrics[name] ** 2
        return optimizer_metrics

    @staticmethod
    def dist_reduce_metrics(optimizer_metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the norms of the whole tensors from the squared norms of all ranks, in place.

        Every rank must call this. It is meant for parameters that are sharded over the ranks; without a process group
        there is one rank. Other metrics are averaged over the ranks that have them.

        Args:
            optimizer_metrics: The result of `pre_reduce_metrics`. Gets the keys of all ranks.

        Returns:
            `optimizer_metrics`.
        """
        # Gathered first: ranks may have different metrics, and all_reduce needs tensors of equal size on all ranks.
        names_by_rank = dist.all_gather_object(sorted(optimizer_metrics))
        if dist.is_initialized():
            names = sorted(set().union(*names_by_rank))
            if not names:
                return optimizer_metrics
            held = next(iter(optimizer_metrics.values()), None)
            device = torch.device("cpu") if held is None else held.device
            accelerator = torch.accelerator.current_accelerator()
            if held is None and accelerator is not None and tdist.get_backend() != "gloo":
                device = accelerator
            zero = torch.zeros((), device=device)
            # One collective for all metrics; ranks without a metric contribute 0.
            sums = torch.stack([optimizer_metrics.get(name, zero).to(device, torch.float32) for name in names])
            tdist.all_reduce(sums)
            optimizer_metrics.update(zip(names, sums.unbind(), strict=True))
        for name, value in optimizer_metrics.items():
            if name.startswith(_NORM):
                optimizer_metrics[name] = value.sqrt()
            else:
                optimizer_metrics[name] = value / sum(name in names for names in names_by_rank)
        return optimizer_metrics

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        """Return the group of a parameter; one search serves all parameters while the groups stay the same."""
        index, position = self._places.get(id(param), (0, 0))
        # Groups may be replaced or changed from outside, so a stored position is checked.
        there = [each for group in self.param_groups[index : index + 1] for each in group["params"][position:][:1]]
        if not there or there[0] is not param:
            self._places = {
                id(each): (index, position)
                for index, group in enumerate(self.param_groups)
                for position, each in enumerate(group["params"])
            }
            index, _ = self._places[id(param)]
        return self.param_groups[index]

    def _initialized_state(self, param: Tensor, group: dict[str, Any], *, fused: bool) -> dict[str, Any]:
        """Return the state of a parameter, created at its first step."""
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError(
                "DecoupledAdamW got a sparse gradient, which it has no kernels for. Make the layer dense, such as "
                "Embedding(sparse=False), or give its weights to torch.optim.SparseAdam."
            )
        state = self.state[param]
        if not state:
            # PyTorch's kernels read the step count on the host, unless they are fused or capturable.
            # Entries and names are those of torch's AdamW, so that each loads the state dicts of the other.
            on_device = group["capturable"] or fused
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state
