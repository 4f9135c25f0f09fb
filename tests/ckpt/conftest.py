"""What the tests of the command `composer-ckpt` share."""

import json
import os
import subprocess
import sys

import pytest

TINY = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# Loads a folder as a stranger does, and prints its logits. `composer*` are not even found.
STRANGER = """
import json, sys
class Nobody:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("composer"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Nobody())
import torch, transformers
transformers.utils.logging.set_verbosity_error()
folder, auto = sys.argv[1:3]
model = getattr(transformers, auto).from_pretrained(folder).eval()
ids = torch.arange(1, 9).reshape(2, 4)
more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
with torch.no_grad():
    logits = model(input_ids=ids, **more).logits
assert not [name for name in sys.modules if name.partition(".")[0].startswith("composer")]
print(json.dumps({"logits": logits.double().tolist(), "dtype": str(model.dtype), "class": type(model).__name__}))
"""


@pytest.fixture
def ckpt(capsys):
    """Run the command here, and return its exit code and what it printed as JSON."""
    from composer_ckpt.cli import main

    def run(*arguments):
        capsys.readouterr()  # what loading other libraries has printed
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def stranger():
    """Load a folder in a process where nothing of ours can be imported; return what the model says."""

    def load(folder, auto="AutoModelForCausalLM", python=sys.executable):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        arguments = [os.fspath(python), "-c", STRANGER, os.fspath(folder), auto]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return load


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16, **TINY))


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, **TINY))


def _bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**sizes, **TINY))


def _t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_ff": 16, "d_kv": 4, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **TINY))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=3, **TINY))


MAKERS = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5, "mixtral": _mixtral}


@pytest.fixture
def make_model():
    """Return a small model of an architecture, with weights of which no two are alike."""
    import torch

    def make(name):
        torch.manual_seed(7)
        model = MAKERS[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        return model

    return make


@pytest.fixture
def checkpoint_of():
    """Return what a Trainer saves of a model, by its plain parts."""

    def describe(model):
        name = type(model).__name__
        config = json.loads(json.dumps({**model.config.to_dict(), "architectures": [name]}))
        entry = {"file_extension": ".json", "content": config, "class": f"transformers.{name}"}
        weights = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
        return {
            "state": {
                "model": weights,
                "integrations": {"huggingface": {"model": {"config": entry}, "tokenizer": {}}},
            }
        }

    return describe
