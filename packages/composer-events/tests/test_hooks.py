"""What a bare `Algorithm` and a bare `Callback` are."""

import pickle

import pytest

from composer_events import Algorithm, Callback, Event, LoggerDestination, Serializable


class Bare(Algorithm):
    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        return None


class KeepNothing(LoggerDestination):
    pass


def test_the_public_attributes_of_a_callback_are_one_method_for_each_event_and_six_more():
    public = {name for name in dir(Callback()) if not name.startswith("_")}
    more = {"state_dict", "load_state_dict", "run_event", "close", "post_close", "saves_checkpoints"}
    assert public - more == {e.value for e in Event}


@pytest.mark.parametrize("event", list(Event))
def test_every_method_of_a_callback_does_nothing_and_is_documented(event):
    assert getattr(Callback(), event.value)(None, None) is None
    assert getattr(Callback, event.value).__doc__.endswith(".")


def test_run_event_calls_the_method_of_that_name_and_returns_its_result():
    class Answer(Callback):
        def eval_end(self, state, logger):
            return state, logger

    assert Answer().run_event(Event.EVAL_END, 1, 2) == (1, 2)
    assert Answer().run_event(Event.EVAL_START, 1, 2) is None


def test_a_callback_may_be_closed_again_and_again():
    callback = Callback()
    for _ in range(2):
        callback.close(None, None)
        callback.post_close()


@pytest.mark.parametrize("cls", [Callback, Bare, KeepNothing])
def test_a_constructor_takes_whatever_a_subclass_hands_on(cls):
    assert isinstance(cls(1, anything=2), Serializable)


@pytest.mark.parametrize("cls", [Callback, KeepNothing])
def test_a_callback_keeps_nothing_in_a_checkpoint(cls):
    callback = pickle.loads(pickle.dumps(cls()))
    assert callback.state_dict() == {}
    callback.load_state_dict({})


def test_an_algorithm_has_to_match_and_apply():
    with pytest.raises(TypeError, match="abstract"):
        Algorithm()


def test_an_algorithm_asks_for_nothing_special():
    algorithm = Bare()
    assert algorithm.find_unused_parameters is False
    assert algorithm.backwards_create_graph is False
    assert algorithm.required_on_load() is False
    assert Bare.required_on_load() is False
    assert algorithm.surgery_rank == 4
    assert not any([algorithm.runs_first, algorithm.runs_last, algorithm.runs_before, algorithm.runs_after])


def test_a_checkpoint_keeps_how_an_algorithm_was_made():
    algorithm = Bare()
    assert algorithm.state_dict() == {"repr": repr(algorithm)}
    algorithm.load_state_dict({})


def test_a_destination_takes_everything_and_keeps_nothing(tmp_path):
    place = KeepNothing()
    place.log_hyperparameters({"lr": 1.0})
    place.log_metrics({"loss": 1.0})
    place.log_table(["a"], [[1]])
    place.log_images([])
    place.log_traces({"a": 1})
    place.upload_file(None, "a", tmp_path, overwrite=True)
    assert place.can_upload_files() is False
    with pytest.raises(NotImplementedError, match=r"KeepNothing keeps no files, so 'a\.pt'"):
        place.download_file("a.pt", "b.pt")
