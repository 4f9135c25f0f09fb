"""Lightning's Trainer with `AlgorithmCallback` trains as our Trainer does."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from composer import Callback
from composer_algorithms import EMA, SAM, MixUp, NoOpModel, SelectiveBackprop
from composer_events import Algorithm, Event

lightning = pytest.importorskip("lightning.pytorch")
from composer_algorithms.bridges.lightning import AlgorithmCallback  # noqa: E402  # needs lightning

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of few workers, no logger, and its own imports


class Classifier(lightning.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Losses(Callback):
    def __init__(self):
        self.values = []

    def before_backward(self, state, logger):
        self.values.append(state.loss.item())


class Listen(lightning.Callback):
    """Let the algorithms' engine tell of each backward pass, once there is an engine."""

    def __init__(self, algorithms, losses):
        self.algorithms, self.losses = algorithms, losses

    def on_fit_start(self, trainer, pl_module):
        self.algorithms.state.callbacks = [self.losses]


@pytest.fixture
def trainer_of(tmp_path):
    def make(algorithms, callbacks=(), **arguments):
        callback, losses = AlgorithmCallback(algorithms, loss_fn=F.cross_entropy, seed=17), Losses()
        settings = {"max_epochs": 2, "enable_checkpointing": False, **arguments}
        trainer = lightning.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback, Listen(callback, losses), *callbacks],
            **settings,
        )
        return trainer, losses

    return make


def test_it_has_the_losses_and_weights_of_our_trainer(
    case, trainer_of, algorithms_of, images, network, run_of, by_our_trainer
):
    trainer, losses = trainer_of(algorithms_of(case))
    trainer.fit(Classifier(network), DataLoader(images(), batch_size=4))
    run_of(losses.values, network).assert_same(by_our_trainer(case))


@pytest.mark.parametrize("case", ["MixUp", "MixUp of losses", "LabelSmoothing", "GradientClipping", "EMA"])
def test_accumulated_batches_are_our_trainers_microbatches(
    case, trainer_of, algorithms_of, images, network, run_of, by_our_trainer
):
    trainer, losses = trainer_of(algorithms_of(case), accumulate_grad_batches=2)
    trainer.fit(Classifier(network), DataLoader(images(), batch_size=4))
    run_of(losses.values, network).assert_same(by_our_trainer(case, batch_size=8, microbatch_size=4))


def network_weights(checkpoint):
    return {name.removeprefix("network."): weight for name, weight in checkpoint["state_dict"].items()}


def test_the_average_is_validated_and_saved_and_training_goes_on_without_it(
    tmp_path, trainer_of, algorithms_of, images, network, run_of, by_our_trainer, eval_loss_of, assert_weights
):
    expected, loader = by_our_trainer("EMA"), DataLoader(images(), batch_size=4)
    saver = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer, losses = trainer_of(algorithms_of("EMA"), [saver], enable_checkpointing=True)
    module = Classifier(network)
    trainer.fit(module, loader, loader)
    run_of(losses.values, network).assert_same(expected)
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(eval_loss_of(expected.averages), abs=1e-6)
    (validated,) = trainer.validate(module, loader, verbose=False)
    assert validated["val_loss"] == pytest.approx(eval_loss_of(expected.averages), abs=1e-6)
    trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    for name in ("epoch=1", "by_hand", "weights"):
        assert_weights(network_weights(torch.load(tmp_path / f"{name}.ckpt")), expected.averages)
    assert_weights(run_of([], network).weights, expected.weights)


@pytest.mark.parametrize("case", ["EMA", "SWA", "MixUp", "SAM", "StochasticDepth", "LayerFreezing", "BlurPool"])
@pytest.mark.parametrize("step", [3, 4])
def test_a_resumed_run_ends_like_one_that_was_not_interrupted(
    case, step, tmp_path, trainer_of, algorithms_of, images, new_network, run_of, by_our_trainer, assert_weights
):
    # Within an epoch Lightning begins with the first sample again, unless the dataloader itself knows better.
    expected = by_our_trainer(case)
    loader = (StatefulDataLoader if step == 3 else DataLoader)(images(), batch_size=4)
    saver = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    first, _ = trainer_of(algorithms_of(case), [saver], enable_checkpointing=True)
    first.fit(Classifier(new_network()), loader)
    second, losses = trainer_of(algorithms_of(case))
    module = Classifier(new_network())
    second.fit(module, loader, ckpt_path=tmp_path / f"step={step}.ckpt")
    assert losses.values == pytest.approx(expected.losses[-len(losses.values) :], abs=1e-6)
    assert len(losses.values) == (8 - step) * (2 if case == "SAM" else 1)
    assert_weights(run_of([], module.network).weights, expected.weights)


def test_a_checkpoint_of_a_plain_trainer_is_resumed_with_a_warning(
    tmp_path, trainer_of, algorithms_of, images, new_network
):
    loader = DataLoader(images(), batch_size=4)
    plain = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    plain.fit(Classifier(new_network()), loader)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    trainer, losses = trainer_of(algorithms_of("EMA"))
    with pytest.warns(UserWarning, match="saved without algorithms"):
        trainer.fit(Classifier(new_network()), loader, ckpt_path=tmp_path / "plain.ckpt")
    assert len(losses.values) == 4
    assert trainer.callbacks[0].state.timestamp.epoch == 2


