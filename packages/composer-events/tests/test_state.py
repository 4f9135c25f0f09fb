import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_events import Algorithm, Callback, Engine, Evaluator, State
from composer_events import types as event_types
from composer_time import Time, Timestamp


class Weights:
    """As much of a model as saving and loading ask for."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"weight": self.value}

    def load_state_dict(self, state, strict):
        self.value = state["weight"]
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])


class Remember(Callback):
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def make_state(**settings):
    return State(model=None, rank_zero_seed=0, **settings)


class NoLength:
    def __iter__(self):
        return iter([1])

    def __len__(self):
        raise TypeError("it has none")


class Counter:
    def __init__(self):
        self.steps = []
        self.zeroed = 0

    def step(self, *args, **kwargs):
        self.steps.append((args, kwargs))
        return len(self.steps)

    def zero_grad(self, set_to_none=True):
        self.zeroed += 1


class DoNothing(Algorithm):
    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        return None


class ResumableDataset:
    def __init__(self):
        self.loaded = []

    def load_state_dict(self, state):
        self.loaded.append(state)


class Loader(list):
    batch_size = 1

    def __init__(self, dataset):
        super().__init__([1, 2])
        self.dataset = dataset


def test_a_state_begins_at_zero():
    state = make_state()
    assert state.timestamp == state.eval_timestamp == state.predict_timestamp == Timestamp()
    assert state.previous_timestamp is None
    assert state.batch is None
    assert (state.train_metrics, state.eval_metrics, state.dataset_resumption) == ({}, {}, {})
    assert (state.dataloader, state.dataloader_label, state.dataloader_len) == (None, None, None)
    assert (state.max_duration, state.get_elapsed_duration()) == (None, None)


def test_the_first_four_arguments_are_positional():
    device = object()
    state = State("model", 3, "name", device)
    assert (state.model, state.rank_zero_seed, state.run_name) == ("model", 3, "name")
    assert state.device is device


def test_a_run_without_a_name_gets_one_of_its_own():
    assert make_state().run_name != make_state().run_name


def test_attributes_may_be_added_freely():
    state = make_state()
    state.inputs = 5
    assert state.inputs == 5


class Act(Algorithm):
    """Does what it was made with on every event."""

    def __init__(self, act):
        self.act = act

    def match(self, event, state):
        return True

    def apply(self, event, state, logger):
        self.act(state)


def run_event_with(state, act):
    """Let an algorithm act on the state, within an event."""
    engine = Engine(state)
    state.algorithms = Act(act)
    engine.run_event("init")
    state.algorithms = []
    engine.close()


def set_batch(batch):
    return lambda state: setattr(state, "batch", batch)


def set_parts(inputs, targets):
    def act(state):
        state.inputs, state.targets = inputs, targets

    return act


def test_inputs_and_targets_are_the_batch_of_a_loop_that_sets_no_other():
    state = make_state()
    for state.inputs, state.targets in [(1, 2), (3, 4)]:
        assert state.batch == (state.inputs, state.targets)
    assert state.batch == (3, 4)
    run_event_with(state, set_batch((5, 4)))
    assert (state.inputs, state.targets) == (5, 4)
    state.inputs = 6
    assert state.batch == (6, 4)
    run_event_with(state, set_batch([7, 8]))
    state.targets = 9
    assert state.batch == (7, 9)


@pytest.mark.parametrize("other", [(5, 6, 7), {"x": 5}, None, [5]])
@pytest.mark.parametrize("is_in_an_event", [True, False])
def test_the_next_pair_is_the_batch_again_whatever_was_in_its_place(other, is_in_an_event):
    state = make_state()
    seen = []
    for state.inputs, state.targets in [(1, 2), (3, 4), (5, 6)]:
        seen.append(state.batch)
        if is_in_an_event:
            run_event_with(state, set_batch(other))
        else:
            state.batch = other
        assert state.batch == other
    assert seen == [(1, 2), (3, 4), (5, 6)]


@pytest.mark.parametrize("batch", [(1, 2), {"inputs": 1}, [1, 2, 3]])
@pytest.mark.parametrize("assign", [set_parts(3, 4), lambda state: run_event_with(state, set_parts(3, 4))])
def test_inputs_and_targets_of_ones_own_leave_a_batch_alone(batch, assign):
    state = make_state()
    state.batch = batch
    assign(state)
    assert state.batch is batch
    assert (state.inputs, state.targets) == (3, 4)


@pytest.mark.parametrize("first", [(None, None), (1, None), (None, 2), (1, 2)])
def test_what_a_callback_keeps_before_the_first_batch_makes_none(first):
    state = make_state()
    run_event_with(state, set_parts(*first))
    assert state.batch is None
    state.batch = ("images", "labels")
    run_event_with(state, set_parts("image", "label"))
    assert state.batch == ("images", "labels")
    assert (state.inputs, state.targets) == ("image", "label")


@pytest.mark.parametrize("pair", [(None, None), (1, None), (None, 2)])
def test_a_pair_with_none_in_it_makes_no_batch(pair):
    state = make_state()
    state.inputs, state.targets = pair
    assert state.batch is None
    assert (state.inputs, state.targets) == pair


def test_one_part_alone_is_no_batch():
    state = make_state()
    assert not hasattr(state, "inputs")
    with pytest.raises(AttributeError, match="'State' object has no attribute 'targets'"):
        _ = state.targets
    state.inputs = 3
    assert (state.inputs, state.batch) == (3, None)


def test_a_batch_of_another_make_has_no_parts():
    state = make_state()
    state.inputs, state.targets = 1, 2
    state.batch = {"x": 3}
    assert (state.inputs, state.targets) == (1, 2)
    state.inputs = 4
    assert (state.inputs, state.batch) == (4, {"x": 3})


def test_a_part_can_be_deleted_like_any_attribute():
    state = make_state()
    with pytest.raises(AttributeError, match="no attribute 'inputs'"):
        del state.inputs
    state.inputs, state.targets = 1, 2
    del state.inputs
    assert not hasattr(state, "inputs")
    assert (state.targets, state.batch) == (2, (1, 2))


def test_the_seed_of_a_rank_is_that_of_rank_zero_and_its_rank(monkeypatch):
    state = make_state()
    state.rank_zero_seed = 17
    assert state.seed == 17
    monkeypatch.setenv("RANK", "3")
    assert state.seed == 20


def test_a_rank_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "zero")
    with pytest.raises(ValueError, match="RANK='zero'"):
        _ = make_state().seed


@pytest.mark.parametrize(("given_value", "expected"), [(3, "3ep"), ("2ba", "2ba"), (Time(5, "tok"), "5tok")])
def test_max_duration_takes_epochs_timestrings_and_times(given_value, expected):
    assert make_state(max_duration=given_value).max_duration == Time.from_timestring(expected)


def test_max_duration_is_no_part_of_training():
    with pytest.raises(ValueError, match=r"max_duration='0\.5dur'"):
        make_state(max_duration="0.5dur")


@pytest.mark.parametrize("length", ["2ep", "100tok", None])
def test_iterations_are_counted_in_epochs_or_tokens(length):
    state = make_state()
    state.iteration_length = length
    assert (state.iteration_length is None) == (length is None)
    with pytest.raises(NotImplementedError, match="neither in epochs nor in tokens"):
        state.iteration_length = "2ba"


@settings(deadline=None)  # a busy machine is no failure
@given(done=st.integers(0, 50), length=st.integers(1, 50))
def test_the_elapsed_part_is_the_time_over_the_duration(done, length):
    state = make_state(max_duration=Time(length, "ba"))
    state.timestamp = Timestamp(batch=done)
    assert state.get_elapsed_duration() == Time(done / length, "dur")


@pytest.mark.parametrize(
    ("max_duration", "expected"), [("5ep", "7ba"), (None, "7ba"), ("20ba", "7ba"), ("99sp", "14sp"), ("9tok", "3tok")]
)
def test_stopping_ends_training_where_it_is(max_duration, expected):
    state = make_state(max_duration=max_duration)
    state.timestamp = Timestamp(epoch=1, batch=7, sample=14, token=3)
    state.stop_training()
    assert state.max_duration == Time.from_timestring(expected)
    assert state.timestamp >= state.max_duration
    assert state.get_elapsed_duration() == Time(1.0, "dur")


def test_a_checkpoint_keeps_a_stop_until_there_is_another_duration():
    """Training went on whenever a stopped run was loaded."""
    state, loaded = make_state(max_duration="5ep"), make_state(max_duration="5ep")
    state.serialized_attributes = loaded.serialized_attributes = ["timestamp"]
    for _ in range(2):  # a stopper may decide so once more, of what is over
        state.stop_training()
        assert state.stopped_duration == "5ep"
    loaded.load_state_dict(state.state_dict())
    assert loaded.stopped_duration == "5ep"
    loaded.max_duration = "6ep"
    assert loaded.stopped_duration is None
    assert loaded.state_dict()["timestamp"].keys() == {"Timestamp"}
    loaded.stop_training(resumable=True)
    assert loaded.stopped_duration is None


def test_stopping_before_the_first_batch_leaves_nothing_to_do():
    state = make_state(max_duration="5ep")
    state.stop_training()
    assert state.get_elapsed_duration() == Time(1.0, "dur")


@pytest.mark.parametrize("name", ["optimizers", "schedulers", "algorithms", "callbacks", "evaluators"])
def test_the_lists_keep_their_identity_and_count_their_changes(name):
    state = make_state()
    kept = getattr(state, name)
    first, second = object(), object()
    versions = [kept.version]
    for assigned, expected in [(first, [first]), ([first, second], [first, second]), (None, [])]:
        setattr(state, name, assigned)
        assert getattr(state, name) is kept
        assert list(kept) == expected
        versions.append(kept.version)
    assert len(set(versions)) == len(versions)


def test_the_lists_may_be_given_at_construction():
    optimizer, algorithm, callback = Counter(), DoNothing(), Callback()
    evaluator = Evaluator(label="eval", dataloader=[], device_eval_microbatch_size=1)
    state = make_state(optimizers=optimizer, algorithms=algorithm, callbacks=(callback,), evaluators=evaluator)
    assert list(state.optimizers) == [optimizer]
    assert list(state.algorithms) == [algorithm]
    assert list(state.callbacks) == [callback]
    assert list(state.evaluators) == [evaluator]


def test_optimizers_and_schedulers_can_be_stepped_as_one():
    state, first, second = make_state(), Counter(), Counter()
    state.optimizers = [first, second]
    state.optimizers.step(closure=None)
    state.optimizers.zero_grad(set_to_none=False)
    assert first.steps == second.steps == [((), {"closure": None})]
    assert first.zeroed == second.zeroed == 1
    state.schedulers = first
    assert state.schedulers.step() == 2


def test_a_step_without_optimizers_is_refused_and_one_without_schedulers_is_none():
    state = make_state()
    with pytest.raises(RuntimeError, match=r"state\.optimizers=\[\] has nothing to step.*Set one before training"):
        state.optimizers.step()
    state.optimizers.zero_grad()
    assert state.schedulers.step() is None


def test_the_length_is_unknown_again_after_none():
    state = make_state(dataloader=[1, 2])

    state.dataloader_len = None

    assert state.dataloader_len is None


@pytest.mark.parametrize(
    ("length", "kind", "message"),
    [
        ("1", TypeError, "dataloader_len='1' is not a number of batches"),
        (1.9, TypeError, r"dataloader_len=1\.9 is not a number of batches"),
        ([1], TypeError, r"dataloader_len=\[1\] is not a number of batches"),
        (True, TypeError, "dataloader_len=True is not a number of batches"),
        (Time(1, "ep"), ValueError, "dataloader_len='1ep' is not in batches"),
    ],
)
def test_a_length_that_is_no_number_of_batches_is_refused(length, kind, message):
    state = make_state(dataloader=[1, 2])
    with pytest.raises(kind, match=message):
        state.dataloader_len = length
    with pytest.raises(kind, match=message):
        make_state(dataloader=[1, 2], dataloader_len=length)
    state.dataloader_len = Time(1, "ba")
    assert state.dataloader_len == Time(1, "ba")


def test_a_dataloader_given_at_construction_is_called_train():
    state = make_state(dataloader=[1, 2, 3])
    assert (state.dataloader, state.dataloader_label, state.dataloader_len) == ([1, 2, 3], "train", Time(3, "ba"))


def test_a_dataloader_set_later_needs_a_label():
    state = make_state()
    with pytest.raises(ValueError, match="dataloader_label"):
        state.set_dataloader([1])
    state.set_dataloader([1], "eval")
    assert state.dataloader_label == "eval"
    state.set_dataloader()
    assert (state.dataloader, state.dataloader_label, state.dataloader_len) == (None, None, None)


@pytest.mark.parametrize(("length", "expected"), [(2, 2), (3, 3), (Time(1, "ba"), 1), (0, 0), (-1, 3)])
def test_an_epoch_may_be_shorter_than_the_dataloader(length, expected):
    state = make_state(dataloader=[1, 2, 3], dataloader_len=length)
    assert state.dataloader_len == Time(expected, "ba")


def test_an_epoch_longer_than_the_dataloader_is_cut_with_a_warning():
    state = make_state(dataloader=[1, 2, 3])
    with pytest.warns(UserWarning, match="DataloaderNumBatchesWarning"):
        state.dataloader_len = 4
    assert state.dataloader_len == Time(3, "ba")


@pytest.mark.parametrize("dataloader", [iter([1]), NoLength()])
def test_a_dataloader_without_length_has_none_unless_it_is_given(dataloader):
    state = make_state(dataloader=dataloader)
    assert state.dataloader_len is None
    state.dataloader_len = 5
    assert state.dataloader_len == Time(5, "ba")
    state.dataloader_len = -1
    assert state.dataloader_len is None


def test_a_length_without_a_dataloader_is_an_error():
    with pytest.raises(RuntimeError, match="set_dataloader"):
        make_state().dataloader_len = 3


def test_a_waiting_dataset_state_is_given_to_the_first_dataset_that_can_take_it():
    state = make_state(dataset_state={"train": {"epoch": 2}})
    state.train_dataloader = Loader(object())
    assert state.dataset_resumption == {}
    dataset = ResumableDataset()
    state.train_dataloader = Loader(dataset)
    state.train_dataloader = Loader(dataset)
    assert dataset.loaded == [{"epoch": 2}]
    assert state.dataset_resumption == {"train": True}
    assert state.dataset_state == {"train": None}


def test_the_dataset_is_found_under_an_evaluator_too():
    state = make_state(dataset_state={"train": 1})
    dataset = ResumableDataset()
    state.train_dataloader = Evaluator(label="train", dataloader=Loader(dataset))
    assert dataset.loaded == [1]


def test_a_part_of_the_batch_is_read_and_replaced():
    state = make_state()
    state.batch = ("image", "label")
    assert state.batch_get_item(1) == "label"
    state.batch_set_item(1, "smooth")
    assert state.batch == ("image", "smooth")


def test_the_older_attributes_answer_what_they_did():
    state = make_state(grad_accum=4)
    assert state.grad_accum == 4
    assert make_state().grad_accum is None
    assert (state.deepspeed_config, state.deepspeed_enabled, state.deepspeed_model) == (None, False, None)
    assert make_state(deepspeed_config={}).deepspeed_enabled
    state.train_metrics, state.eval_metrics = {"a": 1}, {"eval": {"b": 2}}
    assert state.current_metrics == {"train": {"a": 1}, "eval": {"b": 2}}


def test_a_state_without_parallelism_says_so():
    state = make_state()
    assert (state.fsdp_config, state.fsdp_config_version, state.tp_config, state.device_mesh) == (None, 0, None, None)
    assert not state.fsdp_enabled
    assert state.fsdp_state_dict_type is None
    assert not state.fsdp_sharded_state_dict_enabled
    assert not state.load_monolith_rank0_only
    assert not state.is_model_ddp
    assert state.fsdp_device_mesh is None
    state.device_mesh = object()
    assert state.fsdp_device_mesh is state.device_mesh  # its older name


def test_what_is_read_the_short_way_is_explained_all_the_same():
    assert State.max_duration.__doc__.startswith("Length of training.")
    assert Timestamp.total_wct.__doc__ == "Wall-clock time trained."


def test_the_modes_and_memory_formats_have_torchs_names():
    assert [mode.value for mode in event_types.TrainerMode] == ["train", "eval", "predict"]
    assert event_types.MemoryFormat("channels_last") is event_types.MemoryFormat.CHANNELS_LAST
    assert issubclass(event_types.BreakEpochException, Exception)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = event_types.Nothing


def test_saving_and_loading_without_torch_is_the_identity():
    saved = State(Weights(7), 5, "first", callbacks=[Remember(1), Remember(2)], max_duration="2ep")
    saved.timestamp = saved.timestamp.to_next_batch(samples=3).to_next_epoch()
    restored = State(Weights(0), 0, "second", callbacks=[Remember(0), Remember(0)])
    restored.load_state_dict(saved.state_dict())
    assert restored.model.value == 7
    assert [callback.value for callback in restored.callbacks] == [1, 2]
    assert restored.timestamp == saved.timestamp
    assert (restored.rank_zero_seed, restored.run_name) == (5, "first")


def test_the_second_object_of_a_class_has_a_number_in_its_name():
    callbacks = State(Weights(0), 0, callbacks=[Remember(1), Remember(2), Callback()]).state_dict()["callbacks"]
    assert callbacks == {"Remember": {"value": 1}, "Remember#1": {"value": 2}, "Callback": {}}


def test_what_a_checkpoint_lacks_is_named_and_left_as_it_is():
    state = State(Weights(0), 0, callbacks=[Remember(1), Remember(2)])
    with pytest.warns(UserWarning, match="^Remember#1 is not in the state_dict. Its state will not be restored.$"):
        state.load_state_dict({"callbacks": {"Remember": {"value": 9}}})
    assert [callback.value for callback in state.callbacks] == [9, 2]


def test_unknown_keys_and_those_for_readers_are_passed_over():
    state = State(Weights(0), 0, "name")
    state.load_state_dict({"unheard_of": 1, "metadata": {}, "integrations": {}, "current_metrics": {}})
    assert not hasattr(state, "unheard_of")


def test_the_underscored_keys_of_old_checkpoints_are_read():
    state = State(Weights(0), 0, callbacks=Remember(0))
    state.load_state_dict({"_callbacks": {"Remember": {"value": 4}}, "_is_model_ddp_wrapped": False})
    assert state.callbacks[0].value == 4


def test_the_metadata_says_what_the_run_was_made_with():
    state = State(Weights(0), 0, device_train_microbatch_size=2, train_dataloader=Loader(object()))
    metadata = state.state_dict()["metadata"]
    assert metadata["world_size"] == 1
    assert metadata["device_train_microbatch_size"] == 2
    assert metadata["train_dataloader_batch_size"] == 1
    assert set(metadata["composer_env_info"]) == {
        "composer_version",
        "composer_commit_hash",
        "cpu_model",
        "cpu_count",
        "num_nodes",
        "gpu_model",
        "num_gpus_per_node",
        "num_gpus",
        "cuda_device_count",
    }
    json.dumps(metadata)


def test_the_dataset_says_where_it_is():
    class Dataset(ResumableDataset):
        def state_dict(self, num_samples, from_beginning):
            return {"num_samples": num_samples, "from_beginning": from_beginning}

    state = State(Weights(0), 0)
    assert state.state_dict()["dataset_state"] == {"train": None, "eval": {}}
    state.train_dataloader = Loader(Dataset())
    state.timestamp = state.timestamp.to_next_batch(samples=6)
    saved = state.state_dict()["dataset_state"]
    assert saved == {"train": {"num_samples": 6, "from_beginning": True}, "eval": {}}

    resumed = State(Weights(0), 0, train_dataloader=Loader(dataset := ResumableDataset()))
    resumed.load_state_dict({"dataset_state": saved})
    assert dataset.loaded == [{"num_samples": 6, "from_beginning": True}]
    assert resumed.dataset_resumption == {"train": True}


def test_what_replaces_the_states_own_way_to_save_its_dataset_is_called():
    """The state of LLM-Shearing's dataset was not saved: first it was not called, then it had no `_dataset_of`."""
    dataset = ResumableDataset()
    state = State(Weights(0), 0, train_dataloader=Loader(dataset))
    state._dataset_state_dict = lambda: {"train": state._dataset_of(state.train_dataloader), "eval": {}}
    assert state.state_dict()["dataset_state"] == {"train": dataset, "eval": {}}


def test_a_dataset_that_comes_after_the_checkpoint_is_resumed_too():
    state = State(Weights(0), 0)
    state.load_state_dict({"dataset_state": {"train": 5, "eval": {}}})
    state.train_dataloader = Loader(dataset := ResumableDataset())
    assert dataset.loaded == [5]


def test_a_checkpoint_without_a_dataset_state_leaves_none_waiting():
    state = State(Weights(0), 0, dataset_state={"train": 5})
    state.load_state_dict({"dataset_state": None})
    assert state.dataset_state is None


def test_the_callers_dataset_state_is_left_as_it_is():
    given, saved = {"train": 5}, {"dataset_state": {"train": 6, "eval": {}}}
    state = State(Weights(0), 0, dataset_state=given)
    state.train_dataloader = Loader(dataset := ResumableDataset())
    state.load_state_dict(saved)
    assert dataset.loaded == [5, 6]
    assert (given, saved) == ({"train": 5}, {"dataset_state": {"train": 6, "eval": {}}})
