"""What `fit` does to weights, time and data."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from composer.core import Callback, DataSpec, Time
from composer.optim import LinearScheduler


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.state.model.parameters()]


def test_weights_equal_those_of_a_hand_written_loop(make_trainer, make_model, make_loader):
    model = make_model()
    expected = copy.deepcopy(model)
    trainer = make_trainer(model=model, train_dataloader=make_loader(32, 8), max_duration="3ep")
    trainer.fit()

    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        for inputs, targets in make_loader(32, 8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(expected.module(inputs), targets).backward()
            optimizer.step()
    for got, want in zip(weights(trainer), expected.parameters(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_microbatches_of_any_size_give_the_weights_of_the_whole_batch(make_trainer, make_loader, size):
    whole = make_trainer(train_dataloader=make_loader(16, 8), max_duration="2ep")
    cut = make_trainer(train_dataloader=make_loader(16, 8), max_duration="2ep", device_train_microbatch_size=size)
    whole.fit()
    cut.fit()
    # Summing at most 8 gradients in another order moves each by a few units in the last place, over 4 steps of 0.1.
    torch.testing.assert_close(weights(cut), weights(whole), rtol=1e-5, atol=1e-6)


def test_the_logged_loss_is_the_mean_over_the_batch_however_it_is_cut(make_trainer, make_loader):
    losses = []
    for size in (8, 3):
        trainer = make_trainer(
            train_dataloader=make_loader(8, 8), max_duration="1ba", device_train_microbatch_size=size
        )
        trainer.fit()
        losses.append(float(trainer.state.total_loss_dict["loss/train/total"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_same_seed_same_weights(make_trainer, make_loader):
    runs = [make_trainer(train_dataloader=make_loader(32, 4, shuffle=True), max_duration="2ep") for _ in range(2)]
    for trainer in runs:
        torch.manual_seed(11)
        trainer.fit()
    for one, other in zip(*map(weights, runs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("max_duration", "batches"),
    [(2, 4), ("2ep", 4), (Time(2, "epoch"), 4), ("3ba", 3), ("10sp", 3), (Time.from_timestring("5ba"), 5)],
)
def test_training_lasts_as_long_as_max_duration_says(make_trainer, max_duration, batches):
    trainer = make_trainer(max_duration=max_duration)
    trainer.fit()
    assert trainer.state.timestamp.batch == batches


def test_duration_extends_from_where_training_stands(make_trainer):
    trainer = make_trainer(max_duration="4ep")
    trainer.fit()
    trainer.fit(duration="1ba")
    assert trainer.state.max_duration == "9ba"
    trainer.fit(duration="1ep")
    assert trainer.state.max_duration == "5ep"
    assert trainer.state.timestamp.batch == 10


def test_a_fit_that_goes_on_mid_epoch_reads_the_very_next_batch(make_trainer, make_data):
    class Seen(Callback):
        def __init__(self):
            self.inputs = []

        def batch_start(self, state, logger):
            self.inputs.append(state.batch[0].clone())

    data = make_data(12)
    seen = Seen()
    trainer = make_trainer(train_dataloader=DataLoader(data, 4, shuffle=True), max_duration="1ba", callbacks=seen)
    trainer.fit()
    trainer.fit(duration="1ba")
    trainer.fit(duration="1ba")
    rows = torch.cat(seen.inputs)
    assert len(torch.unique(rows, dim=0)) == 12


def test_reset_time_trains_the_same_duration_again(make_trainer):
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    trainer.fit(reset_time=True)
    assert trainer.state.timestamp.batch == 2
    assert trainer.state.timestamp.epoch == 1


def test_another_dataloader_takes_over(make_trainer, make_loader):
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    trainer.fit(train_dataloader=make_loader(12, 2), duration="1ep")
    assert trainer.state.timestamp.batch == 2 + 6
    assert trainer.state.device_train_microbatch_size == 2


def test_a_subset_of_batches_makes_an_epoch(make_trainer, make_loader):
    trainer = make_trainer(train_dataloader=make_loader(20, 2), train_subset_num_batches=3, max_duration="2ep")
    trainer.fit()
    assert trainer.state.timestamp.batch == 6


def test_no_batch_is_read_beyond_the_subset(make_trainer, make_loader):
    read = []

    class Counting:
        batch_size = 2

        def __iter__(self):
            for batch in make_loader(20, 2):
                read.append(1)
                yield batch

    make_trainer(train_dataloader=Counting(), train_subset_num_batches=3, max_duration="2ep").fit()
    assert len(read) == 6


def test_a_callback_can_stop_training(make_trainer):
    class Stopper(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 3:
                state.stop_training()

    trainer = make_trainer(max_duration="10ep", callbacks=Stopper())
    trainer.fit()
    assert trainer.state.timestamp.batch == 3


def test_batch_transforms_see_the_batch_and_microbatch_transforms_its_pieces(make_trainer, make_loader):
    sizes = []

    def note(kind):
        def transform(batch):
            sizes.append((kind, len(batch[0])))
            return batch

        return transform

    spec = DataSpec(make_loader(4, 4), batch_transforms=note("batch"), microbatch_transforms=note("microbatch"))
    make_trainer(train_dataloader=spec, device_train_microbatch_size=2, max_duration="1ep").fit()
    assert sizes == [("batch", 4), ("microbatch", 2), ("microbatch", 2)]


def test_an_optimizer_that_needs_a_closure_gets_one(make_trainer, make_model):
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
    trainer = make_trainer(model=model, optimizers=optimizer, max_duration="10ep")
    trainer.fit()
    first = float(trainer.state.total_loss_dict["loss/train/total"])
    assert first < 0.3


def test_losses_of_several_parts_are_summed_and_named(make_trainer, make_model):
    model = make_model()
    loss = model.loss
    model.loss = lambda outputs, batch: {"ce": loss(outputs, batch), "zero": outputs.sum() * 0}
    trainer = make_trainer(model=model, max_duration="1ba")
    trainer.fit()
    losses = trainer.state.total_loss_dict
    assert list(losses) == ["loss/train/ce", "loss/train/zero", "loss/train/total"]
    assert float(losses["loss/train/total"]) == pytest.approx(float(losses["loss/train/ce"]))


def test_bf16_trains_on_the_cpu(make_trainer):
    seen = []

    class Dtypes(Callback):
        def after_forward(self, state, logger):
            seen.append(state.outputs.dtype)

    make_trainer(precision="amp_bf16", max_duration="1ba", callbacks=Dtypes()).fit()
    assert seen == [torch.bfloat16]


def test_without_an_optimizer_decoupled_sgd_is_used_and_said(make_trainer, make_model):
    with pytest.warns(UserWarning, match="No optimizer was specified"):
        trainer = make_trainer(model=make_model(), optimizers=None, max_duration="1ba")
    trainer.fit()
    assert type(trainer.state.optimizers[0]).__name__ == "DecoupledSGDW"


def test_gradients_are_dropped_when_fit_ends(make_trainer):
    trainer = make_trainer(max_duration="1ba")
    trainer.fit()
    assert all(parameter.grad is None for parameter in trainer.state.model.parameters())


def test_a_batch_that_failed_is_trained_on_when_fit_goes_on(make_trainer, make_data):
    class FailOnce(Callback):
        def __init__(self):
            self.trained, self.failed = [], False

        def before_forward(self, state, logger):
            if state.timestamp.batch == 1 and not self.failed:
                self.failed = True
                raise OSError("once")

        def batch_end(self, state, logger):
            self.trained.append(state.batch[0])

    callback = FailOnce()
    loader = DataLoader(make_data(8), 2, shuffle=True)
    trainer = make_trainer(train_dataloader=loader, max_duration="1ep", callbacks=callback)
    with pytest.raises(OSError, match="once"):
        trainer.fit()
    trainer.fit()
    assert trainer.state.timestamp.sample == 8
    assert len(torch.unique(torch.cat(callback.trained), dim=0)) == 8


def test_schedulers_of_the_constructor_wait_for_a_duration_given_to_fit(make_trainer, make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make_trainer(model=model, optimizers=optimizer, schedulers=LinearScheduler())
    trainer.fit(duration="2ep")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


def test_metrics_outside_of_the_model_are_computed_too(make_trainer, make_model, recorder):
    model = make_model()
    metric = MeanSquaredError()
    model.get_metrics = lambda is_train: {"MeanSquaredError": metric}
    model.update_metric = lambda batch, outputs, metric: metric.update(outputs[:, 0], batch[1].float())
    trainer = make_trainer(model=model, max_duration="1ba", loggers=recorder)
    trainer.fit()
    assert float(trainer.state.train_metric_values["MeanSquaredError"]) > 0
