"""FSDP2 with one rank over NCCL: the same weights as without, and checkpoints from which training goes on."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gpu_cases.subjects import make_gpt, make_sentences, make_trainer

NUM_BATCHES = 6


def fsdp_full(device: str) -> str:
    """Checkpoints in one file, with the whole weights."""
    return _train_and_resume(device, "full", "ba{batch}.pt", "ba3.pt")


def fsdp_sharded(device: str) -> str:
    """Checkpoints in folders, with the shards of each rank."""
    return _train_and_resume(device, "sharded", "ba{batch}", "ep0-ba3")


def _train_and_resume(device: str, kind: str, filename: str, saved: str) -> str:
    unsharded, _ = _train(device)
    sharding = {"parallelism_config": {"fsdp": {"state_dict_type": kind}}}
    with tempfile.TemporaryDirectory() as folder:
        saving = {"save_folder": folder, "save_filename": filename, "save_interval": "3ba"}
        weights, num_sharded = _train(device, **sharding, **saving)
        resumed, _ = _train(device, **sharding, load_path=str(Path(folder) / saved))
    assert num_sharded == len(weights), f"{num_sharded} of {len(weights)} parameters were sharded"
    torch.testing.assert_close(weights, unsharded, rtol=1e-4, atol=1e-6)  # one sums up in another order
    torch.testing.assert_close(resumed, weights, rtol=1e-5, atol=1e-7)
    return f"{num_sharded} parameters sharded, same weights, also after going on from {saved}"


def _train(device: str, **settings: object) -> tuple[dict[str, Tensor], int]:
    """Train, and return the whole weights and how many parameters were sharded."""
    model = make_gpt(emb_pdrop=0.0)
    with make_trainer(model, make_sentences(NUM_BATCHES), device, **settings) as trainer:
        trainer.fit()
        num_sharded = sum(isinstance(parameter, DTensor) for parameter in trainer.state.model.parameters())
        weights = trainer.strategy.model_state_dict(trainer.state.model)
        names = {name for name, _ in model.named_parameters()}
        return {name: value.detach().cpu() for name, value in weights.items() if name in names}, num_sharded
