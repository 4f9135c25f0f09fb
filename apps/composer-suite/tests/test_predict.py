"""Prediction: outputs on the CPU, in order, with their events, and nothing else changed."""

import pytest
import torch
from torch import nn

from composer.core import Callback, DataSpec
from composer.models import ComposerModel

PREDICT_BATCH = ["PREDICT_BATCH_START", "PREDICT_BEFORE_FORWARD", "PREDICT_AFTER_FORWARD", "PREDICT_BATCH_END"]


@pytest.fixture
def eager(make_model, make_loader):
    """The outputs that the untrained model gives by itself."""
    model = make_model().eval()
    with torch.no_grad():
        return [model(batch) for batch in make_loader(10, 4)]


def test_the_outputs_are_those_of_the_model_batch_by_batch(make_trainer, make_loader, eager):
    outputs = make_trainer().predict(make_loader(10, 4))
    assert [len(output) for output in outputs] == [4, 4, 2]
    for output, expected in zip(outputs, eager, strict=True):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        assert not output.requires_grad


def test_the_events_of_a_prediction(make_trainer, make_loader, recorder):
    trainer = make_trainer(loggers=recorder)
    recorder.seen.clear()
    trainer.predict(make_loader(10, 4), subset_num_batches=2)
    assert recorder.events() == ["PREDICT_START", *PREDICT_BATCH, *PREDICT_BATCH, "PREDICT_END"]


def test_the_clock_of_a_prediction_counts_from_its_first_batch(make_trainer, make_loader):
    class Count(Callback):
        def __init__(self):
            self.seen = []

        def predict_batch_end(self, state, logger):
            stamp = state.predict_timestamp
            self.seen.append((int(stamp.batch), int(stamp.sample), state.dataloader_label))
            assert stamp.batch_wct.total_seconds() > 0

    count = Count()
    trainer = make_trainer(callbacks=count)
    for _ in range(2):
        trainer.predict(make_loader(10, 4), 2)
    assert count.seen == [(1, 4, "predict"), (2, 8, "predict")] * 2


def test_without_return_outputs_a_callback_can_take_them(make_trainer, make_loader, eager):
    class Take(Callback):
        def __init__(self):
            self.taken = []

        def predict_after_forward(self, state, logger):
            self.taken.append(state.outputs)

    take = Take()
    assert make_trainer(callbacks=take).predict(make_loader(10, 4), return_outputs=False) == []
    torch.testing.assert_close(torch.cat(take.taken), torch.cat(eager))


def test_microbatches_give_the_same_outputs(make_trainer, make_loader, eager, recorder):
    trainer = make_trainer(loggers=recorder)
    outputs = trainer.predict(make_loader(10, 4), device_predict_microbatch_size=3)
    assert recorder.seen.count("PREDICT_BATCH_START") == 3
    assert recorder.seen.count("PREDICT_BEFORE_FORWARD") == 5  # 3 + 1, 3 + 1, 2
    for output, expected in zip(outputs, eager, strict=True):
        torch.testing.assert_close(output, expected)


def test_outputs_of_several_parts_are_joined_part_by_part(make_trainer, make_loader):
    class Twofold(ComposerModel):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, batch):
            logits = self.linear(batch[0])
            return {"logits": logits, "pair": (logits.sum(1), logits.mean())}

        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs["logits"], batch[1])

    trainer = make_trainer(model=Twofold())
    whole = trainer.predict(make_loader(4, 4))[0]
    cut = trainer.predict(make_loader(4, 4), device_predict_microbatch_size=2)[0]
    torch.testing.assert_close(cut["logits"], whole["logits"])
    torch.testing.assert_close(cut["pair"][0], whole["pair"][0])
    assert cut["pair"][1].shape == (2,)  # one mean for each part: what they make together, only the model knows


def test_prediction_leaves_training_as_it_was(make_trainer, make_loader):
    trainer = make_trainer(max_duration="3ba")
    trainer.fit()
    state = trainer.state
    state.model.train()
    before = (state.dataloader, state.dataloader_label, state.dataloader_len, state.timestamp)
    trainer.predict(make_loader(10, 5))
    assert (state.dataloader, state.dataloader_label, state.dataloader_len, state.timestamp) == before
    assert state.model.training


def test_a_model_is_predicted_with_before_there_is_anything_to_train_on(make_trainer, make_loader, eager):
    trainer = make_trainer(train_dataloader=None)
    outputs = trainer.predict(make_loader(10, 4))
    torch.testing.assert_close(torch.cat(outputs), torch.cat(eager))
    assert trainer.state.dataloader is None


def test_the_transforms_of_a_data_spec_act_on_what_is_predicted(make_trainer, make_loader, eager):
    spec = DataSpec(make_loader(10, 4), batch_transforms=lambda batch: [batch[0] * 0, batch[1]])
    outputs = make_trainer().predict(spec)
    torch.testing.assert_close(outputs[0], outputs[0][:1].expand(4, 2))


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "said"),
    [
        ((5,), {}, TypeError, "dataloader=5 is not an iterable"),
        (([], 0), {}, ValueError, "subset_num_batches=0 must be"),
        (([],), {"device_predict_microbatch_size": 0}, ValueError, "device_predict_microbatch_size=0 must be"),
        (([],), {"device_predict_microbatch_size": 1.5}, TypeError, "device_predict_microbatch_size=1.5 must be"),
    ],
)
def test_what_cannot_be_predicted_is_refused(make_trainer, recorder, arguments, settings, error, said):
    trainer = make_trainer(loggers=recorder)
    with pytest.raises(error, match=said):
        trainer.predict(*arguments, **settings)
    assert "PREDICT_START" not in recorder.seen
