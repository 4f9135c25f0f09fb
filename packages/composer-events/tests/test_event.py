"""The events: their order, names and pairs."""

import pickle

import pytest

from composer_events import Event

# In the order in which they fire. "<" begins what ">" ends, and the last word is what the two have in common.
TABLE = """
init - init
before_load < load
after_load > load
fit_start < fit
iteration_start < iteration
epoch_start < epoch
before_dataloader < dataloader
after_dataloader > dataloader
batch_start < batch
before_train_batch < train_batch
before_forward < forward
after_forward > forward
before_loss < loss
after_loss > loss
before_backward < backward
after_backward > backward
after_train_batch > train_batch
batch_end > batch
batch_checkpoint - batch_checkpoint
epoch_end > epoch
epoch_checkpoint - epoch_checkpoint
iteration_end > iteration
iteration_checkpoint - iteration_checkpoint
fit_end > fit
eval_before_all < eval_all
eval_start < eval
eval_batch_start < eval_batch
eval_before_forward < eval_forward
eval_after_forward > eval_forward
eval_batch_end > eval_batch
eval_end > eval
eval_after_all > eval_all
eval_standalone_start < eval_standalone
eval_standalone_end > eval_standalone
predict_start < predict
predict_batch_start < predict_batch
predict_before_forward < predict_forward
predict_after_forward > predict_forward
predict_batch_end > predict_batch
predict_end > predict
"""
ROWS = [row.split() for row in TABLE.split("\n") if row]


def test_there_are_forty_events_in_the_order_in_which_they_fire():
    assert [event.value for event in Event] == [row[0] for row in ROWS]
    assert [event.name for event in Event] == [row[0].upper() for row in ROWS]
    assert len(Event) == 40


@pytest.mark.parametrize(("name", "half", "canonical"), ROWS)
def test_an_event_knows_its_half_of_a_pair(name, half, canonical):
    event = Event(name)
    assert (event.is_before_event, event.is_after_event) == (half == "<", half == ">")
    assert event.canonical_name == canonical


@pytest.mark.parametrize("event", list(Event))
def test_every_beginning_has_one_end_and_the_other_way_round(event):
    partners = [e for e in Event if e is not event and e.canonical_name == event.canonical_name]
    assert len(partners) == (event.is_before_event or event.is_after_event)


@pytest.mark.parametrize("event", list(Event))
def test_evaluation_and_prediction_are_told_by_the_name(event):
    assert event.is_eval == event.name.startswith("EVAL_")
    assert event.is_predict == event.name.startswith("PREDICT_")


@pytest.mark.parametrize("spelling", ["before_forward", "BEFORE_FORWARD", "Before_Forward", Event.BEFORE_FORWARD])
def test_a_name_in_any_case_stands_for_its_event(spelling):
    assert Event(spelling) is Event.BEFORE_FORWARD


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("befor_forward", "before_forward"), ("EPOCH_STOP", "epoch_start"), ("evalend", "eval_end")]
)
def test_an_unknown_name_is_answered_with_the_nearest_ones(wrong, nearest):
    with pytest.raises(ValueError, match=repr(wrong)) as caught:
        Event(wrong)
    assert repr(nearest) in str(caught.value)


def test_an_event_reads_as_its_name_and_survives_pickling():
    assert str(Event.BATCH_END) == "Event.BATCH_END"
    assert pickle.loads(pickle.dumps(Event.BATCH_END)) is Event.BATCH_END
