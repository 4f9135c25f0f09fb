"""What the tests of this application share."""

import datetime
import json

import pytest
import torch


@pytest.fixture
def run(capsys):
    """Run the command, and return its exit code, what it printed, and its errors."""
    from composer_ckpt.cli import main

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # argparse
            code = stopped.code
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


@pytest.fixture
def run_json(run):
    """Run the command with `--json`, and return its exit code and what it printed."""

    def call(*arguments):
        code, out, _ = run(*arguments, "--json")
        return code, json.loads(out)

    return call


@pytest.fixture
def content():
    """Return a training state with all kinds of things in it."""
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)
    return {
        "state": {
            "model": {"layer.weight": weight, "tied.weight": weight, "half": bias.bfloat16(), "count": torch.tensor(3)},
            "optimizers": {
                "AdamW": {
                    "state": {"layer.weight": {"exp_avg": torch.ones(4, 3), "step": torch.tensor(2.0)}},
                    "param_groups": [{"lr": 0.1, "params": ["layer.weight"]}],
                }
            },
            "timestamp": {"Timestamp": {"epoch": 2, "batch": 20, "total_wct": datetime.timedelta(seconds=90)}},
            "algorithms": [("MixUp", {"repr": "MixUp(alpha=0.2)"})],
            "schedulers": {"CosineAnnealingScheduler": {}},
            "callbacks": {"LRMonitor": {}},
            "run_name": "blue-fox",
            "rank_zero_seed": 17,
            "metadata": {"composer_env_info": {"composer_version": "0.1.0"}, "torch_version": "2.15", "world_size": 8},
        },
        "rng": [{"torch": torch.arange(6, dtype=torch.uint8)}, {"torch": torch.arange(6, dtype=torch.uint8)}],
    }
