"""A recipe for as long as it is given: a GPT on the bytes of the standard library, with and without its methods.

Plain training gets half of the time. ALiBi and sequence length warm-up then get as many batches, for which they need
less; model, data, learning rate and schedule are the same. What is compared is the held-out quality.
"""

import importlib.util
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from composer import Algorithm, Trainer
from composer.algorithms import Alibi, SeqLengthWarmup
from composer.models import HuggingFaceModel
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from composer_models import LanguageCrossEntropy

MINUTES = "GPU_CHECK_RECIPE_MINUTES"
"""The environment variable that says how long the case may take."""
AFTERWARDS_S = 10.0  # imports, evaluation and what else is not training
WARM, MEASURED = 10, 30  # batches by which the length of a step is found out


def stdlib(device: str) -> str:
    """Train both ways, and return bits per byte and time of each."""
    seconds = 60 * float(os.environ.get(MINUTES, "3"))
    data = _load("stdlib_data")
    num_batches = _batches_in(max(seconds / 2 - AFTERWARDS_S, 1.0), data, device)
    methods = [Alibi(data.CONTEXT, 1.0), SeqLengthWarmup(0.3, data.CONTEXT // 4, data.CONTEXT)]
    plain, recipe = (_train(device, data, num_batches, chosen) for chosen in ([], methods))
    return f"bits per unseen byte in {num_batches} batches: plain {plain}, with ALiBi and warm-up {recipe}"


def _batches_in(seconds: float, data: ModuleType, device: str) -> int:
    with _make_trainer(device, data, WARM + MEASURED, []) as trainer:
        trainer.fit(duration=f"{WARM}ba")
        start = time.perf_counter()
        trainer.fit(duration=f"{MEASURED}ba")
        _finish(device)
        step_s = (time.perf_counter() - start) / MEASURED
    return max(int(seconds / step_s), 10)


def _train(device: str, data: ModuleType, num_batches: int, methods: Sequence[Algorithm]) -> str:
    with _make_trainer(device, data, num_batches, methods) as trainer:
        start = time.perf_counter()
        trainer.fit()
        _finish(device)
        seconds = time.perf_counter() - start
        trainer.eval(DataLoader(data.load_stdlib()[1], 64))
        bits = float(trainer.state.eval_metric_values["LanguageCrossEntropy"]) / math.log(2)
    assert bits < math.log2(data.VOCABULARY), f"{bits:.2f} bits per byte are no better than guessing"
    return f"{bits:.3f} ({seconds:.0f} s)"


def _make_trainer(device: str, data: ModuleType, num_batches: int, methods: Sequence[Algorithm]) -> Trainer:
    torch.manual_seed(17)
    is_cuda = device == "cuda"
    model = _make_model(data, is_large=is_cuda)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data.load_stdlib()[0], 128 if is_cuda else 4, shuffle=True, drop_last=True),
        max_duration=f"{num_batches}ba",
        optimizers=DecoupledAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=1e-5, fused=True),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.05dur", alpha_f=0.1),
        algorithms=list(methods),
        device="gpu" if is_cuda else device,
        precision="amp_bf16",
        seed=17,
        progress_bar=False,
    )


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _make_model(data: ModuleType, is_large: bool) -> HuggingFaceModel:
    """Return a GPT-2 of transformers without dropout: 19 million weights, or next to none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = (6, 512, 8) if is_large else (1, 32, 2)
    sizes: dict[str, Any] = {"n_positions": data.CONTEXT, "n_embd": width, "n_layer": layers, "n_head": heads}
    rates: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=data.VOCABULARY, bos_token_id=None, eos_token_id=None, **sizes, **rates)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers does not see it in the name of this class, and warns
    return HuggingFaceModel(model, use_logits=True, metrics=[LanguageCrossEntropy()])


def _load(name: str) -> ModuleType:
    """Load a module of the examples' recipes."""
    path = Path(__file__).resolve().parent.parent.parent / "examples" / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
