"""Muon: orthogonalized momentum for the hidden matrices of a model, and AdamW for its other parameters."""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as tdist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from composer_dist.agreement import RankDisagreementError, check_agreement
from composer_dist.collectives import cpu_group
from composer_optim._decay import check_group, evaluate
from composer_optim._exchange import Exchange, Stage, is_dtensor, local, stages_of
from composer_optim._orthogonalize import orthogonalize, polynomials
from composer_optim._roles import MUON, check_params, make_groups
from composer_optim.schedulers import as_finite, check_flag

__all__ = ["Muon"]

_SCALES = ("match_rms_adamw", "original", "spectral_unclamped")
_MAX_ELEMENTS = 2**28  # of the matrices that are in memory twice at a time, for each rank that shares them


class Muon(Optimizer):
    """Muon for the hidden matrices of a model, and AdamW for its embeddings, output layer, vectors and scalars.

    The update of a matrix is its momentum with all singular values replaced by values near 1, which a Newton-Schulz
    iteration computes from matrix products. Filters of convolutions are flattened to one row for each output channel.

    The parameter groups have a `role`, `'muon'` or `'adamw'`. Given a model, the roles are those of its modules:
    embeddings, and weights tied to them, the output layer (`get_output_embeddings()`, or else the last `nn.Linear`) and
    everything that is not a matrix or a filter get AdamW. Given parameters, all with two or more dims get Muon, with a
    warning; give groups with a `role` to choose. A vector that module surgery adds to a group of matrices gets AdamW.

    Weights decay by `1 - lr * weight_decay` in each step, as in `torch.optim.AdamW` and `torch.optim.Muon`.

    Sharded parameters (FSDP2, HSDP, tensor parallelism) are supported: the ranks that hold parts of a matrix send them
    to one of these ranks, which returns parts of the update. Every rank must call `step` with gradients of the same
    parameters.

    Args:
        params: The model, or parameters, named parameters, or groups of them, which may have a `role`.
        lr: The learning rate.
        weight_decay: Multiplied by `lr` in each step.
        momentum: Decay rate of the running mean of the gradients of matrices.
        nesterov: Whether to use Nesterov momentum for matrices.
        ns_coefficients: `'jordan'`, `'polar_express'`, three numbers, or three numbers for each step.
        ns_steps: Number of steps of the Newton-Schulz iteration.
        adjust_lr_fn: Factor of the updates of an `m x n` matrix, as in `torch.optim.Muon`: `'match_rms_adamw'` is
            `0.2 * sqrt(max(m, n))` (Moonlight), so that `lr` and `weight_decay` may be those of AdamW; `'original'` is
            `sqrt(max(1, m / n))` (Jordan); `'spectral_unclamped'` is `sqrt(m / n)`.
        normuon_beta2: Decay rate of the running mean of the squares of each row of the update, by which the rows are
            normalized (NorMuon), such as 0.95. `None` not to.
        adamw_lr: The learning rate of AdamW; `lr` if `None`.
        betas: Decay rates of AdamW.
        eps: Added to the denominator of AdamW.
        cautious: Whether only weights that the update makes smaller decay (cautious weight decay).
        cautious_updates: Whether elements of the update of a matrix with `n` elements that increase the loss to first
            order become 0, and the `k` others are multiplied by `n / (k + 1)` (cautious optimizers).
        dtype: Dtype of the iteration. By default float32 on CPUs (float64 for such weights) and bfloat16 on others.
        divide: Whether the ranks of the default process group share the work on matrices that are not sharded, which
            must be the same on all of them, as with DDP. Otherwise each rank orthogonalizes all.
        groups: Options for parameters by name: mappings with `params`, a pattern such as `'*.bias'` or a list of them,
            and options of a group, such as `lr` or `role`. A role takes precedence over that of the module.

    Raises:
        TypeError: If an option has the wrong type, or `groups` is used without names.
        ValueError: If an option is invalid, a pattern matches nothing, or two assignments contradict each other.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10))
        >>> optimizer = Muon(model, lr=1e-3, groups=[{"params": "*.bias", "weight_decay": 0.0}])
        >>> [(group["role"], group["param_names"]) for group in optimizer.param_groups]
        [('muon', ['1.weight']), ('adamw', ['0.weight', '2.weight']), ('adamw', ['1.bias', '2.bias'])]

    Reference:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Amsel et al., "The Polar
        Express", arXiv:2505.16932. Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982. Li et al.,
        "NorMuon", arXiv:2510.05491. Chen et al., "Cautious Weight Decay", arXiv:2510.12402. Liang et al., "Cautious
        Optimizers", arXiv:2411.16085. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498.
    """

    uses_matrix_shapes: ClassVar[bool] = True
    """Needs parameters in their shapes, in groups by role, and supports sharded ones. Strategies read this."""

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "jordan",
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        normuon_beta2: float | None = None,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        cautious: bool = False,
        cautious_updates: bool = False,
        dtype: torch.dtype | str | None = None,
        divide: bool = False,
        groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        check_group({"lr": lr})
        if adamw_lr is not None:
            as_finite("adamw_lr", adamw_lr, least=0)
        # Every group has the options of both roles, since surgery may add vectors to a group of matrices.
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "normuon_beta2": normuon_beta2,
            "adamw_lr_ratio": 1.0 if adamw_lr is None or float(lr) == 0 else adamw_lr / float(lr),
            "betas": betas,
            "eps": eps,
            "cautious": cautious,
            "cautious_updates": cautious_updates,
            "dtype": str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype,
            "divide": divide,
        }
        made = make_groups(params, groups, defaults)
        for group in made:
            if adamw_lr is not None and group["role"] != MUON:
                group.setdefault("lr", adamw_lr)
        super().__init__(made, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Args:
            param_group: `params`, and the options that differ from those of the constructor. Without a `role`, matrices
                are orthogonalized, and AdamW updates the rest.

        Raises:
            TypeError: If an option has the wrong type.
            ValueError: If an option is invalid, or a parameter cannot have the role.
        """
        is_by_hand = "role" in param_group
        super().add_param_group({"role": MUON, **param_group})
        group = self.param_groups[-1]
        try:
            _check_options(group)
            check_params(group["params"], group.get("param_names"), group["role"], is_by_hand=is_by_hand)
        except BaseException:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. Every rank must call this.

        Args:
            closure: Reevaluates the model, calls `backward` and returns the loss.

        Returns:
            The result of `closure`.

        Raises:
            RankDisagreementError: On every rank, if ranks that share work have gradients of different parameters.
            RuntimeError: If a gradient is sparse.
        """
        loss = evaluate(closure)
        layouts = _Layouts()
        chosen = [_choose(group, layouts) for group in self.param_groups]
        self._check_gradients(layouts)
        for group, (vectors, matrices) in zip(self.param_groups, chosen, strict=True):
            if vectors:
                self._step_adamw(vectors, group)
            for stages, params in matrices.items():
                for some in _portions(params, stages):
                    self._step_muon(some, stages, group)
        return loss

    def _check_gradients(self, layouts: "_Layouts") -> None:
        """Raise on all ranks if they have gradients of different matrices, since exchanges would hang or mix these."""
        if not layouts.spans_world:
            return
        world = cpu_group(None)
        mine = torch.tensor([zlib.crc32(bytes(has_gradient for _, has_gradient in layouts.shared))])
        of_ranks = mine.new_empty(tdist.get_world_size())
        tdist.all_gather_into_tensor(of_ranks, mine, group=world)
        if (of_ranks == mine).all():
            return
        names = self._names()
        facts = {
            f"gradient of {names[id(param)]}": "present" if has_gradient else "missing"
            for param, has_gradient in layouts.shared
        }
        try:
            check_agreement(facts)
        except RankDisagreementError as error:
            error.add_note(
                "A parameter has no gradient if the loss of the rank's batch does not depend on it. Add "
                "0 * parameter.sum() to the loss, or give the parameter the role 'adamw'."
            )
            raise

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for g, group in enumerate(self.param_groups):
            known = group.get("param_names") or [f"parameter {i} of group {g}" for i in range(len(group["params"]))]
            names |= {id(param): name for param, name in zip(group["params"], known, strict=True)}
        return names

    def _step_adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if "exp_avg" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        lr, weight_decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        if group["role"] == MUON:  # vectors among matrices
            lr *= group["adamw_lr_ratio"]
        weights, gradients = [local(param) for param in params], _gradients(params)
        means = [local(state["exp_avg"]) for state in states]
        if group["cautious"] and weight_decay:
            # The update has the sign of the mean that includes the new gradient.
            updates = torch._foreach_lerp(means, gradients, 1 - beta1)  # pyright: ignore[reportPrivateImportUsage]
            _decay_cautiously(weights, list(updates), lr * weight_decay)
            weight_decay = 0.0
        adamw(
            weights,
            gradients,
            means,
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=group["eps"],
            maximize=False,
        )

    def _step_muon(self, params: list[Tensor], stages: tuple[Stage, ...], group: dict[str, Any]) -> None:
        for param in params:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        weights, gradients = [local(param) for param in params], _gradients(params)
        means = [local(self.state[param]["momentum_buffer"]) for param in params]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        updates = means
        if group["nesterov"]:
            updates = torch._foreach_lerp(gradients, means, group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        updates = self._orthogonalized(params, list(updates), stages, group)

        lr = float(group["lr"])
        if group["cautious"]:
            _decay_cautiously(weights, updates, lr * group["weight_decay"])
        elif group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        if group["cautious_updates"]:
            updates = _cautious(params, updates, gradients)
        if updates[0].dtype != weights[0].dtype:  # a sum of two dtypes takes a kernel for each matrix
            converted = [torch.empty_like(weight) for weight in weights]
            torch._foreach_copy_(converted, updates)  # pyright: ignore[reportPrivateImportUsage]
            updates = converted
        by_scale: dict[float, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for param, weight, update in zip(params, weights, updates, strict=True):
            some = by_scale[_scale(group["adjust_lr_fn"], param)]
            some[0].append(weight)
            some[1].append(update)
        for scale, (some_weights, some_updates) in by_scale.items():
            torch._foreach_add_(some_weights, some_updates, alpha=-lr * scale)  # pyright: ignore[reportPrivateImportUsage]

    def _orthogonalized(
        self, params: list[Tensor], updates: list[Tensor], stages: tuple[Stage, ...], group: dict[str, Any]
    ) -> list[Tensor]:
        """Return this rank's part of the orthogonalized updates."""
        steps, beta2 = polynomials(group["ns_coefficients"], group["ns_steps"]), group["normuon_beta2"]
        dtype, overwrites = _iteration_dtype(group["dtype"], updates[0]), bool(stages or group["nesterov"])
        if stages:
            updates = [update.to(dtype) for update in updates]  # before they are sent
        if beta2 is None:
            exchange = Exchange(
                stages,
                [param.shape for param in params],
                lambda _, wholes: (orthogonalize(wholes, steps, dtype, overwrites=overwrites), []),
            )
            return exchange.run(updates)[0]
        for param in params:
            if "second_moment" not in self.state[param]:
                # Of the rows of the whole matrix, on every rank. Loading converts state to the parameter's dtype.
                zeros = torch.zeros(param.shape[0], dtype=param.dtype, device=updates[0].device)
                self.state[param]["second_moment"] = zeros
        moments = [self.state[param]["second_moment"] for param in params]

        def compute(positions: list[int], wholes: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            own = [moments[position] for position in positions]

            def normalize(batch: Tensor, chosen: list[int]) -> Tensor:
                return _normalize_rows(batch, chosen, own, beta2)

            return orthogonalize(wholes, steps, dtype, normalize, overwrites=overwrites), own

        exchange = Exchange(stages, [param.shape for param in params], compute, vector_dtype=moments[0].dtype)
        updates, vectors = exchange.run(updates)
        if stages:
            torch._foreach_copy_(moments, vectors)  # pyright: ignore[reportPrivateImportUsage]
        return updates


class _Layouts:
    """The stages of all matrices of a step, and which of those that several ranks share have gradients."""

    def __init__(self) -> None:
        self.shared: list[tuple[Tensor, bool]] = []
        self.spans_world = False
        self._known: dict[Any, tuple[Stage, ...]] = {}

    def add(self, param: Tensor, *, is_divided: bool) -> tuple[Stage, ...]:
        key: Any = is_divided
        if is_dtensor(param):
            key = (id(param.device_mesh), param.placements)  # pyright: ignore[reportAttributeAccessIssue]
        if key not in self._known:
            self._known[key] = stages_of(param, is_divided=is_divided)
        stages = self._known[key]
        if stages:
            self.shared.append((param, param.grad is not None))
            # Otherwise other ranks have other parameters, as with pipeline parallelism.
            self.spans_world |= math.prod(stage.size for stage in stages) == tdist.get_world_size()
        return stages


_Matrices = dict[tuple[Stage, ...], list[Tensor]]


def _choose(group: dict[str, Any], layouts: _Layouts) -> tuple[list[Tensor], _Matrices]:
    """Return the parameters of a group that have gradients: vectors, and matrices by their stages."""
    vectors: list[Tensor] = []
    matrices: _Matrices = defaultdict(list)
    for param in group["params"]:
        is_matrix = group["role"] == MUON and param.ndim >= 2
        stages = layouts.add(param, is_divided=group["divide"]) if is_matrix else ()
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            raise RuntimeError(
                "Muon got a sparse gradient, which it has no kernels for. Make the layer dense, such as "
                "Embedding(sparse=False), or give its weights to torch.optim.SparseAdam."
            )
        if is_matrix:
            matrices[stages].append(param)
        else:
            vectors.append(param)
    return vectors, matrices


def _portions(params: list[Tensor], stages: Sequence[Stage]) -> Iterable[list[Tensor]]:
    """Divide the matrices so that little memory is needed at a time; equal shapes stay together."""
    limit, size = _MAX_ELEMENTS * math.prod(stage.size for stage in stages), 0
    portion: list[Tensor] = []
    for param in sorted(params, key=lambda param: param.shape):
        if portion and size + param.numel() > limit:
            yield portion
            portion, size = [], 0
        portion.append(param)
        size += param.numel()
    yield portion


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each gradient, placed like its parameter."""
    gradients: list[Tensor] = []
    for param in params:
        gradient: Any = param.grad
        if is_dtensor(gradient) and gradient.placements != param.placements:  # pyright: ignore[reportAttributeAccessIssue]
            gradient = gradient.redistribute(placements=param.placements)  # pyright: ignore[reportAttributeAccessIssue]
        gradients.append(local(gradient))
    return gradients


def _iteration_dtype(name: str | None, weight: Tensor) -> torch.dtype:
    if name is not None:
        return getattr(torch, name)
    # CPUs without units for bfloat16 emulate it; GPUs are many times faster in it.
    return torch.promote_types(weight.dtype, torch.float32) if weight.device.type == "cpu" else torch.bfloat16


def _scale(kind: str, param: Tensor) -> float:
    rows, columns = param.shape[0], param.numel() // max(1, param.shape[0])
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / max(1, columns)
    return math.sqrt(max(1.0, ratio) if kind == "original" else ratio)


def _decay_cautiously(weights: list[Tensor], updates: list[Tensor], rate: float) -> None:
    """Shrink the weights of which the update has the same sign."""
    for weight, update in zip(weights, updates, strict=True):
        weight.sub_(weight * (weight * update >= 0), alpha=rate)


def _cautious(params: list[Tensor], updates: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Keep the elements of the updates that have the signs of the gradients, and scale them by their number."""
    agree = [update * gradient > 0 for update, gradient in zip(updates, gradients, strict=True)]
    counts = torch.stack([each.sum() for each in agree])
    first: Any = params[0]  # the others are sharded alike
    if is_dtensor(first):
        for dim, placement in enumerate(first.placements):
            if not placement.is_replicate():  # also strided shards
                tdist.all_reduce(counts, group=first.device_mesh.get_group(dim))
    scales = [param.numel() / (count + 1) for param, count in zip(params, counts, strict=True)]
    return [update * each * scale for update, each, scale in zip(updates, agree, scales, strict=True)]


def _normalize_rows(batch: Tensor, chosen: list[int], moments: list[Tensor], beta2: float) -> Tensor:
    """Divide each row by the root of the running mean of its squares, keeping the norm of an orthogonal matrix."""
    (rows, columns), dtype = batch.shape[1:], batch.dtype
    batch = batch.to(torch.promote_types(dtype, torch.float32))
    moment = torch.stack([moments[position] for position in chosen]).to(batch.dtype)
    moment.lerp_(batch.square().mean(-1), 1 - beta2)
    for position, each in zip(chosen, moment, strict=True):
        moments[position].copy_(each)
    batch = batch / (moment.sqrt() + 1e-8).unsqueeze(-1)
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True)
    return (batch * (math.sqrt(min(rows, columns)) / norm.clamp(min=1e-8))).to(dtype)


def _check_options(group: dict[str, Any]) -> None:
    # Without momentum, Nesterov momentum changes nothing, and is therefore no error.
    check_group({name: value for name, value in group.items() if name != "nesterov"})
    beta2, dtype = group["normuon_beta2"], group["dtype"]
    for name, value in (("momentum", group["momentum"]), ("normuon_beta2", beta2)):
        if value is not None and not 0 <= as_finite(name, value) < 1:
            raise ValueError(f"{name}={value!r} must be 0 or more and less than 1.")
    for name in ("nesterov", "cautious", "cautious_updates", "divide"):
        check_flag(name, group[name])
    steps = group["ns_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"ns_steps={steps!r} must be a whole number from 1 to 99. 5 is usual.")
    polynomials(group["ns_coefficients"], steps)
    if group["adjust_lr_fn"] not in _SCALES:
        raise ValueError(f"adjust_lr_fn={group['adjust_lr_fn']!r} must be one of {list(_SCALES)}.")
    if group["role"] not in ("muon", "adamw"):
        raise ValueError(f"role={group['role']!r} must be 'muon' or 'adamw'.")
    if dtype is not None and not getattr(getattr(torch, str(dtype), None), "is_floating_point", False):
        raise ValueError(f"dtype={dtype!r} must be a floating point dtype, such as torch.bfloat16, or None.")
