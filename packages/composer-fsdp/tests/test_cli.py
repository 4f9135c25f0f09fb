"""The command as users run it, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("composer-fsdp")
MODEL = """
import torch
from torch import nn

class Net(nn.Sequential):
    def fsdp_wrap_fn(self, module):
        return isinstance(module, nn.Linear)

def make():
    return Net(nn.Linear(64, 64), nn.Linear(64, 8))

def make_with_batch():
    return make(), torch.zeros(4, 64)

def make_batch(batch_size=2):
    return torch.zeros(batch_size, 64)

def loss(outputs, batch):
    return outputs.square().mean()

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, momentum=0.5)

def fail():
    raise OSError("the disk is gone")

class Asserting(Net):
    def forward(self, inputs):
        assert inputs.ndim == 3, "no sequence"

def make_asserting():
    return Asserting(nn.Linear(64, 64))

def make_frozen():
    return make().requires_grad_(False)

made = nn.Linear(1, 1)

def number():
    return 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "config.json").write_text('{"sharding_strategy": "SHARD_GRAD_OP"}')
    (tmp_path / "config.toml").write_text('[fsdp]\nsharding_strategy = "SHARD_GRAD_OP"')
    return tmp_path


def run(folder, *arguments):
    result = subprocess.run([COMMAND, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    return result.returncode, result.stdout, result.stderr


def test_help_needs_no_torch():
    script = "import sys; from composer_fsdp.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    script += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("config", ["config.json", "config.toml", '{"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}'])
def test_explain_prints_a_tree_of_units(folder, config):
    code, out, _ = run(folder, "explain", "model.py:make", "--config", config, "--world-size", "4")
    assert code == 0
    first, second, *_ = out.splitlines()
    assert first.startswith("(the model) (Net): 0 parameters")
    assert second.startswith("  0 (Linear): 4,160 parameters, 4.1 KiB a rank; 16.2 KiB gathered in float32, kept until")
    assert "FSDP: Using sharding_strategy=SHARD_GRAD_OP" in out


def test_estimate_prints_a_verdict(folder):
    shape = ("--input-shape", "64", "--batch-size", "16")
    code, out, _ = run(folder, "estimate", "model.py:make", "--world-size", "512", "--gpu-memory", "80GiB", *shape)
    assert code == 0
    assert " of 80.0 GiB at the peak, in " in out
    assert " all_gather" in out


def test_estimate_prints_json_of_what_does_not_fit_and_says_so_by_its_exit_code(folder):
    arguments = ("--batch", "model.py:make_batch", "--loss", "model.py:loss", "--optimizer", "model.py:make_optimizer")
    code, out, _ = run(folder, "estimate", "model:make", "--gpu-memory", "1KiB", "--json", *arguments)
    assert code == 1
    assert json.loads(out)["fits"] is False


def test_a_batch_may_come_with_the_model(folder):
    code, out, _ = run(folder, "estimate", "model.py:make_with_batch", "--json")
    assert code == 0
    assert json.loads(out)["peak"]["kinds"]["batch"] == 4 * 64 * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "model.py"), "MODEL='model.py' names no object"),
        (("explain", "modle.py:make"), "there is no file 'modle.py'"),
        (("explain", "model.py:mkae"), "has no 'mkae'. Did you mean 'make'"),
        (("explain", "nowhere.at.all:make"), "No module named 'nowhere'"),
        (("explain", "model.py:made"), "MODEL='model.py:made' is a Linear, and not what makes one"),
        (("explain", "model.py:fail"), "fails with OSError('the disk is gone')"),
        (("explain", "model.py:number"), "made 3, a int. It has to return a torch.nn.Module"),
        (("explain", "model.py:make", "--config", "{"), "--config cannot be read"),
        (("explain", "model.py:make", "--config", "nothing"), "is neither settings nor a file of them"),
        (("explain", "model.py:make", "--config", '{"sharding_strategi": 1}'), "sharding_strategy"),
        (("explain", "model.py:make", "--config", '{"sharding_strategy": "HALF"}'), "'HALF'"),
        (("explain", "model.py:make", "--world-size", "0"), "world_size=0 is not a number of ranks"),
        (("estimate", "model.py:make"), "nothing says what a batch is"),
        (("estimate", "model.py:make_with_batch", "--gpu-memory", "80 goats"), "'80 goats' is not an amount of memory"),
        (("estimate", "model.py:make_with_batch", "--optimizer", "AdamV"), "Did you mean 'Adam"),
        (("estimate", "model.py:make", "--input-shape", "64", "--input-dtype", "integer"), "--input-dtype='integer'"),
        (
            ("estimate", "model.py:make_asserting", "--input-shape", "64"),
            "fails with AssertionError: no sequence. Give",
        ),
        (("estimate", "model.py:make", "--input-shape", "65"), "a training step of the model fails with RuntimeError"),
        (("estimate", "model.py:make_frozen", "--input-shape", "64"), "no parameter of the model needs gradients"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(folder, monkeypatch, capsys, arguments, words):
    from composer_fsdp.cli import main

    monkeypatch.chdir(folder)
    assert main(list(arguments)) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_model_ends_the_process_with_code_2_and_no_traceback(folder):
    code, out, err = run(folder, "explain", "model.py:mkae")
    assert (code, out) == (2, "")
    assert err.startswith("composer-fsdp: MODEL='model.py:mkae'")
    assert "Traceback" not in err
