"""DeepSpeed: an engine that owns model, gradients and optimizer, and shards them over the ranks (ZeRO)."""

import atexit
import copy
import difflib
import importlib
import inspect
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as tdist
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from composer_dist import deepspeed_state
from composer_dist.ddp import average_values, sum_counts
from composer_dist.deepspeed_state import find_in_optimizer
from composer_dist.devices import Device, DeviceCPU, Precision, map_tensors
from composer_dist.initialize import initialize_dist
from composer_dist.strategy import TNumber

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["DeepSpeed", "check_deepspeed_fits", "parse_deepspeed_config", "UnusedParameters"]


class DeepSpeed:
    """Data parallel training with DeepSpeed's engine, which shards state that every rank would otherwise hold (ZeRO).

    Stage 0 shards nothing, 1 the optimizer's state, 2 also gradients, 3 also weights. Every batch has the weight that
    it has on a single device, even if it is split into fewer or less even microbatches than configured: the loop weighs
    each microbatch's loss and marks the last one. The engine itself clips gradients, scales losses in float16 and drops
    the gradients after a step.

    Args:
        device: This rank's device.
        config: The result of `parse_deepspeed_config`. It is copied.
        find_unused_parameters: Whether some parameters may have no gradient in some steps. They then keep their values,
            as under `DDP`; otherwise momentum and weight decay change them. At stages 1 and 2 every rank must use the
            same parameters. No effect at stage 3.

    Raises:
        ImportError: If the package `deepspeed` is not installed.
        ValueError: If float16 is requested on a CPU.

    Reference:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
        arXiv:1910.02054.
    """

    has_own_precision = True
    prepares_before_load = True

    def __init__(self, device: Device, config: Mapping[str, Any], *, find_unused_parameters: bool = False) -> None:
        if find_spec("deepspeed") is None:  # an import would take a second
            raise ImportError(
                "deepspeed_config was given, but the package 'deepspeed' is not installed. It comes with the extra "
                "'deepspeed': run `pip install 'composer-dist[deepspeed]'`.",
                name="deepspeed",
            )
        if isinstance(device, DeviceCPU) and config.get("fp16", {}).get("enabled", False):
            raise ValueError(
                f"deepspeed_config['fp16']={config['fp16']!r}: DeepSpeed does not train in float16 on a CPU. Use "
                "precision='amp_bf16' (section 'bf16') or 'fp32' there."
            )
        self.device = device
        # DeepSpeed 0.19 defaults to 1.0, which would clip gradients that no other strategy clips.
        self._config: dict[str, Any] = {"gradient_clipping": 0.0, **copy.deepcopy(dict(config))}
        self.find_unused_parameters = find_unused_parameters
        self._engine: Any = None
        self._parameters: deepspeed_state.ParameterGroups = []
        self._unused: UnusedParameters | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks that gradients are averaged over."""
        return tdist.get_world_size()

    @property
    def meets_in_forward(self) -> bool:
        """Return whether each forward pass gathers the weights of its layers: at stage 3."""
        return self._config.get("zero_optimization", {}).get("stage", 0) == 3

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine that `prepare` creates.

        Raises:
            RuntimeError: Before `prepare`.
        """
        if self._engine is None:
            raise RuntimeError("there is no DeepSpeed engine yet. Call prepare(model, [optimizer]) first.")
        return self._engine

    def place(self, model: "Module", optimizers: Sequence[Optimizer]) -> None:
        """Leave the model where it is: the engine moves only this rank's part of it."""

    def prepare(self, model: "Module", optimizers: Sequence[Optimizer]) -> "tuple[Module, Sequence[Optimizer]]":
        """Return the engine in place of the model, and the engine's optimizer. Every rank must call this.

        The engine moves the model to the device, converts it to the precision, in place, and broadcasts the weights of
        rank 0. Its optimizer shares its `param_groups` with the one that it wraps, so a scheduler of either changes
        both.

        Raises:
            ValueError: Unless there is exactly one optimizer, which does not evaluate the loss itself and does not need
                shapes of parameters that the engine flattens.
        """
        optimizer = _the_one(optimizers)
        stage = self._config.get("zero_optimization", {}).get("stage", 0)
        half = [name for name in ("fp16", "bf16") if self._config.get(name, {}).get("enabled", False)]
        if (stage or half) and getattr(optimizer, "uses_matrix_shapes", False):
            raise ValueError(
                f"{type(optimizer).__name__} needs the parameters as matrices, and DeepSpeed gives the optimizer flat "
                f"parts of all of them (ZeRO stage {stage}{f', {half[0]}' if half else ''}). Train with "
                "parallelism_config={'fsdp2': {}} instead of DeepSpeed, or use AdamW."
            )
        deepspeed = _start(self.device)
        # Recorded now, since the engine flattens the parameters.
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        logging.getLogger("DeepSpeed").addFilter(_is_not_advice)  # the same filter is added only once
        self._engine, wrapped, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=copy.deepcopy(self._config)
        )
        deepspeed_state.forget_trial_step(self._engine)
        if self.find_unused_parameters and not self.meets_in_forward:
            self._unused = UnusedParameters(self._engine, [each for group in self._parameters for each in group])
        _destroy_group_at_exit()
        return self._engine, [wrapped]

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch with its float32 tensors in the engine's dtype."""
        dtype = self.engine.get_data_types()[0]
        if dtype is torch.float32:
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor)

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return the context manager for the forward and backward pass of one microbatch.

        Raises:
            ValueError: If `sync` is false, since the engine shards gradients, or if the ranks have different numbers of
                microbatches.
        """
        if not is_aligned:
            raise ValueError(
                "the ranks split this batch into different numbers of microbatches, but DeepSpeed's engine has "
                "collectives in each. Give every rank's dataloader batches of the same size (drop_last=True), or train "
                "with DDP."
            )
        if not sync:
            raise ValueError(
                "sync=False asks for gradients that differ between the ranks, but DeepSpeed's engine shards their "
                "mean. Use DDP for methods that need them, such as SAM."
            )
        return self._microbatch(is_last)

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(is_last)  # overrides the count of the configuration
        yield
        if not is_last:
            self.engine.step()  # does not update weights; the engine counts microbatches

    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> AbstractContextManager[Any]:
        """Raise: the engine counts the microbatches of a step and cannot return to its start.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "DeepSpeed's engine cannot repeat a step with smaller microbatches, since its configuration fixes their "
            "size. Give the size of a microbatch as a number, or train with DDP or FSDP."
        )

    def backward(self, loss: torch.Tensor, *, create_graph: bool = False) -> None:
        """Accumulate the gradients of a loss that already has its weight within the batch.

        Raises:
            ValueError: If `create_graph` is true.
        """
        if create_graph:
            raise ValueError(
                "create_graph=True keeps the graph of the gradients, which DeepSpeed's engine does not support. Leave "
                "out the algorithm that needs it (its backwards_create_graph is True), or train without DeepSpeed."
            )
        # The loss has its weight already, so the engine must not divide by its number of microbatches.
        self.engine.backward(loss, scale_wrt_gas=False)

    def has_finite_gradients(self) -> bool:
        """Return whether a batch's gradients are finite, before its step. Every rank must call this.

        It gathers the full gradients one at a time, which is slow.
        """
        get = _start(self.device).utils.safe_get_full_grad
        parameters = (parameter for group in self._parameters for parameter in group if parameter.requires_grad)
        gradients = (get(parameter) for parameter in parameters)
        # A list instead of `any` on a generator: every rank must reach the collective of each gradient.
        bad = [gradient is not None and not bool(torch.isfinite(gradient).all()) for gradient in gradients]
        return not any(bad)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Raise: the engine clips inside its step, by the configuration's `gradient_clipping`.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"clip_grad_norm(max_norm={max_norm!r}) cannot reach the gradients, which DeepSpeed's engine shards. Set "
            "deepspeed_config['gradient_clipping'], and the engine clips them in its step."
        )

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Take the engine's optimizer step, which also drops the gradients; a closure is called once, before.

        Raises:
            ValueError: If a scaler is given, since the engine scales losses itself.
        """
        if scaler is not None:
            raise ValueError("scaler was given, but DeepSpeed's engine scales losses itself. Leave the scaler out.")
        result = None if closure is None else closure()
        if self._unused is None:
            self.engine.step()
        else:
            self._unused.begin_step()
            self.engine.step()
            self._unused.end_step()
        return result

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Do nothing: the engine drops the gradients in each step."""

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return the sum over all ranks of each of a few counts below 2**53. Every rank must call this."""
        return sum_counts(values)

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean of each value over all ranks, without a device synchronization. Every rank must call this."""
        return average_values(values)

    def model_state_dict(self, model: "Module") -> dict[str, Any]:
        """Return the full weights, in float32 if the engine keeps such a copy. Every rank must call this.

        At stage 3 they are gathered one after the other and copied to the host.
        """
        return deepspeed_state.gather_weights(self.engine)

    def load_model_state_dict(
        self, model: "Module", state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load full weights, in place, and return the missing and the unexpected names.

        Every rank must call this with the same weights.
        """
        return deepspeed_state.scatter_weights(self.engine, state_dict, strict=strict)

    def parameter_names(self, model: "Module") -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups, in their original order."""
        names = {id(parameter): name for name, parameter in self.engine.module.named_parameters()}
        return [[names.get(id(parameter), "") for parameter in group] for group in self._parameters]

    def optimizer_state_dict(self, model: "Module", optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state as the optimizer before `prepare` would have it. Every rank must call this."""
        return deepspeed_state.gather_optimizer(self.engine, self._parameters)

    def load_optimizer_state_dict(self, model: "Module", optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load such a full state, in place. Every rank must call this with the same state."""
        deepspeed_state.scatter_optimizer(self.engine, self._parameters, state_dict)


def _the_one(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return the only optimizer; raise if there are several, or if it evaluates the loss itself."""
    if len(optimizers) != 1:
        raise ValueError(
            f"{len(optimizers)} optimizers were given, and DeepSpeed's engine takes exactly one. Give one optimizer "
            "with several parameter groups instead."
        )
    # A closure without a default, as in LBFGS, means that step() evaluates the loss.
    step = inspect.signature(type(optimizers[0]).step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizers[0]).__name__} evaluates the loss itself, several times in a step, which DeepSpeed's "
            "engine cannot do. Choose an optimizer whose step() needs no closure, or train without DeepSpeed."
        )
    return optimizers[0]


def _start(device: Device) -> Any:
    """Import DeepSpeed and connect it to the existing process group."""
    if isinstance(device, DeviceCPU):
        # DeepSpeed reads this when it is imported, and would choose a GPU if the machine has one.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed: Any = importlib.import_module("deepspeed")  # takes a second, so only where it is used
    if isinstance(device, DeviceCPU):
        # A CPU collective for inference that it would compile here, which takes a minute and a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    initialize_dist(device)  # first, so that DeepSpeed does not create a group of its own
    deepspeed.init_distributed(dist_backend=device.dist_backend or "gloo", verbose=False)
    return deepspeed


def _is_not_advice(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()  # which the configuration has allowed


@cache  # registers the function once, however many engines there are
def _destroy_group_at_exit() -> None:
    """Destroy the process group at exit, even if DeepSpeed did not create it: runs on a CPU hang or abort otherwise."""
    atexit.register(lambda: tdist.destroy_process_group() if tdist.is_initialized() else None)


# https://www.deepspeed.ai/docs/config-json/; used only to find misspelled names, so that newer names still pass.
_KNOWN_KEYS = """
    activation_checkpointing aio amp autotuning bf16 check_grad_overflow checkpoint comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    disable_allgather dump_state elasticity flops_profiler fp16 gradient_accumulation_steps gradient_clipping
    gradient_predivide_factor hybrid_engine memory_breakdown monitor_config pipeline prescale_gradients
    seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard
    torch_autocast train_batch_size train_micro_batch_size_per_gpu wall_clock_breakdown wandb
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_PRECISION_SECTIONS = {"fp16": Precision.AMP_FP16, "bf16": Precision.AMP_BF16, "amp": Precision.AMP_FP16}
_TO_FILL = "auto"  # the placeholder in configurations written for other trainers


def check_deepspeed_fits(
    *, parallelism_config: object, has_train_dataloader: bool, callbacks: Iterable[object] = ()
) -> None:
    """Validate that nothing else contradicts a DeepSpeed configuration."""
    if parallelism_config is not None:
        raise ValueError(
            "deepspeed_config and parallelism_config (or fsdp_config) were both given, and both configure the sharding "
            "of the model. Leave one of them out."
        )
    if not has_train_dataloader:
        raise ValueError(
            "deepspeed_config needs the train_dataloader when the Trainer is constructed, since DeepSpeed's batch "
            "sizes are inferred from it. Pass train_dataloader to the constructor and not to fit()."
        )
    readers = [type(callback).__name__ for callback in callbacks if getattr(callback, "reads_gradients", False)]
    if readers:
        raise ValueError(
            f"the callback {readers[0]} cannot be used with deepspeed_config: DeepSpeed's engine owns the gradients "
            "and drops them before the callback can read them. Leave the callback out."
        )


def parse_deepspeed_config(
    config: Mapping[str, Any],
    *,
    batch_size: int | None,
    microbatch_size: int | float | str | None,
    world_size: int,
    precision: str | Precision,
    clip: tuple[str, float] | None = None,
) -> dict[str, Any]:
    """Return a copy of a DeepSpeed configuration with the values that follow from the run filled in.

    Args:
        config: As DeepSpeed documents it. Missing keys and `'auto'`, for a batch size or the clipping, are filled in.
        batch_size: Batch size of the training dataloader on each rank; `None` if the dataloader has no such attribute.
        microbatch_size: Number of samples per forward pass; `None` for the whole batch.
        world_size: Number of ranks.
        precision: Precision of the run.
        clip: Type and threshold of the run's gradient clipping.

    Returns:
        A configuration with `train_batch_size`, `train_micro_batch_size_per_gpu`, `gradient_accumulation_steps`,
        `zero_allow_untested_optimizer` and, where they apply, a section for the precision and `gradient_clipping`.

    Raises:
        ValueError: If the configuration contradicts the run, if it has a section for the optimizer or the scheduler,
            if a name is misspelled, or if the microbatch size does not divide the batch size.
        RuntimeError: If the dataloader's batch size is unknown.
        NotImplementedError: If gradient clipping is of another type than `'norm'`.

    Example:
        >>> config = parse_deepspeed_config({}, batch_size=8, microbatch_size=2, world_size=4, precision="fp32")
        >>> config["train_batch_size"], config["gradient_accumulation_steps"]
        (32, 4)
    """
    parsed: dict[str, Any] = copy.deepcopy(dict(config))
    _refuse_names(parsed)
    _fill_batch_sizes(parsed, batch_size, microbatch_size, world_size)
    _fill_precision(parsed, Precision(precision))
    if parsed.get("zero_allow_untested_optimizer") is False:
        warnings.warn(
            "deepspeed_config['zero_allow_untested_optimizer']=False was set to True: the Trainer's optimizers are "
            "not among those that DeepSpeed lists as tested. Leave the key out.",
            UserWarning,
            stacklevel=2,
        )
    parsed["zero_allow_untested_optimizer"] = True  # DeepSpeed accepts the Trainer's optimizer only with this key
    if clip is not None:
        _fill_clipping(parsed, *clip)
    elif parsed.get("gradient_clipping") == _TO_FILL:
        del parsed["gradient_clipping"]  # `DeepSpeed` then sets 0.0, which clips nothing
    return parsed


def _refuse_names(config: Mapping[str, Any]) -> None:
    for section, argument in (("optimizer", "optimizers"), ("scheduler", "schedulers")):
        if section in config:
            raise ValueError(
                f"deepspeed_config has a section {section!r}: {config[section]!r}. The Trainer passes its own to "
                f"DeepSpeed. Leave the section out, and pass {argument}= to the Trainer."
            )
    known = _KNOWN_KEYS.split()
    for name in config:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.85)
        if name not in known and near:  # an unknown name without a near match may be a new one
            raise ValueError(
                f"deepspeed_config has {name!r}, which DeepSpeed does not know. Did you mean {' or '.join(near)}?"
            )


def _fill_batch_sizes(
    config: dict[str, Any], batch_size: int | None, microbatch_size: int | float | str | None, world_size: int
) -> None:
    total = config.get("train_batch_size", _TO_FILL)
    # The configuration may give the batch size that the dataloader lacks.
    if batch_size is None and total != _TO_FILL and total % world_size == 0:
        batch_size = total // world_size
    if batch_size is None:
        raise RuntimeError(
            f"deepspeed_config needs the train_dataloader's batch size, and neither the dataloader nor its "
            f"batch_sampler has an attribute batch_size. Give deepspeed_config['train_batch_size'], the number of "
            f"samples on all {world_size} ranks together, got {total!r}; or use a torch DataLoader."
        )
    if isinstance(microbatch_size, str):  # "auto" changes the size during training
        raise ValueError(
            f"device_train_microbatch_size={microbatch_size!r} (or grad_accum) cannot be used with deepspeed_config: "
            "DeepSpeed has to know the size before it starts. Set it to a number of samples that divides the batch "
            f"size of {batch_size}."
        )
    microbatch_size = batch_size if microbatch_size is None else microbatch_size
    if microbatch_size <= 0 or batch_size % microbatch_size:
        raise ValueError(
            f"device_train_microbatch_size={microbatch_size!r} does not divide the train_dataloader's batch size of "
            f"{batch_size}, which DeepSpeed requires. Choose a divisor of {batch_size}."
        )
    steps = int(batch_size // microbatch_size)
    _fill(config, "train_batch_size", batch_size * world_size, f"batch size {batch_size} x world size {world_size}")
    _fill(config, "train_micro_batch_size_per_gpu", int(microbatch_size), "device_train_microbatch_size")
    because = f"batch size {batch_size} / device_train_microbatch_size {microbatch_size}"
    _fill(config, "gradient_accumulation_steps", steps, because)


def _fill(config: dict[str, Any], key: str, value: float, because: str) -> None:
    """Set a missing or `'auto'` key, and raise if it has another value."""
    if config.get(key, _TO_FILL) == _TO_FILL:
        config[key] = value
    elif config[key] != value:
        raise ValueError(
            f"deepspeed_config[{key!r}]={config[key]!r} contradicts the Trainer's arguments, which make it {value!r} "
            f"({because}). Leave the key out, or make the two agree."
        )


def _fill_precision(config: dict[str, Any], precision: Precision) -> None:
    if precision is Precision.AMP_FP8:
        raise ValueError(
            "precision='amp_fp8' cannot be used with deepspeed_config. Choose 'amp_bf16', 'amp_fp16' or 'fp32'."
        )
    for section, theirs in _PRECISION_SECTIONS.items():
        enabled = config[section].get("enabled", False) if section in config else False
        if enabled == _TO_FILL:
            config[section]["enabled"] = enabled = theirs is precision
        if enabled and theirs is not precision:
            raise ValueError(
                f"deepspeed_config[{section!r}] is enabled, which is precision={theirs.value!r}, but the Trainer has "
                f"precision={precision.value!r}. Leave the section out, or pass precision={theirs.value!r}."
            )
        if enabled:
            return
    for section in ("fp16", "bf16"):
        if _PRECISION_SECTIONS[section] is precision:
            config.setdefault(section, {"enabled": True})


def _fill_clipping(config: dict[str, Any], clipping_type: str, threshold: float) -> None:
    if clipping_type != "norm":
        raise NotImplementedError(
            f"GradientClipping with clipping_type={clipping_type!r} cannot be used with deepspeed_config: DeepSpeed "
            "clips by 'norm' only. Use that, or train without DeepSpeed."
        )
    if threshold <= 0:
        raise ValueError(
            f"GradientClipping with clipping_threshold={threshold!r} cannot be used with deepspeed_config. Choose a "
            "number above 0: DeepSpeed takes 0 for no clipping."
        )
    _fill(config, "gradient_clipping", threshold, "the clipping_threshold of GradientClipping")


class UnusedParameters:
    """Parameters without a gradient in a step, whose values and optimizer state the step must not change.

    At stage 0 a gradient on any rank counts for all ranks; above, every rank must use the same parameters. A step count
    that the optimizer keeps for a whole flat tensor, as Adam does, still advances for all parameters in it.
    """

    def __init__(self, engine: Any, parameters: Iterable[Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._is_whole = engine.zero_optimization_stage() == 0
        self._slices: dict[torch.Tensor, list[tuple[Parameter, slice]]] = defaultdict(list)
        for parameter, tensor, where in find_in_optimizer(engine, self._parameters):
            self._slices[tensor].append((parameter, where))
        self._used: set[Parameter] = set()
        self._before: list[tuple[torch.Tensor, slice, dict[str, torch.Tensor]]] = []
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._used.add)
        engine.basic_optimizer.register_step_pre_hook(self._keep)
        engine.basic_optimizer.register_step_post_hook(self._put_back)

    def begin_step(self) -> None:
        """Agree over the ranks on the used parameters, before the engine's step. Every rank must call this."""
        if self._is_whole:
            counts = sum_counts([int(parameter in self._used) for parameter in self._parameters])
            self._used.update(each for each, count in zip(self._parameters, counts, strict=True) if count)

    def end_step(self) -> None:
        """Clear the record of used parameters."""
        self._used.clear()

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            for parameter, where in self._slices[tensor]:
                if parameter in self._used:
                    continue
                if self._is_whole:
                    tensor.grad = None  # torch's optimizers skip such parameters
                else:  # only a slice of a flat tensor, which the optimizer cannot skip
                    values = {"": tensor, **_state_like(tensor, optimizer)}
                    self._before.append((tensor, where, {key: each[where].clone() for key, each in values.items()}))

    @torch.no_grad()
    def _put_back(self, optimizer: Optimizer, *_: Any) -> None:
        for tensor, where, before in self._before:
            for key, value in {"": tensor, **_state_like(tensor, optimizer)}.items():
                value[where] = before.get(key, 0.0)  # a state created in this step starts at zero
        self._before.clear()


def _state_like(tensor: torch.Tensor, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(tensor, {})
    return {key: value for key, value in state.items() if torch.is_tensor(value) and value.shape == tensor.shape}
