"""Parts of the library that take another path on a GPU than on a CPU."""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer, algorithms, callbacks
from composer.core import Precision
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, HuggingFaceModel
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from gpu_cases import Skip
from gpu_cases.subjects import (
    NUM_CLASSES,
    VOCABULARY,
    make_batches,
    make_convolutional,
    make_gpt,
    make_images,
    make_network,
    make_sentences,
    make_trainer,
)


def bfloat16_weights(device: str) -> str:
    """The default precision of a GPU is bfloat16 for a model in bfloat16."""
    batches = [(inputs.to(torch.bfloat16), targets) for inputs, targets in make_batches(6)]
    with make_trainer(make_network().to(torch.bfloat16), batches, device, precision=None) as trainer:
        trainer.fit()
        assert trainer.state.precision is Precision.AMP_BF16, trainer.state.precision
    return "amp_bf16 by default"


def cuda_graphs(device: str) -> str:
    """Microbatches add up in CUDA graphs, whose gradients each replay overwrites."""
    networks = make_network(), make_network()
    for network, config in zip(networks, ({"mode": "reduce-overhead"}, None), strict=True):
        settings = {"compile_config": config, "device_train_microbatch_size": 8}
        with make_trainer(network, make_batches(8), device, optimizers=_sgd(network), **settings) as trainer:
            trainer.fit()
    _assert_close(*networks)
    return "4 microbatches as without graphs"


def memory_files(device: str) -> str:
    """Memory is recorded where the weights are moved to the GPU only after the callbacks have begun, as by FSDP."""
    kept = InMemoryLogger()
    with tempfile.TemporaryDirectory() as folder:
        watchers = [
            callbacks.MemoryMonitor(),
            callbacks.MemorySnapshot(folder=folder, skip_batches=1, interval="3ba", remote_file_name=None),
        ]
        settings: dict[str, Any] = {"parallelism_config": {"fsdp": {}}, "callbacks": watchers, "loggers": kept}
        with make_trainer(make_gpt(), make_sentences(8), device, **settings) as trainer:
            trainer.fit()
        num_files = sum(path.is_file() for path in Path(folder).rglob("*"))
    assert num_files, "MemorySnapshot has written nothing"
    assert any(name.startswith("memory/") for name in kept.data), "MemoryMonitor has logged nothing"
    return f"{num_files} files"


def offloaded(device: str) -> str:
    """FSDP with the weights on the CPU trains in both kinds of 16 bits, also with overflows and a fused optimizer."""
    for precision in ("amp_bf16",) if device == "cpu" else ("amp_bf16", "amp_fp16"):
        model = make_gpt()
        settings: dict[str, Any] = {
            "parallelism_config": {"fsdp": {"cpu_offload": True}},
            "precision": precision,
            "optimizers": torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True),
        }
        with make_trainer(model, make_sentences(6), device, **settings) as trainer:
            if precision == "amp_fp16":
                trainer.state.scaler.load_state_dict({**trainer.state.scaler.state_dict(), "scale": 2.0**40})
            trainer.fit()
            assert all(parameter.isfinite().all() for parameter in trainer.state.model.parameters())
    return "weights finite"


def recomputed(device: str) -> str:
    """Recomputed activations give the weights that kept ones give."""
    found: list[dict[str, Tensor]] = []
    for kind in (False, True, "selective"):
        settings = {"parallelism_config": {"fsdp": {"activation_checkpointing": kind}}}
        with make_trainer(make_gpt(emb_pdrop=0.0), make_sentences(4), device, **settings) as trainer:
            trainer.fit()
            found.append(trainer.strategy.model_state_dict(trainer.state.model))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-3, atol=1e-5)
    return "same weights"


