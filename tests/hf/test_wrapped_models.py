"""Whatever is wrapped around a Hugging Face model, its checkpoints say which model it is."""

import os

import pytest
import torch
import transformers

from composer import Trainer
from composer.models import HuggingFaceModel
from composer_checkpoint.tensors import open_checkpoint
from composer_ckpt.cli import main
from composer_dist import dist, unwrap_model
from composer_dist.testing import run_ranks
from composer_events.state_layout import unwrapped

WAYS = {
    "ddp": {},
    "compiled": {"compile_config": {"backend": "eager"}},
    "fsdp full": {"parallelism_config": {"fsdp": {"state_dict_type": "full"}}},
    "fsdp sharded": {"parallelism_config": {"fsdp": {"state_dict_type": "sharded"}}},
    "deepspeed 0": {"deepspeed_config": {"zero_optimization": {"stage": 0}}},
    "deepspeed 3": {"deepspeed_config": {"zero_optimization": {"stage": 3}}},
}


def train(way, folder):
    """Save a checkpoint; return where, and whether the model is found inside of each wrapper."""
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=1, **sizes)
    model = HuggingFaceModel(transformers.LlamaForCausalLM(config))
    rows = [{"input_ids": torch.full((8,), row), "labels": torch.full((8,), row)} for row in range(4)]
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.3),
        train_dataloader=torch.utils.data.DataLoader(rows, 2, sampler=dist.get_sampler(rows)),
        device_train_microbatch_size=2,
        max_duration="1ba",
        progress_bar=False,
        device="cpu",
        **WAYS[way],
    )
    trainer.fit()
    saved = trainer.save_checkpoint(os.path.join(folder, "last.pt"))
    wrapped = trainer.state.model
    found = [look(shell) is model for look in (unwrap_model, unwrapped) for shell in (wrapped, torch.compile(wrapped))]
    found += [look(torch.nn.DataParallel(model)) is model for look in (unwrap_model, unwrapped)]
    trainer.close()
    return saved, found


def train_each_way(folder):
    return {way: train(way, f"{folder}/{way}") for way in WAYS}


@pytest.mark.slow
def test_a_checkpoint_of_a_wrapped_model_becomes_a_folder_of_hugging_face(tmp_path):
    """`composer-ckpt convert`, which our own message recommends at stage 3, refused what DeepSpeed had trained: "it
    does not say which model it is"."""
    pytest.importorskip("deepspeed")
    ranks = run_ranks(train_each_way, str(tmp_path), store=tmp_path / "store", timeout_s=400)
    for way, (saved, _) in ranks[0].items():
        out = tmp_path / f"{way} as hf"
        assert main(["convert", saved, str(out)]) == 0
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
        with open_checkpoint(saved) as source:
            prefix = "state/model/model."
            weights = {
                name.removeprefix(prefix): tensor.read()
                for name, tensor in source.tensors.items()
                if name.startswith(prefix)
            }
        assert weights.keys() == loaded.keys(), way
        for name, weight in weights.items():
            torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)
    assert [found for rank in ranks for _, found in rank.values()] == [[True] * 6] * 2 * len(WAYS)
