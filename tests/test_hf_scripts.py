"""What users' documents say of Hugging Face models, as it stands there.

`save_interval`, `save_folder` and the name of the model are the reader's to fill in; the model is a tiny one in a
folder, since the tests have no network. Flash attention needs a GPU: on a CPU the setting is refused by its name.
"""

import os

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import composer_hf
from composer import Trainer
from composer.callbacks import HuggingFaceCheckpointer

MODEL_SECTION = {
    "name": "hf_causal_lm",
    "init_device": "mixed",
    "pretrained_model_name_or_path": "meta-llama/Llama-2-7b-hf",
    "pretrained": True,
    "use_auth_token": True,
    "use_flash_attention_2": True,
}


@pytest.fixture
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=alphabet[0])


@pytest.fixture
def folder(tmp_path):
    transformers.utils.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be flash attention")
def test_flash_attention_is_refused_by_name_where_there_is_none(folder, tokenizer):
    with pytest.raises(ValueError, match="use_flash_attention_2=True needs the package flash-attn"):
        composer_hf.hf_causal_lm(tokenizer, **{**MODEL_SECTION, "pretrained_model_name_or_path": folder})


def test_a_model_is_built_trained_and_written_as_the_sections_say(folder, tokenizer, tmp_path):
    section = {**MODEL_SECTION, "pretrained_model_name_or_path": folder, "use_flash_attention_2": False}
    model = composer_hf.hf_causal_lm(tokenizer, **section)
    hf_checkpointer = {"save_interval": "2ba", "save_folder": str(tmp_path / "{run_name}")}
    tokens = torch.tensor(tokenizer(["to be or not to be"] * 2)["input_ids"])

    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=[{"input_ids": tokens, "labels": tokens}] * 2,
        device_train_microbatch_size=2,
        max_duration="2ba",
        run_name="plum",
        progress_bar=False,
        callbacks=HuggingFaceCheckpointer(**hf_checkpointer),
    )
    trainer.fit()
    trainer.close()

    written = tmp_path / "plum" / "huggingface" / "ba2"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(written)
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.model.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(written)("to be")["input_ids"] == tokenizer("to be")["input_ids"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(written))
