"""What a Hugging Face Trainer cannot do for algorithms, as it is set up."""

import inspect
from collections.abc import Sequence
from typing import Any

from composer_algorithms.bridges._refusals import (
    computes_between,
    needs_model_loss,
    refuse,
    refuse_cut_batches,
    refuse_graphs,
)
from composer_algorithms.ema import EMA
from composer_algorithms.gradient_clipping import GradientClipping
from composer_algorithms.layer_freezing import LayerFreezing
from composer_algorithms.sam import SAM
from composer_algorithms.selective_backprop import SelectiveBackprop
from composer_algorithms.seq_length_warmup import SeqLengthWarmup
from composer_algorithms.swa import SWA
from composer_events.algorithm import Algorithm


def check_trainer(trainer: Any, algorithms: Sequence[Algorithm]) -> None:
    """Refuse algorithms that would have no effect, or a wrong one.

    Raises:
        ValueError: If there is one, or the Trainer makes its model or its batches in a way that algorithms cannot
            follow.
    """
    args = trainer.args
    if trainer.model_init is not None:
        raise ValueError(
            "model_init makes another model in each call of train(), which algorithms have not changed: pass model=."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True begins training anew with algorithms that are under way: give "
            "per_device_train_batch_size as a number."
        )
    refuse_graphs(algorithms, "the Hugging Face Trainer")
    refuse_cut_batches(algorithms, "gradient_accumulation_steps", args.gradient_accumulation_steps)
    _check_engine(trainer, algorithms)
    if args.fp16:
        refuse(
            algorithms,
            (SAM,),
            "with fp16=True",
            "the scaler of its gradients steps without a closure",
            "Use bf16=True, or leave out one of the two.",
        )
    if args.ddp_find_unused_parameters is False and args.world_size > 1:
        for algorithm in algorithms:
            if algorithm.find_unused_parameters:
                raise ValueError(
                    f"{algorithm!r} leaves parameters without gradients, which ddp_find_unused_parameters=False does "
                    f"not expect: set it to True."
                )
    _check_losses(trainer.compute_loss_func, algorithms)


def _check_engine(trainer: Any, algorithms: Sequence[Algorithm]) -> None:
    for is_enabled, engine in ((trainer.is_deepspeed_enabled, "DeepSpeed"), (trainer.is_fsdp_enabled, "FSDP")):
        if is_enabled:
            refuse(
                algorithms,
                (EMA, SWA, SAM, GradientClipping, LayerFreezing),
                f"under the Trainer's {engine}",
                "weights, gradients and the optimizer are not the model's own there",
                "Leave it out, or use the Trainer of composer-suite.",
            )


def _check_losses(compute_loss: Any, algorithms: Sequence[Algorithm]) -> None:
    if compute_loss is None:
        for algorithm in algorithms:
            asks = needs_model_loss(algorithm) and not isinstance(algorithm, SeqLengthWarmup)
            if asks or computes_between(algorithm):
                raise ValueError(
                    f"{algorithm!r} acts between the forward pass and the loss, or computes a loss of its own, and the "
                    f"model computes its loss within its forward pass. Pass compute_loss_func to the Trainer: a "
                    f"function (outputs, labels, num_items_in_batch=None) such as one that returns "
                    f"F.cross_entropy(outputs['logits'], labels)."
                )
        return
    parameters = inspect.signature(compute_loss).parameters
    takes_reduction = "reduction" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_reduction:
        refuse(
            algorithms,
            (SelectiveBackprop,),
            f"with compute_loss_func={compute_loss!r}",
            "it asks for the loss of each example by reduction='none'",
            "Let the function take reduction='mean'.",
        )