def hugging_face(device: str) -> str:
    """A model of transformers trains, is evaluated and generates, with LoRA where peft is installed."""
    import transformers

    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    adapters: list[Any] = [None]
    if importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig

        adapters.append(LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True))
    for adapter in adapters:
        model = HuggingFaceModel(transformers.GPT2LMHeadModel(config), peft_config=adapter)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        settings = {"optimizers": torch.optim.AdamW(trained, lr=1e-2), "precision": "amp_bf16"}
        with make_trainer(model, make_sentences(4), device, **settings) as trainer:
            trainer.fit()
            tokens = model.generate(torch.zeros(1, 4, dtype=torch.long, device=device), max_new_tokens=4)
            assert tokens.shape == (1, 8), tokens.shape
    return "with and without LoRA" if len(adapters) > 1 else "without LoRA: no peft"


def loaded_by_workers(device: str) -> str:
    """Batches of worker processes come through pinned memory, and predictions come back to the CPU."""
    inputs, targets = (torch.cat(parts) for parts in zip(*make_batches(8), strict=True))
    data = TensorDataset(inputs, targets)
    loading = {"batch_size": 32, "num_workers": 2, "pin_memory": device == "cuda"}
    train, evaluation = DataLoader(data, shuffle=True, **loading), DataLoader(data, **loading)
    model = ComposerClassifier(make_network(), num_classes=NUM_CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    settings = {"optimizers": optimizer, "max_duration": "3ep", "device": "gpu" if device == "cuda" else "cpu"}
    with Trainer(model=model, train_dataloader=train, eval_dataloader=evaluation, **settings) as trainer:
        trainer.fit()
        outputs = trainer.predict(evaluation)
    assert {output.device.type for output in outputs} == {"cpu"}
    return f"accuracy {float(trainer.state.eval_metric_values['MulticlassAccuracy']):.2f}"


def profiled(device: str) -> str:
    """The profiler writes a trace with the GPU's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = cyclic_schedule(wait=0, warmup=1, active=3, repeat=1)
        profiler = Profiler(schedule, [JSONTraceHandler(folder=folder)], torch_prof_folder=f"{folder}/torch")
        with make_trainer(make_network(), make_batches(8), device, profiler=profiler) as trainer:
            trainer.fit()
        text = "".join(path.read_text() for path in Path(folder).rglob("*.pt.trace.json"))
    assert text, "no trace of PyTorch"
    assert device != "cuda" or '"cat": "kernel"' in text, "no kernel in the trace"
    return f"trace of {len(text) / 1e6:.1f} MB"


def several_methods(device: str) -> str:
    """Methods together, compiled, with a scaled loss."""
    methods = [
        algorithms.BlurPool(),
        algorithms.ChannelsLast(),
        algorithms.LabelSmoothing(),
        algorithms.ProgressiveResizing(),
        algorithms.EMA(half_life="5ba"),
        algorithms.SAM(),
        algorithms.MixUp(),
    ]
    settings = {"algorithms": methods, "compile_config": {}, "precision": "amp_fp16" if device == "cuda" else "fp32"}
    with make_trainer(make_convolutional(), make_images(16), device, **settings) as trainer:
        trainer.fit()
        assert all(parameter.isfinite().all() for parameter in trainer.state.model.parameters())
    return f"{len(methods)} methods"


def group_of_the_script(device: str) -> str:
    """A process group that the script has made with NCCL serves a run that saves and resumes."""
    if device != "cuda":
        raise Skip("NCCL needs a GPU")
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= {name: "1" if "SIZE" in name else "0" for name in names}
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        saving = {"save_folder": f"{folder}/saved", "save_interval": "2ba", "run_name": "run", "autoresume": True}
        for duration, batches in (("1ep", 6), ("2ep", 12)):
            with make_trainer(make_network(), make_batches(6), device, max_duration=duration, **saving) as trainer:
                trainer.fit()
                assert trainer.state.timestamp.batch == batches, trainer.state.timestamp
        torch.distributed.destroy_process_group()
    return "saved and resumed"


def _sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1)


def _assert_close(one: nn.Module, other: nn.Module) -> None:
    # TF32 rounds the products of float32 to 10 bits.
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-2, atol=1e-3)
