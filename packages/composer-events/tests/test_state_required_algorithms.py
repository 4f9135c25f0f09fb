from types import SimpleNamespace

import pytest

from composer_events import Algorithm, Event, State
from composer_time import Time, TimeUnit

CALLS = []


class Model:
    """As much of a model as loading asks for."""

    surgery = ()

    def state_dict(self):
        return {}

    def load_state_dict(self, state, strict):
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])


class Surgery(Algorithm):
    def __init__(self, depth=1, **settings):
        self.depth, self.settings = depth, settings

    def __repr__(self):
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__qualname__}(depth={self.depth!r}{settings})"

    @staticmethod
    def required_on_load():
        return True

    def match(self, event, state):
        return event is Event.INIT

    def apply(self, event, state, logger):
        CALLS.append((self, event, logger))
        state.model.surgery = (*state.model.surgery, repr(self))


class LateSurgery(Surgery):
    pass


class EarlySurgery(Surgery):
    surgery_rank = 1


class FailingSurgery(Surgery):
    def apply(self, event, state, logger):
        raise ZeroDivisionError("no layers")


class Optional(Surgery):
    @staticmethod
    def required_on_load():
        return False


@pytest.fixture(autouse=True)
def forget_calls():
    CALLS.clear()


def load(state, *algorithms, **settings):
    saved = [(text.partition("(")[0], {"repr": text}) for text in algorithms]
    state.load_model_state({"model": {}, "algorithms": saved}, logger="logger", strict=True, **settings)


def make_state(*algorithms):
    return State(Model(), 0, algorithms=algorithms)


def test_a_required_algorithm_that_is_absent_is_added_and_applied():
    state = make_state()
    with pytest.warns(UserWarning, match=r"^Automatically adding required_on_load algorithm Surgery\(depth=3\)"):
        load(state, "Surgery(depth=3)")
    assert [repr(algorithm) for algorithm in state.algorithms] == ["Surgery(depth=3)"]
    assert [(state.algorithms[0], Event.INIT, "logger")] == CALLS
    assert state.model.surgery == ("Surgery(depth=3)",)


def test_loading_everything_adds_it_before_the_weights_are_loaded():
    class Checking(Model):
        def load_state_dict(self, state, strict):
            assert self.surgery
            return super().load_state_dict(state, strict)

    saved = make_state(Surgery(2)).state_dict()
    state = State(Checking(), 0)
    with pytest.warns(UserWarning, match="Automatically adding"):
        state.load_state_dict(saved)
    assert state.algorithms[0].depth == 2


def test_several_are_applied_in_the_order_of_the_passes():
    state = make_state()
    with pytest.warns(UserWarning, match="Automatically adding"):
        load(
            state,
            "Surgery(depth=1)",
            "LateSurgery(depth=2)",
            algorithm_passes=[lambda algorithms, event: list(reversed(algorithms))],
        )
    assert state.model.surgery == ("LateSurgery(depth=2)", "Surgery(depth=1)")


def test_several_are_applied_in_the_engines_own_order_where_no_passes_are_given():
    state = make_state()
    said = (
        r"^Automatically adding required_on_load algorithms EarlySurgery\(depth=2\), Surgery\(depth=1\), .*"
        r"load_exclude_algorithms=\['EarlySurgery', 'Surgery'\]"
    )
    with pytest.warns(UserWarning, match=said) as caught:
        load(state, "Surgery(depth=1)", "EarlySurgery(depth=2)")
    assert len(caught) == 1
    assert state.model.surgery == ("EarlySurgery(depth=2)", "Surgery(depth=1)")


def define_anew(depth_factor):
    """Define a class under a name that is taken already, as running a notebook's cell twice does."""

    class Redefined(Surgery):
        def __init__(self, depth):
            super().__init__(depth * depth_factor)

        def __repr__(self):
            return f"Redefined(depth={self.depth // depth_factor})"

    Redefined.__qualname__ = "Redefined"
    return Redefined


def test_an_instance_of_a_class_that_was_defined_anew_is_there_already():
    old = define_anew(10)
    new = define_anew(100)
    for algorithm_class in (old, new):
        state = make_state(algorithm_class(3))
        load(state, "Redefined(depth=3)")
        assert len(state.algorithms) == 1


def test_of_a_class_that_was_defined_anew_the_newest_is_taken():
    classes = [define_anew(factor) for factor in (10, 100, 1000)]
    state = make_state()
    with pytest.warns(UserWarning, match="Automatically adding"):
        load(state, "Redefined(depth=3)")
    assert type(state.algorithms[0]) is classes[-1]


@pytest.mark.parametrize("text", ["Optional(depth=1)", "NeverHeardOf(depth=1)", "<Surgery object at 0x7f>"])
def test_what_is_not_required_or_not_known_is_left_out(text):
    state = make_state()
    load(state, text)
    assert list(state.algorithms) == []


