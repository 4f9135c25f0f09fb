"""A Hugging Face folder of a model that an algorithm has changed computes the same, or the user is told."""

import inspect
import logging
from contextlib import closing

import pytest
import torch
import transformers

from composer import Trainer, algorithms
from composer.callbacks import HuggingFaceCheckpointer
from composer.core import Algorithm, Event
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint
from composer.utils import dist
from composer_checkpoint import UnfittingWeightsError
from composer_dist.testing import run_ranks

IDS = torch.arange(16)[None] % 31
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
# Weights large enough for each change to show in the logits.
CONFIGS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3, eos_token_id=2
    ),
    "llama": transformers.LlamaConfig(
        vocab_size=32, max_position_embeddings=32, initializer_range=0.3, eos_token_id=2, **SIZES
    ),
    "bert": transformers.BertConfig(vocab_size=32, max_position_embeddings=32, initializer_range=0.3, **SIZES),
}
CLASSES = {
    "gpt2": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "bert": transformers.BertForMaskedLM,
}
ARGUMENTS = {
    "Alibi": {"max_sequence_length": 32},
    "Factorize": {"min_features": 8, "latent_features": 4},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "LogitSoftcap": {"cap": 0.1},
    "MuP": {"base_width": 8, "base_heads": 1},
    "SeqLengthWarmup": {"max_seq_length": 16},
}
FOR_OTHER_MODELS = {"NoOpModel", "StochasticDepth", "WhiteningInit"}
REFUSED = {"Factorize", "GatedLinearUnits", "QKNorm", "ValueResidual"}
TOLD = {"Alibi", "LogitSoftcap", "MuP"}


def changes_models(kind):
    return (
        inspect.isclass(kind) and issubclass(kind, Algorithm) and Event.INIT in (getattr(kind, "acts_on", None) or ())
    )


NAMES = sorted({name for name, kind in vars(algorithms).items() if changes_models(kind)} - FOR_OTHER_MODELS)


def make_model(family):
    torch.manual_seed(1)
    return HuggingFaceModel(CLASSES[family](CONFIGS[family]), use_logits=True)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "family"),
    [(name, family) for name in NAMES for family in CLASSES if name != "GatedLinearUnits" or family == "bert"],
)
def test_a_folder_computes_what_the_model_computes_or_tells(name, family, tmp_path, caplog):
    model = make_model(family)
    algorithm = getattr(algorithms, name)(**ARGUMENTS.get(name, {}))
    sample = {"input_ids": IDS[0], "labels": IDS[0]}
    trainer = Trainer(
        model,
        train_dataloader=torch.utils.data.DataLoader([sample] * 2, batch_size=2),
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-3),
        max_duration="1ba",
        algorithms=algorithm,
        callbacks=HuggingFaceCheckpointer(str(tmp_path / "hf"), "1ba"),
        save_folder=str(tmp_path / "own"),
        progress_bar=False,
    )
    with closing(trainer):
        if name in REFUSED and (name, family) != ("Factorize", "gpt2"):  # which has no nn.Linear
            with pytest.raises(UnfittingWeightsError, match="Algorithms that add or replace layers"):
                trainer.fit()
            assert trainer.state.timestamp.batch == 0
            return
        trainer.fit()
    write_huggingface_pretrained_from_composer_checkpoint(str(tmp_path / "own" / "latest-rank0.pt"), tmp_path / "later")
    expected = logits_of(model.model)
    for folder in (tmp_path / "hf" / "huggingface" / "ba1", tmp_path / "later"):
        told = [record.getMessage() for record in caplog.records if "from_pretrained does not apply" in record.message]
        loaded = CLASSES[family].from_pretrained(folder)
        if torch.allclose(logits_of(loaded), expected, atol=1e-4):
            continue
        assert len(told) == 2, "nobody is told that the folder computes something else"
        assert name in told[0]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            HuggingFaceModel(loaded)
        assert "from_pretrained made it without" in caplog.text
        return
    assert not told
    assert name not in TOLD or family == "llama"


def test_the_configuration_of_the_caller_stays_as_it_was():
    before = {family: config.to_dict() for family, config in CONFIGS.items()}
    for family in CLASSES:
        model = make_model(family)
        algorithms.SquaredReLU().function(model)
        algorithms.LogitSoftcap().function(model)
    assert {family: config.to_dict() for family, config in CONFIGS.items()} == before


class Unready(HuggingFaceCheckpointer):
    def transform_metadata(self, metadata):
        raise LookupError("no template")


def begin_on_two_ranks(folder):
    """Return what the first event raises on this rank."""
    model, samples = make_model("gpt2"), [{"input_ids": IDS[0], "labels": IDS[0]}] * 2
    with Trainer(
        model,
        train_dataloader=torch.utils.data.DataLoader(samples, batch_size=1, sampler=dist.get_sampler(samples)),
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-3),
        max_duration="1ba",
        callbacks=Unready(folder, "1ba"),
        progress_bar=False,
    ) as trainer:
        try:
            trainer.fit()
        except LookupError as error:
            return str(error)


@pytest.mark.slow
def test_an_error_of_the_first_rank_is_raised_on_all(tmp_path):
    assert run_ranks(begin_on_two_ranks, str(tmp_path / "hf"), store=tmp_path / "store") == ["no template"] * 2
