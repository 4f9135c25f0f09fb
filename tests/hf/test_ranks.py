"""The Trainer with Hugging Face models on two ranks."""

import importlib.util
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers

from composer import Trainer
from composer.callbacks import HuggingFaceCheckpointer
from composer.loggers import LoggerDestination
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_hf import ComposerHFCausalLM

VOCABULARY, LENGTH = 64, 8
_LAYERS = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def make_model(kind):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(5)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            vocab_size=VOCABULARY, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, **_LAYERS
        )
        return transformers.MixtralForCausalLM(config)
    tied = {"tie_word_embeddings": kind == "tied llama"}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **tied, **_LAYERS)
    return transformers.LlamaForCausalLM(config)


def batches(rank, world_size):
    """Return this rank's part of four batches of four samples."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (4, 4, LENGTH), generator=generator)
    return [{"input_ids": part[rank::world_size], "labels": part[rank::world_size]} for part in tokens]


def train(model, parallelism=None, **options):
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3),
        train_dataloader=batches(dist.get_global_rank(), dist.get_world_size()),
        device_train_microbatch_size=1,
        max_duration="3ba",
        progress_bar=False,
        device="cpu",
        seed=3,
        parallelism_config=parallelism,
        **options,
    )
    trainer.fit()
    return trainer


FSDP = {"fsdp": {"state_dict_type": "full"}}
KINDS = ("llama", "tied llama", "t5", "mixtral")
WAYS = {"ddp": None, "fsdp2": FSDP}


def train_on_ranks(kind, parallelism, folder):
    model = HuggingFaceModel(make_model(kind))
    checkpointer = HuggingFaceCheckpointer(folder, save_interval="3ba")
    trainer = train(model, parallelism, callbacks=checkpointer)
    saved = trainer.save_checkpoint(os.path.join(folder, "last.pt"))
    prompt = torch.full((1, 2 + dist.get_global_rank()), 7)
    generated = model.generate(
        prompt, max_new_tokens=3, do_sample=False, synced_gpus=True, pad_token_id=0, eos_token_id=None
    )
    trainer.close()
    units = sorted({type(unit).__name__ for unit in model.modules() if hasattr(unit, "unshard")})
    return saved, generated, units


def train_all_on_ranks(folder):
    """Train all that the tests look at, since starting the ranks takes longer than training them."""
    found = {}
    for way, parallelism in WAYS.items():
        for kind in KINDS:
            found[way, kind] = train_on_ranks(kind, parallelism, os.path.join(folder, way, kind))
    found["mixed"] = begin_mixed(os.path.join(folder, "base"), os.path.join(folder, "mixed.pt"))
    if importlib.util.find_spec("peft") is not None:
        found["adapter"] = train_adapter(os.path.join(folder, "adapter"))
    return found


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """Return the folder, and what each of two ranks has seen."""
    folder = tmp_path_factory.mktemp("ranks")
    make_model("llama").save_pretrained(folder / "base")
    return folder, run_ranks(train_all_on_ranks, str(folder), store=folder / "store", timeout_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_give_the_folder_that_one_gives(kind, way, on_ranks, tmp_path):
    alone = train(HuggingFaceModel(make_model(kind)))
    expected = alone.state.model.model
    place, results = on_ranks[0] / way / kind, [of_rank[way, kind] for of_rank in on_ranks[1]]

    folder = place / "huggingface" / "ba3"
    loaded = type(expected).from_pretrained(folder)
    for name, weight in expected.state_dict().items():
        # The order of the sum over samples is another one.
        torch.testing.assert_close(loaded.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
    converted = write_huggingface_pretrained_from_composer_checkpoint(results[0][0], tmp_path / "out")
    again = type(expected).from_pretrained(converted)
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in loaded.state_dict().items())
    if WAYS[way] is not None:
        block = {"t5": "FSDPT5Block", "mixtral": "FSDPMixtralDecoderLayer"}.get(kind, "FSDPLlamaDecoderLayer")
        assert block in results[0][2]
    loaded.eval()
    for rank, (_, generated, _) in enumerate(results):
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(generated, loaded.generate(torch.full((1, 2 + rank), 7), **settings))
    alone.close()


class Registry(LoggerDestination):
    """Registers models in a folder, as an MLFlowLogger does with a server."""

    run_id, save_model = "run", None

    def __init__(self, folder):
        self.folder, self.client = folder, self

    def log_artifacts(self, run_id, folder, path):
        shutil.copytree(folder, self.folder)

    def get_run(self, run_id):
        return SimpleNamespace(info=SimpleNamespace(artifact_uri=self.folder))

    def register_model_with_run_id(self, model_uri, name, await_creation_for):
        os.rename(self.folder, f"{self.folder}-{name}")


def train_adapter(folder):
    import peft

    model = HuggingFaceModel(
        make_model("llama"), peft_config=peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    )
    checkpointer = HuggingFaceCheckpointer(folder, save_interval="3ba", mlflow_registered_model_name="plum")
    trainer = train(model, FSDP, callbacks=checkpointer, loggers=Registry(f"{folder}/registered"))
    path = trainer.save_checkpoint(os.path.join(folder, "last.pt"))
    tokens = model.generate(torch.full((1, 3), 7), max_new_tokens=3, do_sample=False, synced_gpus=True, pad_token_id=0)
    trainer.close()
    return path, tokens


# peft 0.21 asks models of transformers 5 by an older name of the property.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.slow
def test_an_adapter_is_trained_on_a_sharded_model(on_ranks, tmp_path):
    peft = pytest.importorskip("peft")
    place, results = on_ranks[0] / "adapter", [of_rank["adapter"] for of_rank in on_ranks[1]]

    folder = write_huggingface_pretrained_from_composer_checkpoint(results[0][0], tmp_path / "out")
    by_callback = peft.PeftModel.from_pretrained(make_model("llama"), place / "huggingface" / "ba3").eval()
    assert sorted(os.listdir(place / "registered-plum")) == sorted(os.listdir(place / "huggingface" / "ba3"))
    by_function = peft.PeftModel.from_pretrained(make_model("llama"), folder).eval()
    tokens = torch.full((1, 3), 7)
    assert torch.equal(by_callback(tokens).logits, by_function(tokens).logits)
    generated = by_callback.generate(input_ids=tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, results[0][1])
    assert torch.equal(generated, results[1][1])


class Counter:
    """What of a tokenizer the wrapper asks for."""

    pad_token_id = 0

    def __len__(self):
        return VOCABULARY

    def save_pretrained(self, folder, **_):
        pass


def begin_mixed(folder, save):
    model = ComposerHFCausalLM(Counter(), folder, init_device="mixed", config_overrides={"attention_dropout": 0.0})
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    trainer = train(model, {"fsdp": {"state_dict_type": "full", "sync_module_states": True}})
    trainer.save_checkpoint(save)
    trainer.close()
    return on_meta


@pytest.mark.slow
def test_a_model_that_rank_0_alone_has_loaded_is_trained_like_any_other(on_ranks):
    alone = train(HuggingFaceModel(make_model("llama")))

    assert [of_rank["mixed"] for of_rank in on_ranks[1]] == [False, True]
    weights = torch.load(on_ranks[0] / "mixed.pt", weights_only=True)["state"]["model"]
    for name, weight in alone.state.model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)
    alone.close()