def test_what_is_excluded_is_left_out():
    state = make_state()
    load(state, "Surgery(depth=1)", exclude_algorithms=["Surgery"])
    assert list(state.algorithms) == []


def test_a_name_to_leave_out_that_the_checkpoint_does_not_have_is_told():
    state = make_state()
    said = r"load_exclude_algorithms names 'Surgeries', which the checkpoint does not have. It has 'Surgery'."
    with pytest.warns(UserWarning, match=said), pytest.warns(UserWarning, match="Automatically adding"):
        load(state, "Surgery(depth=1)", exclude_algorithms=["Surgeries"])
    assert len(state.algorithms) == 1


def test_one_that_is_there_already_is_not_added():
    state = make_state(Surgery(3))
    load(state, "Surgery(depth=3)")
    assert len(state.algorithms) == 1
    assert CALLS == []


def test_one_that_is_there_with_other_settings_is_kept_with_a_warning():
    state = make_state(Surgery(4))
    with pytest.warns(UserWarning, match=r"^required_on_load algorithm Surgery was Surgery\(depth=3\)"):
        load(state, "Surgery(depth=3)")
    assert [algorithm.depth for algorithm in state.algorithms] == [4]


def test_the_settings_may_be_literals_events_and_times():
    settings = {
        "numbers": [1, -2.5, (3,), {4}, float("inf")],
        "text": "a'b",
        "nothing": None,
        "flags": {"on": True},
        "when": [Event.AFTER_LOAD],
        "length": Time(3, TimeUnit.EPOCH),
        "unit": TimeUnit.BATCH,
    }
    text = (
        "Surgery(2, numbers=[1, -2.5, (3,), {4}, inf], text=\"a'b\", nothing=None, flags={'on': True}, "
        "when=[Event.AFTER_LOAD], length=Time(3, TimeUnit.EPOCH), unit=TimeUnit.BATCH)"
    )
    state = make_state()
    with pytest.warns(UserWarning, match="Automatically adding"):
        load(state, text)
    assert state.algorithms[0].depth == 2
    assert state.algorithms[0].settings == settings


@pytest.mark.parametrize(
    "arguments",
    [
        "depth=__import__('os').system('touch {marker}')",
        "depth=open('{marker}', 'w')",
        "depth=[].__class__",
        "depth=Event.__class__",
        "depth=Event.NO_SUCH_EVENT",
        "depth=Time.__init__",
        "depth=Surgery()",
        "depth=1 + 1",
        "depth=lambda: 1",
        "depth=[x for x in (1,)]",
        "depth=f'{{1}}'",
        "**{{'depth': 1}}",
        "*[1]",
        "depth={{**{{}}}}",
        "depth={{[]}}",
        "depth=",
        "depth=" + "(" * 500,
        "depth=" + "-" * 5_000 + "1",
        "depth='" + "x" * 20_000 + "'",
    ],
)
def test_anything_else_in_a_checkpoint_is_not_evaluated(arguments, tmp_path):
    marker = tmp_path / "evaluated"
    state = make_state()
    with pytest.warns(UserWarning, match=r"^required_on_load algorithm Surgery could not be rebuilt"):
        load(state, f"Surgery({arguments.format(marker=marker)})")
    assert list(state.algorithms) == []
    assert not marker.exists()


def test_a_text_that_calls_another_class_is_not_evaluated():
    state = make_state()
    with pytest.warns(UserWarning, match="could not be rebuilt"):
        state.load_model_state({"model": {}, "algorithms": [("Surgery", {"repr": "LateSurgery(1)"})]}, None, True)
    assert list(state.algorithms) == []


def test_one_that_fails_says_how_to_leave_it_out():
    with pytest.raises(ValueError, match=r"load_exclude_algorithms=\['FailingSurgery'\]") as caught:
        load(make_state(), "FailingSurgery(depth=1)")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_one_that_belongs_before_an_algorithm_that_has_been_applied_is_refused():
    state = make_state(LateSurgery(5))

    def late_last(algorithms, event):
        return sorted(algorithms, key=lambda algorithm: isinstance(algorithm, LateSurgery))

    with pytest.raises(ValueError, match=r"load_exclude_algorithms=\['Surgery'\]"):
        load(state, "Surgery(depth=1)", algorithm_passes=[late_last])
    assert [algorithm.depth for algorithm in state.algorithms] == [5]
    assert CALLS == []


def test_the_dict_of_old_checkpoints_adds_nothing():
    state = make_state()
    state.load_model_state({"model": {}, "algorithms": {"Surgery": {"repr": "Surgery(depth=1)"}}}, None, True)
    assert list(state.algorithms) == []


def test_algorithms_get_their_state_by_class_and_number():
    class Counting(Optional):
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    first, second = Counting(), Counting()
    name = Counting.__qualname__
    make_state(first, second).load_state_dict({"algorithms": [(name, {"count": 1}), [name, {"count": 2}]]})
    assert (first.count, second.count) == (1, 2)
