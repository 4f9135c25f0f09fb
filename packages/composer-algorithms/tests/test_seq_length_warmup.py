"""`set_batch_sequence_length` against its definition, and `SeqLengthWarmup` against its schedule."""

from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer_algorithms import SeqLengthWarmup
from composer_algorithms.functional import set_batch_sequence_length
from composer_dist import get_device
from composer_dist.testing import SimulatedAccelerator
from composer_events import Event, Logger, LoggerDestination, State
from composer_time import Timestamp


def text(n=3, length=8):
    ids = torch.arange(n * length).view(n, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids + 100}


@given(length=st.integers(1, 12))
def test_truncation_keeps_the_beginning_of_every_sequence(length):
    batch = text()
    shorter = set_batch_sequence_length(batch, length)
    if length >= 8:
        assert shorter is batch
    for name, value in shorter.items():
        assert torch.equal(value, batch[name][:, :length])
        assert value.is_contiguous()


@given(ends=st.lists(st.integers(1, 8), min_size=3, max_size=3), length=st.integers(1, 7))
def test_the_last_token_is_kept_at_the_new_end(ends, length):
    batch = text()
    batch["attention_mask"] = (torch.arange(8) < torch.tensor(ends)[:, None]).long()
    shorter = set_batch_sequence_length(batch, length, preserve_end_of_sequence=True)
    for name, value in shorter.items():
        for row, end in enumerate(ends):
            expected = batch[name][row, :length].clone()
            expected[min(end, length) - 1] = batch[name][row, end - 1]
            assert torch.equal(value[row], expected)


