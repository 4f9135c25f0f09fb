import re

import pytest

from composer_events import DataSpec, Evaluator, Event, State, ensure_evaluator
from composer_events.evaluator import validate_eval_automicrobatching


class Loader(list):
    batch_size = 4


class Metric:
    def __init__(self, name="metric"):
        self.name = name


def test_a_dataloader_becomes_a_data_spec_and_gives_the_microbatch_size():
    evaluator = Evaluator(label="test", dataloader=Loader([1]))
    assert isinstance(evaluator.dataloader, DataSpec)
    assert evaluator.device_eval_microbatch_size == 4
    assert (evaluator.label, evaluator.metric_names, evaluator.subset_num_batches) == ("test", None, None)
    assert evaluator.eval_interval is None
    assert not evaluator.auto_microbatching


@pytest.mark.parametrize("size", [2, 0.5])
def test_a_given_microbatch_size_is_kept(size):
    assert Evaluator(label="a", dataloader=[], device_eval_microbatch_size=size).device_eval_microbatch_size == size


def test_a_dataloader_without_batch_size_needs_a_microbatch_size():
    with pytest.raises(AttributeError, match="device_eval_microbatch_size is needed"):
        Evaluator(label="a", dataloader=[])


def test_a_batch_size_of_none_is_looked_for_in_the_batch_sampler():
    loader = Loader()
    loader.batch_size = None
    with pytest.raises(ValueError, match="batch_size=None"):
        Evaluator(label="a", dataloader=loader)
    loader.batch_sampler = Loader()
    assert Evaluator(label="a", dataloader=loader).device_eval_microbatch_size == 4


def test_a_batch_size_of_none_will_do_where_batches_are_split_in_a_way_of_their_own():
    loader = Loader()
    loader.batch_size = None
    spec = DataSpec(loader, split_batch=lambda batch, size: [batch])
    assert Evaluator(label="a", dataloader=spec).device_eval_microbatch_size is None


@pytest.mark.parametrize("pattern", ["Accuracy(", "*", "[a"])
def test_a_metric_name_that_is_no_regular_expression_is_refused_at_once(pattern):
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        Evaluator(label="a", dataloader=Loader(), metric_names=["Loss", pattern])


def test_an_automatic_microbatch_size_begins_at_the_batch_size_with_a_warning():
    with pytest.warns(UserWarning, match="CUDA errors"):
        evaluator = Evaluator(label="a", dataloader=Loader(), device_eval_microbatch_size="auto")
    assert evaluator.auto_microbatching
    assert evaluator.device_eval_microbatch_size == 4


def test_an_automatic_microbatch_size_does_not_go_with_sequence_parallelism():
    loader = Loader()
    loader.seq_parallel_world_size = 2
    with pytest.raises(ValueError, match="seq_parallel_world_size=2"):
        Evaluator(label="a", dataloader=loader, device_eval_microbatch_size="auto")


@pytest.mark.parametrize("size", ["4", [4], 0, -1, True, False])
def test_a_microbatch_size_of_another_kind_is_refused(size):
    with pytest.raises(ValueError, match="neither a number of samples above 0 nor 'auto'"):
        Evaluator(label="a", dataloader=Loader(), device_eval_microbatch_size=size)


@pytest.mark.parametrize("names", ["Accuracy", ("Accuracy",), [1]])
def test_metric_names_that_are_no_list_of_strings_are_refused(names):
    with pytest.raises(ValueError, match="should be a list of strings"):
        Evaluator(label="a", dataloader=Loader(), metric_names=names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, ["CrossEntropy", "MulticlassAccuracy"]),
        ([], []),
        (["MulticlassAccuracy"], ["MulticlassAccuracy"]),
        (["accuracy"], ["MulticlassAccuracy"]),
        (["^cross", "nothing"], ["CrossEntropy"]),
        (["c.*y"], ["CrossEntropy", "MulticlassAccuracy"]),
    ],
)
def test_metrics_are_chosen_by_regular_expressions(names, expected):
    metrics = {"CrossEntropy": Metric(), "MulticlassAccuracy": Metric()}
    chosen = Evaluator(label="a", dataloader=Loader(), metric_names=names).select_metrics(metrics)
    assert list(chosen) == expected
    assert all(chosen[name] is metrics[name] for name in chosen)


@pytest.mark.parametrize("form", [Metric("own"), {"Metric": Metric("own")}])
def test_metrics_given_in_the_old_form_replace_the_models(form):
    with pytest.warns(DeprecationWarning, match="metric_names"):
        evaluator = Evaluator(label="a", dataloader=Loader(), metrics=form)
    own = evaluator.select_metrics({"Metric": Metric("model's")})
    assert own["Metric"].name == "own"
    original = form if isinstance(form, Metric) else form["Metric"]
    assert own["Metric"] is not original


def test_an_interval_becomes_a_function_of_the_state_and_the_event():
    evaluator = Evaluator(label="a", dataloader=Loader(), eval_interval="2ba")
    state = State(model=None, rank_zero_seed=0, max_duration="5ba", dataloader=[1])
    due = []
    for _ in range(5):
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch()
        due.append(evaluator.eval_interval(state, Event.BATCH_END))
    assert due == [False, True, False, True, False]
    assert evaluator.eval_interval(state, Event.FIT_END)


def test_a_function_and_none_are_intervals_as_they_are():
    def never(state, event):
        return False

    evaluator = Evaluator(label="a", dataloader=Loader(), eval_interval=never)
    assert evaluator.eval_interval is never
    evaluator.eval_interval = None
    assert evaluator.eval_interval is None


def test_ensure_evaluator_wraps_what_is_none_and_keeps_what_is_one():
    evaluator = Evaluator(label="a", dataloader=Loader())
    assert ensure_evaluator(evaluator, ["x"]) is evaluator
    wrapped = ensure_evaluator(Loader(), ["x"])
    assert (wrapped.label, wrapped.metric_names) == ("eval", ["x"])


def test_the_check_of_microbatch_sizes_that_had_a_function_of_its_own_says_that_it_is_gone():
    with pytest.warns(DeprecationWarning, match="Evaluator checks device_eval_microbatch_size when it is made"):
        assert validate_eval_automicrobatching("auto", object()) is None


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"label": 3}, TypeError, "label=3 must be a text"),
        ({"label": ""}, ValueError, "label='' names no results"),
        ({"subset_num_batches": 0}, ValueError, "subset_num_batches=0 leaves nothing to evaluate on"),
        ({"subset_num_batches": -5}, ValueError, "subset_num_batches=-5 must be -1 or more"),
        ({"subset_num_batches": "2"}, TypeError, "subset_num_batches='2' must be a whole number"),
        ({"subset_num_batches": 1.5}, TypeError, "subset_num_batches=1.5 must be a whole number"),
        ({"eval_interval": -1}, ValueError, "eval_interval=-1 is less than 0"),
        ({"eval_interval": "x"}, ValueError, "eval_interval='x' is not a length of training"),
    ],
)
def test_what_says_neither_what_nor_when_to_evaluate_is_refused(settings, kind, message):
    settings = {"label": "eval", "dataloader": [1], "device_eval_microbatch_size": 1, **settings}
    with pytest.raises(kind, match=message):
        Evaluator(**settings)
