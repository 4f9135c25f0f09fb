"""A Hugging Face Trainer with `AlgorithmTrainerMixin` trains as our Trainer does."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from composer import Callback
from composer import Trainer as ComposerTrainer
from composer.models import ComposerModel
from composer_algorithms import (
    EMA,
    SAM,
    BlurPool,
    LabelSmoothing,
    MixUp,
    NoOpModel,
    SelectiveBackprop,
    SeqLengthWarmup,
)
from composer_events import Algorithm, Event

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from composer_algorithms.bridges.hf import AlgorithmTrainerMixin  # noqa: E402  # needs the above

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers, accelerate and torch warn about each other


class Classifier(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, pixel_values, labels=None):
        logits = self.network(pixel_values)
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class AlgorithmTrainer(AlgorithmTrainerMixin, transformers.Trainer):
    loss_is_scaled_for_ga = False  # compute_loss gives the mean of a microbatch

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size)


class Losses(Callback):
    def __init__(self):
        self.values = []

    def before_backward(self, state, logger):
        self.values.append(state.loss.item())


def compute_loss(outputs, labels, num_items_in_batch=None, reduction="mean"):
    return F.cross_entropy(outputs["logits"], labels, reduction=reduction)


@pytest.fixture
def trainer_of(tmp_path, images, network):
    def make(algorithms, *, model=None, compute_loss_func=compute_loss, folder="out", **arguments):
        settings = {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "lr_scheduler_type": "constant",
            "save_strategy": "no",
            **arguments,
        }
        args = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_grad_norm=0,
            use_cpu=True,
            seed=17,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            **settings,
        )
        model = Classifier(network) if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = AlgorithmTrainer(
            model,
            args,
            train_dataset=images(("pixel_values", "labels")),
            eval_dataset=images(("pixel_values", "labels")),
            optimizers=(optimizer, None),
            compute_loss_func=compute_loss_func,
            algorithms=algorithms,
        )
        losses = Losses()
        trainer.algorithm_state.callbacks.append(losses)
        return trainer, losses

    return make


def test_it_has_the_losses_and_weights_of_our_trainer(case, trainer_of, algorithms_of, network, run_of, by_our_trainer):
    trainer, losses = trainer_of(algorithms_of(case, "pixel_values", "labels"))
    trainer.train()
    run_of(losses.values, network).assert_same(by_our_trainer(case))


@pytest.mark.parametrize("case", ["MixUp", "LabelSmoothing", "GradientClipping", "SAM", "SAM and StochasticDepth"])
def test_accumulated_batches_are_our_trainers_microbatches(
    case, trainer_of, algorithms_of, network, run_of, by_our_trainer
):
    trainer, losses = trainer_of(algorithms_of(case, "pixel_values", "labels"), gradient_accumulation_steps=2)
    trainer.train()
    run_of(losses.values, network).assert_same(by_our_trainer(case, batch_size=8, microbatch_size=4))


def saved_weights(folder):
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    return {name.removeprefix("network."): weight for name, weight in saved.items()}


def test_the_average_is_evaluated_and_saved_and_training_goes_on_without_it(
    tmp_path, trainer_of, algorithms_of, network, run_of, by_our_trainer, eval_loss_of, assert_weights
):
    expected = by_our_trainer("EMA")
    trainer, losses = trainer_of(algorithms_of("EMA"), save_strategy="epoch", eval_strategy="steps", eval_steps=3)
    trainer.train()
    run_of(losses.values, network).assert_same(expected)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(eval_loss_of(expected.averages), abs=1e-6)
    predicted = trainer.predict(trainer.eval_dataset).metrics["test_loss"]
    assert predicted == pytest.approx(eval_loss_of(expected.averages), abs=1e-6)
    trainer.save_model(str(tmp_path / "final"))
    assert_weights(saved_weights(tmp_path / "final"), expected.averages)
    assert_weights(saved_weights(tmp_path / "out" / "checkpoint-8"), expected.averages)
    assert_weights(run_of([], network).weights, expected.weights)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["EMA", "SWA", "MixUp", "SAM", "LayerFreezing"])
def test_a_resumed_run_ends_like_one_that_was_not_interrupted(
    case, tmp_path, trainer_of, algorithms_of, run_of, by_our_trainer, assert_weights, new_network
):
    expected = by_our_trainer(case)
    for number, resume in enumerate((None, *(str(tmp_path / "0" / f"checkpoint-{step}") for step in (3, 4)))):
        model = Classifier(new_network())
        algorithms = algorithms_of(case, "pixel_values", "labels")
        trainer, losses = trainer_of(algorithms, model=model, folder=str(number), save_strategy="steps", save_steps=1)
        trainer.train(resume_from_checkpoint=resume)
        assert losses.values == pytest.approx(expected.losses[-len(losses.values) :], abs=1e-6)
        assert_weights(run_of([], model.network).weights, expected.weights)
        if case == "EMA":
            assert_weights(averages_of(algorithms, Classifier(new_network())), expected.averages)


def averages_of(algorithms, model):
    copy = algorithms[-1].get_ema_model(model)
    return {name: tensor.detach() for name, tensor in copy.network.state_dict().items()}


def test_the_best_model_is_loaded_with_the_average_that_it_was(trainer_of, algorithms_of, eval_loss_of):
    trainer, _ = trainer_of(
        algorithms_of("EMA"),
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that it is not the last one
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best.endswith("checkpoint-4")
    evaluated = trainer.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(eval_loss_of(saved_weights(Path(best))), abs=1e-6)
    assert evaluated == pytest.approx(trainer.state.best_metric, abs=1e-6)


def test_a_checkpoint_of_a_plain_trainer_is_resumed_with_a_warning(tmp_path, trainer_of, algorithms_of, new_network):
    first, _ = trainer_of(algorithms_of("EMA"), folder="plain", save_strategy="epoch")
    first.train()
    checkpoint = tmp_path / "plain" / "checkpoint-4"
    (checkpoint / "composer_algorithms.pt").unlink()
    second, _ = trainer_of(algorithms_of("EMA"), model=Classifier(new_network()))
    with pytest.warns(UserWarning, match="saved without algorithms"):
        second.train(resume_from_checkpoint=str(checkpoint))
    assert second.algorithm_state.timestamp.epoch == 2
    assert second.algorithm_state.timestamp.batch == 8


def test_a_checkpoint_of_other_algorithms_is_refused(tmp_path, trainer_of, algorithms_of, new_network):
    first, _ = trainer_of(algorithms_of("EMA"), folder="first", save_strategy="epoch")
    first.train()
    second, _ = trainer_of(algorithms_of("SWA"), model=Classifier(new_network()))
    with pytest.raises(ValueError, match=r"\['Reseed', 'SWA'\] are not those of the checkpoint, \['Reseed', 'EMA'\]"):
        second.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))


# Of two losses of one batch, as MixUp(interpolate_loss=True) has them, the gradients are rounded together there.
@pytest.mark.parametrize("case", ["MixUp", "LabelSmoothing", "SelectiveBackprop", "SAM"])
def test_mixed_precision_is_our_trainers(case, trainer_of, algorithms_of, network, run_of, by_our_trainer):
    trainer, losses = trainer_of(algorithms_of(case, "pixel_values", "labels"), bf16=True)
    trainer.train()
    run_of(losses.values, network).assert_same(by_our_trainer(case, precision="amp_bf16"))


class SavesCheckpoints(Algorithm):
    """Acts on an event that the Trainer never comes to, though only later."""

    def match(self, event, state):
        return event is Event.BATCH_CHECKPOINT and state.timestamp.batch > 3

    def apply(self, event, state, logger): ...


def without_reduction(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"], labels)


@pytest.mark.parametrize(
    ("algorithms", "arguments", "message"),
    [
        ([SavesCheckpoints()], {}, "acts on BATCH_CHECKPOINT, which the Hugging Face Trainer never runs"),
        ([LabelSmoothing(0.1)], {"compute_loss_func": None}, "LabelSmoothing.*Pass compute_loss_func"),
        ([MixUp(interpolate_loss=True)], {"compute_loss_func": None}, "MixUp.*Pass compute_loss_func"),
        ([SelectiveBackprop()], {"compute_loss_func": without_reduction}, "Add the parameter reduction='mean'"),
        ([MixUp(draw_per="batch")], {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ([SAM()], {"fp16": True}, r"SAM.*fp16=True.*bf16=True"),
        ([], {"auto_find_batch_size": True}, "auto_find_batch_size"),
        ([NoOpModel()], {}, "replaced the Classifier"),
    ],
    ids=lambda value: "",
)
def test_what_it_cannot_do_is_refused_when_it_is_made(algorithms, arguments, message, trainer_of):
    with pytest.raises(ValueError, match=message):
        trainer_of(algorithms, **arguments)


def test_a_model_that_is_made_anew_is_refused(tmp_path, images, new_network):
    with pytest.raises(ValueError, match="model_init creates a new model"):
        AlgorithmTrainer(
            args=transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
            model_init=lambda: Classifier(new_network()),
            algorithms=[EMA()],
        )


def test_a_loss_that_passes_the_mixin_by_is_an_error(tmp_path, images, network):
    class OtherLoss(AlgorithmTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs)["loss"]

    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], remove_unused_columns=False)
    trainer = OtherLoss(Classifier(network), args, train_dataset=images(("pixel_values", "labels")))
    with pytest.raises(RuntimeError, match="put the class that overrides compute_loss after the mixin"):
        trainer.train()


def test_a_model_with_its_own_loss_and_the_trainers_own_dataloader_do_as_well(tmp_path, images, network):
    class Plain(AlgorithmTrainerMixin, transformers.Trainer):
        pass

    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], num_train_epochs=1.5, per_device_train_batch_size=4
    )
    data = images(("pixel_values", "labels"))
    trainer = Plain(Classifier(network), args, train_dataset=data, algorithms=[EMA(half_life="2ba"), BlurPool()])
    trainer.train()
    assert trainer.algorithm_state.timestamp.batch == 6
    assert trainer.algorithm_state.timestamp.epoch == 1
    assert any(type(module).__name__ == "BlurMaxPool2d" for module in network.modules())


class Language(nn.Module):
    """A model of tokens that computes its loss within its forward pass, over the tokens that have labels."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.network = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits = self.network(input_ids)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)}


class LanguageForOurTrainer(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = Language()

    def forward(self, batch):
        return self.model(**batch)

    def loss(self, outputs, batch):
        return outputs["loss"]


@pytest.mark.parametrize("pieces", [1, 2])
def test_tokens_are_counted_after_sequences_were_shortened(pieces, tmp_path):
    tokens = torch.randint(16, (16, 32), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def warmup():
        return SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=32, step_size=8)

    expected = LanguageForOurTrainer()
    ours = ComposerTrainer(
        expected,
        train_dataloader=DataLoader(data, batch_size=4 * pieces),
        optimizers=torch.optim.SGD(expected.parameters(), lr=0.5),
        device_train_microbatch_size=4,
        max_duration="2ep",
        algorithms=warmup(),
        device="cpu",
        progress_bar=False,
    )
    ours.fit()
    ours.close()
    args = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=pieces,
        lr_scheduler_type="constant",
        save_strategy="no",
        max_grad_norm=0,
        use_cpu=True,
        report_to=[],
    )
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = AlgorithmTrainer(model, args, train_dataset=data, optimizers=(optimizer, None), algorithms=warmup())
    trainer.loss_is_scaled_for_ga = None  # the model says so itself
    trainer.train()
    for found, weight in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-6)