def test_a_module_is_itself_again_after_training(trainer_of, algorithms_of, images, network):
    module = Classifier(network)
    trainer, _ = trainer_of(algorithms_of("MixUp"))
    trainer.fit(module, DataLoader(images(), batch_size=4))
    assert module.training_step.__func__ is Classifier.training_step
    assert type(module.on_after_batch_transfer(images()[0], 0)) is tuple


@pytest.mark.parametrize("returns_dict", [False, True])
def test_targets_are_smoothed_wherever_training_step_computes_its_loss(
    returns_dict, trainer_of, algorithms_of, images, network, run_of, by_our_trainer
):
    class Other(Classifier):
        criterion = torch.nn.CrossEntropyLoss()

        def training_step(self, batch, batch_idx):
            images, labels = batch
            assert (labels == labels.long()).all()
            assert labels.max().item() < 4
            loss = self.criterion(input=self(images), target=labels.long())
            return {"loss": loss, "accuracy": (labels == 1).float()} if returns_dict else loss

    trainer, losses = trainer_of(algorithms_of("LabelSmoothing and MixUp"))
    trainer.fit(Other(network), DataLoader(images(), batch_size=4))
    run_of(losses.values, network).assert_same(by_our_trainer("LabelSmoothing and MixUp"))


def test_a_loss_that_cannot_be_reached_is_an_error_and_not_ignored(trainer_of, algorithms_of, images, network):
    class Other(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return -self(x).log_softmax(1).gather(1, y[:, None]).mean()

    trainer, _ = trainer_of(algorithms_of("LabelSmoothing"))
    with pytest.raises(RuntimeError, match="no PyTorch loss with the batch's targets, so LabelSmoothing could not act"):
        trainer.fit(Other(network), DataLoader(images(), batch_size=4))


@pytest.mark.parametrize("case", ["MixUp", "MixUp of losses", "SelectiveBackprop", "SAM"])
def test_mixed_precision_is_our_trainers(case, trainer_of, algorithms_of, network, images, run_of, by_our_trainer):
    trainer, losses = trainer_of(algorithms_of(case), precision="bf16-mixed")
    trainer.fit(Classifier(network), DataLoader(images(), batch_size=4))
    run_of(losses.values, network).assert_same(by_our_trainer(case, precision="amp_bf16"))


class FetchesBatches(Algorithm):
    def match(self, event, state):
        return event is Event.BEFORE_DATALOADER

    def apply(self, event, state, logger): ...


@pytest.mark.parametrize(
    ("algorithm", "loss_fn", "message"),
    [
        (FetchesBatches(), None, "acts on BEFORE_DATALOADER, which Lightning's Trainer never runs"),
        (MixUp(interpolate_loss=True), None, "pass loss_fn to AlgorithmCallback"),
        (SelectiveBackprop(), None, "pass loss_fn to AlgorithmCallback"),
        (SelectiveBackprop(), lambda outputs, targets: outputs.mean(), "Add the parameter reduction='mean'"),
    ],
    ids=lambda value: "",
)
def test_what_no_trainer_can_do_is_refused_when_the_callback_is_made(algorithm, loss_fn, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmCallback(algorithm, loss_fn=loss_fn)


class Manual(Classifier):
    automatic_optimization = False


class Late(Classifier):
    def configure_model(self): ...


@pytest.mark.parametrize(
    ("algorithm", "module", "arguments", "message"),
    [
        (EMA(), Manual, {}, "automatic_optimization is False"),
        (EMA(), Late, {}, "create them in __init__"),
        (EMA(), Classifier, {"max_epochs": -1}, "define no end of training"),
        (SAM(), Classifier, {"accumulate_grad_batches": 2}, "SAM.*accumulate_grad_batches=2"),
        (MixUp(draw_per="batch"), Classifier, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (NoOpModel(), Classifier, {}, "replaced the Classifier"),
        (EMA(), Classifier, {"callbacks": [AlgorithmCallback([SAM()])]}, r"2 of AlgorithmCallback \(EMA; SAM\)"),
    ],
    ids=lambda value: "",
)
def test_what_does_not_go_with_trainer_or_module_is_refused_before_training(
    algorithm, module, arguments, message, trainer_of, images, network
):
    trainer, losses = trainer_of([algorithm], **arguments)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module(network), DataLoader(images(), batch_size=4))
    assert losses.values == []


def test_a_datamodule_that_transfers_batches_itself_is_heeded(
    trainer_of, algorithms_of, images, network, run_of, by_our_trainer
):
    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(images(), batch_size=4)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return tuple(batch)

    trainer, losses = trainer_of(algorithms_of("ProgressiveResizing"))
    trainer.fit(Classifier(network), datamodule=Data())
    run_of(losses.values, network).assert_same(by_our_trainer("ProgressiveResizing"))