def test_a_batch_of_one_sequence_is_not_changed_by_keeping_its_end():
    """Seen before: the slice of a single sequence is contiguous, and the last token was written into the batch."""
    batch = {"input_ids": torch.arange(8)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    shorter = set_batch_sequence_length(batch, 4, preserve_end_of_sequence=True)
    assert shorter["input_ids"].tolist() == [[0, 1, 2, 7]]
    assert batch["input_ids"].tolist() == [list(range(8))]


@given(length=st.integers(1, 7))
def test_sequences_cut_into_several_follow_one_another(length):
    batch = {**text(), "position_ids": torch.arange(8).repeat(3, 1)}
    shorter = set_batch_sequence_length(batch, length, truncate=False)
    num = 24 // length
    assert torch.equal(shorter["input_ids"], torch.arange(num * length).view(num, length))
    assert torch.equal(shorter["labels"], shorter["input_ids"] + 100)
    assert torch.equal(shorter["position_ids"], torch.arange(length).repeat(num, 1))


@pytest.mark.parametrize(
    ("length", "expected"),
    [(4, [[0, 1, 2, 0], [0, 1, 0, 0], [0, 1, 2, 3], [0, 1, 2, 3]]), (5, [[0, 1, 2, 0, 1], [0, 0, 0, 0, 1]])],
)
def test_positions_of_packed_documents_start_again_when_sequences_are_cut(length, expected):
    # Documents of 3 and 3 tokens and padding, and one of 8.
    batch = {"input_ids": torch.arange(16).view(2, 8)}
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    shorter = set_batch_sequence_length(batch, length, truncate=False)
    assert shorter["position_ids"][: len(expected)].tolist() == expected


def test_a_batch_of_another_type_keeps_it_and_the_original_stays():
    class Encoding(UserDict):
        pass

    batch = Encoding(text())
    before = dict(batch)
    shorter = set_batch_sequence_length(batch, 4)
    assert type(shorter) is Encoding
    assert shorter["input_ids"].shape == (3, 4)
    assert all(batch[name] is before[name] for name in before)
    assert set_batch_sequence_length(text(), 4)["input_ids"].shape == (3, 4)


def test_what_has_no_length_can_be_named():
    batch = {**text(), "weights": torch.ones(3), "names": ["a", "b", "c"]}
    shorter = set_batch_sequence_length(batch, 4, non_sequence_keys=("weights", "names"))
    assert shorter["weights"] is batch["weights"]
    assert shorter["labels"].shape == (3, 4)


@pytest.mark.parametrize(
    ("batch", "arguments", "error", "message"),
    [
        ((1, 2), {}, TypeError, "the batch is a tuple"),
        ({"input_ids": [1, 2]}, {}, TypeError, r"batch\['input_ids'\] is a list"),
        ({"input_ids": torch.zeros(3)}, {}, ValueError, "no tensor of the batch has a length dim"),
        ({**text(), "weights": torch.ones(3)}, {}, ValueError, r"batch\['weights'\] of shape \(3,\)"),
        (text(), {"curr_seq_len": 0}, ValueError, "curr_seq_len=0"),
        ({"x": torch.zeros(2, 8)}, {"preserve_end_of_sequence": True}, ValueError, "'attention_mask'"),
        ({"x": torch.zeros(2, 8)}, {"truncate": False}, ValueError, "'input_ids'"),
        ({**text(), "y": torch.zeros(3, 9)}, {"truncate": False}, ValueError, r"batch\['y'\] of shape \(3, 9\)"),
    ],
)
def test_what_cannot_be_shortened_is_refused(batch, arguments, error, message):
    with pytest.raises(error, match=message):
        set_batch_sequence_length(batch, **{"curr_seq_len": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"duration": 1.5}, r"duration=1\.5"),
        ({"min_seq_length": 0}, "min_seq_length=0"),
        ({"step_size": 0}, "step_size=0"),
        ({"min_seq_length": 32, "max_seq_length": 16}, "max_seq_length=16 is less than min_seq_length=32"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SeqLengthWarmup(**arguments)


class Wrapped(nn.Module):
    """A language model as HuggingFaceModel holds one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(400, 4), nn.Dropout(0.5), nn.Linear(4, 400))
        self.lengths = []

    def forward(self, batch):
        self.lengths.append(tuple(batch["input_ids"].shape))
        return self.model(batch["input_ids"])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


class Kept(LoggerDestination):
    def __init__(self):
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append(metrics)


def make_state(max_duration="20ba", dataloader_len=5):
    model = Wrapped()
    state = State(
        model, rank_zero_seed=1, max_duration=max_duration, device=get_device("cpu"), device_train_microbatch_size=2
    )
    state.optimizers = torch.optim.SGD(model.parameters(), lr=0.1)
    state.set_dataloader([text()] * dataloader_len, "train")
    return state


@given(
    duration=st.floats(0, 1),
    low=st.integers(1, 40),
    more=st.integers(0, 40),
    step=st.integers(1, 50),
    total=st.integers(1, 60),
)
def test_no_arguments_divide_by_zero_and_the_length_grows_to_its_maximum_in_time(duration, low, more, step, total):
    state = make_state(f"{total}ba")
    algorithm = SeqLengthWarmup(duration, low, low + more, step)
    lengths = []
    for batch in range(total + 1):
        state.timestamp = Timestamp(batch=batch)
        lengths.append(algorithm.seq_length(algorithm._warmup_done(state)))
    assert lengths == sorted(lengths)
    assert all(low <= length <= low + more for length in lengths)
    assert all((length - low) % step == 0 or length == low + more for length in lengths)
    assert set(lengths[int(total * duration) :]) == {low + more}
    if int(total * duration) > 0:
        assert lengths[0] == low


@pytest.mark.parametrize(
    ("max_duration", "now"),
    [
        ("20ba", Timestamp(batch=5)),
        ("4ep", Timestamp(epoch=1, batch=5)),
        ("60sp", Timestamp(sample=15)),
        ("480tok", Timestamp(token=120)),
    ],
)
def test_time_is_counted_in_any_unit(max_duration, now):
    state = make_state(max_duration)
    state.timestamp = now
    algorithm = SeqLengthWarmup(0.5, 2, 8, 1)
    assert algorithm.seq_length(algorithm._warmup_done(state)) == 5


def test_epochs_of_unknown_length_are_refused():
    state = make_state("4ep")
    state.set_dataloader(iter([text()]), "train")
    algorithm = SeqLengthWarmup()
    algorithm._activated = True
    state.batch = text()
    with pytest.raises(RuntimeError, match="do not say how many batches"):
        algorithm.apply(Event.AFTER_DATALOADER, state, None)


@pytest.mark.parametrize(("truncate", "num"), [(True, 3), (False, 4)])
def test_the_batch_is_really_shorter_and_it_is_logged(truncate, num):
    state, kept = make_state(), Kept()
    state.timestamp, state.batch = Timestamp(batch=2), text()
    algorithm = SeqLengthWarmup(0.5, 2, 8, 2, truncate)
    algorithm.apply(Event.INIT, state, None)
    algorithm.apply(Event.AFTER_DATALOADER, state, Logger(state, kept))
    assert state.batch["input_ids"].shape[1] == 2
    state.timestamp, state.batch, kept.metrics = Timestamp(batch=7), text(), []
    algorithm.apply(Event.AFTER_DATALOADER, state, Logger(state, kept))
    assert state.batch["input_ids"].shape == (num, 6)
    assert kept.metrics == [{"seq_length_warmup/curr_seq_len": 6, "seq_length_warmup/curr_bs": num}]


def test_one_microbatch_of_the_maximal_length_runs_first_and_leaves_no_trace():
    state = make_state()
    state.batch = text()
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    generator = torch.get_rng_state()
    algorithm = SeqLengthWarmup(0.5, 2, 12, 2)
    algorithm.apply(Event.AFTER_DATALOADER, state, None)
    algorithm.apply(Event.AFTER_DATALOADER, state, None)
    assert state.model.lengths == [(2, 12)]
    assert algorithm._activated
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch has one accelerator type per process: CUDA")
def test_the_first_microbatch_leaves_the_generator_of_any_device_as_it_was():
    """Only CUDA's generator was restored."""
    with SimulatedAccelerator() as accelerator:
        state = make_state()
        state.device, state.batch = accelerator, text()
        state.model.to("simgpu").register_forward_hook(lambda *_: drawn.append(torch.rand(1, device="simgpu").item()))
        drawn = []
        torch.manual_seed(3)
        expected = torch.rand(1, device="simgpu").item()
        torch.manual_seed(3)
        algorithm = SeqLengthWarmup(0.5, 2, 12, 2)
        algorithm.apply(Event.AFTER_DATALOADER, state, None)
        algorithm.apply(Event.AFTER_DATALOADER, state, None)
        assert len(drawn) == 1
        assert torch.rand(1, device="simgpu").item() == expected


def test_a_checkpoint_says_that_it_has_run():
    state = make_state()
    state.batch = text()
    first, resumed = SeqLengthWarmup(), SeqLengthWarmup()
    first.apply(Event.AFTER_DATALOADER, state, None)
    resumed.load_state_dict(first.state_dict())
    state.model.lengths.clear()
    resumed.apply(Event.AFTER_DATALOADER, state, None)
    assert state.model.lengths == []
    composers = SeqLengthWarmup()
    composers.load_state_dict({"repr": "SeqLengthWarmup()"})
    assert not composers._activated


def test_a_microbatch_that_does_not_fit_is_halved_where_that_is_automatic():
    state = make_state()
    state.batch, state.auto_microbatching, state.device_train_microbatch_size = text(8), True, 8
    loss = state.model.loss

    def hungry_loss(outputs, batch):
        if len(outputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(outputs, batch)

    state.model.loss = hungry_loss
    SeqLengthWarmup().apply(Event.AFTER_DATALOADER, state, None)
    assert state.device_train_microbatch_size == 2
    state.auto_microbatching, state.device_train_microbatch_size = False, 8
    state.batch = text(8)
    with pytest.raises(torch.OutOfMemoryError):
        SeqLengthWarmup().apply(Event.AFTER_DATALOADER, state, None)


def test_a_model_that_wraps_none_is_refused(state):
    algorithm = SeqLengthWarmup()
    assert algorithm.match(Event.INIT, state)
    with pytest.raises(RuntimeError, match="with the attribute model, and this is a Classifier"):
        algorithm.apply(Event.INIT, state, None)
    algorithm.apply(Event.INIT, make_state(), None)
    assert not algorithm.match(Event.INIT, state)
    assert algorithm.match(Event.AFTER_DATALOADER, state)
