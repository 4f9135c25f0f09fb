"""An output layer that is untied from the embeddings at the start or later trains, resumes and is published as such."""

import pytest
import torch
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms import (
    EMA,
    SAM,
    FusedCrossEntropy,
    GradientClipping,
    LogitSoftcap,
    MultiTokenPrediction,
    MuP,
    UntiedHead,
)
from composer.callbacks import HuggingFaceCheckpointer
from composer.functional import apply_untied_head
from composer.models import ComposerGPT, HuggingFaceModel
from composer.optim import Muon

SIZES = {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 31, "max_seq_len": 16}
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "muon": lambda model: Muon(model, lr=0.01),
}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return HuggingFaceModel(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=31,
                n_embd=16,
                n_head=2,
                n_layer=1,
                n_positions=16,
                bos_token_id=1,
                eos_token_id=2,
                attn_pdrop=0.0,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
            )
        )
    )


def make(*algorithms, model=None, optimizer="adamw", max_duration="6ba", **more):
    torch.manual_seed(0)
    model = ComposerGPT(SIZES) if model is None else model()
    tokens = torch.randint(31, (16, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": one, "labels": one, "attention_mask": torch.ones_like(one)} for one in tokens]
    return Trainer(
        model,
        train_dataloader=DataLoader(data, batch_size=4),
        optimizers=OPTIMIZERS[optimizer](model),
        algorithms=list(algorithms),
        max_duration=max_duration,
        device="cpu",
        progress_bar=False,
        seed=3,
        **more,
    )


def trained(*algorithms, **settings):
    with make(*algorithms, **settings) as trainer:
        trainer.fit()
        return {name: weight.detach().clone() for name, weight in trainer.state.model.state_dict().items()}


def weights_of(trained, name="model.wte.weight"):
    return trained[name], trained["model.unembedding.weight"]


METHODS = {
    "alone": list,
    "in microbatches": list,
    "GradientClipping": lambda: [GradientClipping("norm", 0.1)],
    "SAM": lambda: [SAM(0.5)],
    "FusedCrossEntropy": lambda: [FusedCrossEntropy()],
    "LogitSoftcap": lambda: [LogitSoftcap(0.5)],
    "MultiTokenPrediction": lambda: [MultiTokenPrediction()],
    "MuP": lambda: [MuP(8)],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", METHODS)
def test_before_and_after_the_time_weights_are_those_of_a_model_that_is_tied_and_untied_by_hand(kind, optimizer):
    more = {"device_train_microbatch_size": 2} if kind == "in microbatches" else {}
    found = trained(*METHODS[kind](), UntiedHead("3ba"), optimizer=optimizer, **more)
    before = trained(*METHODS[kind](), UntiedHead("3ba"), optimizer=optimizer, max_duration="3ba", **more)
    with make(*METHODS[kind](), optimizer=optimizer, max_duration="3ba", **more) as trainer:
        trainer.fit()
        embedding, head = weights_of(before)
        assert torch.equal(embedding, head)
        torch.testing.assert_close(head, trainer.state.model.model.wte.weight.detach(), rtol=1e-4, atol=1e-5)
        optimizers = [getattr(one, "base_optimizer", one) for one in trainer.state.optimizers]
        apply_untied_head(trainer.state.model, optimizers)
        trainer.fit(duration="3ba")
        expected = trainer.state.model.state_dict()
    assert not torch.equal(*weights_of(found))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def test_averages_are_those_of_the_tied_weight():
    ema = EMA(half_life="1ba", update_interval="1ba")
    with make(ema, UntiedHead("1dur")) as trainer:
        trainer.fit()
        averages = ema.ema_model.named_parameters_dict
        assert torch.equal(averages["model.wte.weight"], averages["model.unembedding.weight"])


@pytest.mark.parametrize("make_model", [None, gpt2])
@pytest.mark.parametrize(("after", "batch"), [("3ba", 2), ("3ba", 3), ("3ba", 5), ("1ep", 4), ("0.5dur", 3), (None, 2)])
def test_a_run_resumes_exactly_before_at_and_after_the_time(after, batch, make_model, tmp_path):
    settings = {"model": make_model, "save_interval": "1ba", "save_filename": "ba{batch}.pt"}
    whole = trained(UntiedHead(after), save_folder=str(tmp_path), **settings)
    resumed = trained(UntiedHead(after), load_path=str(tmp_path / f"ba{batch}.pt"), model=make_model)
    with pytest.warns(UserWarning, match="adding required_on_load algorithm UntiedHead"):
        replayed = trained(load_path=str(tmp_path / f"ba{batch}.pt"), model=make_model)
    for weights in (resumed, replayed):
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weight, whole[name]) for name, weight in weights.items())


def test_a_published_folder_has_both_weights(tmp_path):
    from transformers import GPT2LMHeadModel

    with make(UntiedHead("2ba"), model=gpt2, callbacks=HuggingFaceCheckpointer(str(tmp_path), "6ba")) as trainer:
        trainer.fit()
        expected = trainer.state.model.model
    (folder,) = (path.parent for path in tmp_path.rglob("config.json"))
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    assert not loaded.config.tie_word_embeddings
    assert torch.equal(loaded.lm_head.weight, expected.lm_head.weight)
    assert torch.equal(loaded.transformer.wte.weight, expected.transformer.wte.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.transformer.wte.weight)


def test_flops_are_those_of_the_tied_model():
    model, batch = ComposerGPT(SIZES), {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    expected = model.flops_per_batch(batch)
    apply_untied_head(model)
    assert model.flops_per_batch(batch) == expected


def test_weights_on_the_meta_device_and_times_without_unit_are_refused():
    with pytest.raises(ValueError, match="UntiedHead needs weights, and those of this model are on the meta device"):
        apply_untied_head(ComposerGPT({**SIZES, "device": "meta"}))
    with pytest.raises(TypeError, match="after=3 has no unit"):
        UntiedHead(3)
