"""FusedCrossEntropy with the kernel of Liger: what it refuses, and the tests of a process that interprets Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms import FusedCrossEntropy
from composer.functional import apply_fused_cross_entropy
from composer.models import ComposerGPT

pytest.importorskip("liger_kernel", reason="the extra liger is not installed")


@pytest.mark.slow
def test_the_kernel_computes_what_pytorch_does():
    """Triton reads the variable when it is imported, which this process may have done."""
    file = Path(__file__).with_name("liger_kernel_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_smoothing_is_refused_when_the_algorithm_is_made():
    model = ComposerGPT({"d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 32, "max_seq_len": 8})
    for make in (FusedCrossEntropy, lambda **settings: apply_fused_cross_entropy(model, **settings)):
        with pytest.raises(ValueError, match="kernel='liger' cannot be combined with label_smoothing"):
            make(kernel="liger", label_smoothing=0.1)
        with pytest.raises(ValueError, match="kernel='Liger' must be 'torch' or 'liger'"):
            make(kernel="Liger")


def test_a_device_without_the_kernel_is_refused_when_training_begins(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = ComposerGPT({"d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 32, "max_seq_len": 8})
    ids = torch.arange(8)
    with Trainer(
        model,
        train_dataloader=DataLoader([{"input_ids": ids, "labels": ids}]),
        optimizers=torch.optim.SGD(model.parameters()),
        max_duration="1ba",
        algorithms=[FusedCrossEntropy(kernel="liger")],
        device="cpu",
        progress_bar=False,
    ) as trainer:
        with pytest.raises(ValueError, match="kernel='liger' runs on GPUs; got tensors on 'cpu'"):
            trainer.fit()
        assert trainer.state.timestamp.batch == 0
