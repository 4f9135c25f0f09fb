"""The blog post on what a ComposerModel is."""

import os

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import torchvision
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

import composer_hf
from composer import Trainer
from composer.callbacks import HuggingFaceCheckpointer
from composer.models import ComposerModel

POST = "blog_post"
FOR_THE_MODEL = {"torchvision": torchvision, "torchmetrics": torchmetrics, "ComposerModel": ComposerModel, "F": F}
ON_CPU = {"device": "cpu", "progress_bar": False}


def test_forward_and_loss_are_enough_to_train(run, dataloader):
    model = run(POST, "A ResNet-18")["ResNet18"]()
    before = model.model.fc.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(
        model=model, train_dataloader=dataloader, optimizers=optimizer, max_duration="1ba", **ON_CPU
    ) as trainer:
        trainer.fit()
    assert not torch.equal(before, model.model.fc.weight)


def accuracy(model, dataloader):
    guesses = torch.cat([model.model(images).argmax(1) for images, _ in dataloader])
    return (guesses == torch.cat([targets for _, targets in dataloader])).float().mean().item()


def test_metrics_are_computed_as_printed_where_nothing_is_trained(run, dataloader):
    model = run(POST, "A model with metrics", as_printed=True, train=False, **FOR_THE_MODEL)["ComposerClassifier"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which nobody steps
    with Trainer(model=model, eval_dataloader=dataloader, optimizers=optimizer, **ON_CPU) as trainer:
        trainer.eval()
    with torch.no_grad():
        assert float(trainer.state.eval_metric_values["MulticlassAccuracy"]) == accuracy(model.eval(), dataloader)


def test_metrics_of_training_and_of_evaluation_are_apart(run, dataloader):
    model = run(POST, "A model with metrics", **FOR_THE_MODEL)["ComposerClassifier"]()
    with Trainer(
        model=model,
        train_dataloader=dataloader,
        eval_dataloader=dataloader,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration=1,
        **ON_CPU,
    ) as trainer:
        trainer.fit()
    with torch.no_grad():
        assert float(trainer.state.eval_metric_values["MulticlassAccuracy"]) == accuracy(model.eval(), dataloader)
    assert trainer.state.train_metrics["MulticlassAccuracy"] is not trainer.state.eval_metrics["eval"]


@pytest.fixture
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=alphabet[0])


@pytest.fixture
def llama(folder):
    """Put a tiny model where the configuration's name is a path; the tests have no network."""
    transformers.utils.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "meta-llama/Llama-2-7b-hf")


@pytest.mark.usefixtures("llama")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be flash attention")
def test_flash_attention_is_refused_by_name_where_there_is_none(text, tokenizer):
    section = yaml.safe_load(text(POST, "The model of a configuration", as_printed=True))["model"]
    with pytest.raises(ValueError, match="use_flash_attention_2=True needs the package flash-attn"):
        composer_hf.hf_causal_lm(tokenizer, **section)


@pytest.mark.usefixtures("llama")
def test_a_configured_model_is_trained_and_published_by_the_configured_callback(text, tokenizer, folder):
    model = composer_hf.hf_causal_lm(tokenizer, **yaml.safe_load(text(POST, "The model of a configuration"))["model"])
    callbacks = yaml.safe_load(text(POST, "The callbacks of a configuration"))["callbacks"]
    tokens = torch.tensor(tokenizer(["to be or not to be"] * 2)["input_ids"])
    with Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=[{"input_ids": tokens, "labels": tokens}] * 2,
        device_train_microbatch_size=2,
        max_duration="2ba",
        run_name="plum",
        callbacks=HuggingFaceCheckpointer(**callbacks["hf_checkpointer"]),
        **ON_CPU,
    ) as trainer:
        trainer.fit()

    written = folder / "plum/huggingface/ba2"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(written)
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.model.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(written)("to be")["input_ids"] == tokenizer("to be")["input_ids"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(written))
