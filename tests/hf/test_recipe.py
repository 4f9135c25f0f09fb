"""Configuration files as projects for language models write them build the same run as the equivalent Python."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from streaming import MDSWriter
from tokenizers import Tokenizer, models

from composer import Evaluator, Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import HuggingFaceCheckpointer, LRMonitor
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from composer.recipe import RecipeError, load_recipe
from composer.recipe.data import text
from composer_dist import reproducibility
from composer_hf import ComposerHFCausalLM

RECIPE = """
max_seq_len: 8
global_seed: 17
run_name: tiny
folder: .

model:
  name: hf_causal_lm
  init_device: cpu
  pretrained_model_name_or_path: ${folder}/llama
  pretrained: true
  use_auth_token: false
  use_flash_attention_2: false
tokenizer:
  name: ${folder}/llama
  kwargs: {model_max_length: "${max_seq_len}"}
train_loader:
  name: text
  dataset: {local: "${folder}/shards", split: train, shuffle: true, shuffle_seed: 17, max_seq_len: "${max_seq_len}"}
  drop_last: true
  num_workers: 0
eval_loader:
  name: text
  label: eval
  dataset: {local: "${folder}/shards", split: val, shuffle: false, max_seq_len: "${max_seq_len}"}
scheduler: {name: cosine_with_warmup, t_warmup: 1ba, alpha_f: 0.1}
optimizer: {name: decoupled_adamw, lr: 6.0e-3, betas: [0.9, 0.95], eps: 1.0e-08, weight_decay: 0.0}
algorithms:
  gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}
max_duration: 3ba
eval_interval: 2ba
eval_first: false
eval_subset_num_batches: -1
global_train_batch_size: 4
seed: ${global_seed}
device_eval_batch_size: 2
device_train_microbatch_size: 2
precision: fp32
progress_bar: false
log_to_console: true
console_log_interval: 1ba
callbacks:
  lr_monitor: {}
  hf_checkpointer: {save_interval: 2ba, save_folder: "./published"}
save_folder: ./checkpoints
save_interval: 1dur
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a model, its tokenizer and shards of tokens."""
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(32)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0")
    tokenizer.save_pretrained("llama")
    draw = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        with MDSWriter(out=f"shards/{split}", columns={"tokens": "bytes"}) as writer:
            for _ in range(count):
                writer.write({"tokens": draw.integers(1, 32, 10).astype(np.int64).tobytes()})
    Path("recipe.yaml").write_text(RECIPE)
    return tmp_path


def train_by_hand():
    reproducibility.seed_all(17)
    tokenizer = transformers.AutoTokenizer.from_pretrained("llama", model_max_length=8)
    model = ComposerHFCausalLM(tokenizer, "llama")
    shards = {"local": "shards", "split": "train", "shuffle": True, "shuffle_seed": 17, "max_seq_len": 8}
    held_out = {"local": "shards", "split": "val", "shuffle": False, "max_seq_len": 8}
    with Trainer(
        model,
        train_dataloader=text(shards, 4, drop_last=True),
        eval_dataloader=Evaluator(label="eval", dataloader=text(held_out, 2)),
        optimizers=DecoupledAdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        schedulers=CosineAnnealingWithWarmupScheduler("1ba", alpha_f=0.1),
        algorithms=GradientClipping("norm", 1.0),
        callbacks=[LRMonitor(), HuggingFaceCheckpointer("by_hand", "2ba")],
        max_duration="3ba",
        eval_interval="2ba",
        device_train_microbatch_size=2,
        seed=17,
        precision="fp32",
        progress_bar=False,
        device="cpu",
    ) as trainer:
        trainer.fit()
    return trainer


def test_it_trains_as_the_equivalent_python(folder):
    with load_recipe("recipe.yaml", ["device=cpu"]).build() as trainer:
        trainer.fit()
    expected = train_by_hand()
    found = dict(trainer.state.model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in expected.state.model.named_parameters())
    assert trainer.state.eval_metric_values == expected.state.eval_metric_values
    published = transformers.AutoModelForCausalLM.from_pretrained("published/huggingface/ba3")
    by_hand = transformers.AutoModelForCausalLM.from_pretrained("by_hand/huggingface/ba3")
    torch.testing.assert_close(published.state_dict(), by_hand.state_dict(), rtol=0, atol=0)


def test_it_trains_sharded_with_weights_on_rank_0_alone(folder):
    settings = yaml.safe_load(RECIPE)
    settings["model"]["init_device"] = "mixed"
    settings["fsdp_config"] = {"sharding_strategy": "FULL_SHARD", "state_dict_type": "full"}
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "composer_dist.launch", "-n", "2", "recipe.yaml", "device=cpu"]
    subprocess.run(command, check=True, timeout=240)
    published = transformers.AutoModelForCausalLM.from_pretrained("published/huggingface/ba3")
    for name, value in train_by_hand().state.model.model.named_parameters():
        # Two ranks add the gradients of their halves of a batch in another order.
        torch.testing.assert_close(published.state_dict()[name], value.detach(), rtol=1e-4, atol=1e-5)


def test_code_that_comes_with_a_model_runs_only_if_the_command_line_allows_it(folder):
    with pytest.raises(RecipeError, match=r"model\.trust_remote_code: runs code .*--trust-remote-code"):
        load_recipe("recipe.yaml", ["model.trust_remote_code=true"])
    load_recipe("recipe.yaml", ["model.trust_remote_code=true"], trust_remote_code=True)
