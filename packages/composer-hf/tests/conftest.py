"""Tiny models of several architectures, and a tokenizer, made on the spot."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from composer_checkpoint import save_file
from composer_hf import HuggingFaceModel

TEXT = ["the quick brown fox jumps over the lazy dog", "to be or not to be, that is the question"]
VOCABULARY = 300
_LAYERS = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def _configurations():
    return {
        "gpt2": (
            "GPT2LMHeadModel",
            transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2),
        ),
        "llama": (
            "LlamaForCausalLM",
            transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **_LAYERS),
        ),
        "tied llama": (
            "LlamaForCausalLM",
            transformers.LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **_LAYERS),
        ),
        "bert": ("BertForMaskedLM", transformers.BertConfig(vocab_size=VOCABULARY, **_LAYERS)),
        "bert classifier": (
            "BertForSequenceClassification",
            transformers.BertConfig(vocab_size=VOCABULARY, num_labels=3, **_LAYERS),
        ),
        "t5": (
            "T5ForConditionalGeneration",
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
            ),
        ),
        "mixtral": (
            "MixtralForCausalLM",
            transformers.MixtralConfig(
                vocab_size=VOCABULARY, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, **_LAYERS
            ),
        ),
    }


ARCHITECTURES = (*_configurations(),)


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    torch.manual_seed(17)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def architectures():
    return ARCHITECTURES


@pytest.fixture
def make_model():
    """Make the model of an architecture, with weights of its own on every call."""

    def make(name, **changes):
        class_name, config = _configurations()[name]
        for key, value in changes.items():
            setattr(config, key, value)
        return getattr(transformers, class_name)(config).eval()

    return make


@pytest.fixture
def tokenizer():
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bytewise.train_from_iterator(TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<end>")


@pytest.fixture
def batch():
    tokens = torch.randint(2, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


@pytest.fixture
def save(tmp_path):
    """Save a HuggingFaceModel as a Trainer does, and return the path."""

    def write(model: HuggingFaceModel, name="checkpoint.pt"):
        state = {"model": model.state_dict(), "integrations": {"huggingface": model.get_metadata()}}
        save_file({"state": state}, tmp_path / name)
        return tmp_path / name

    return write
