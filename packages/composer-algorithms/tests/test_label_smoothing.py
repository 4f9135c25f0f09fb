"""`smooth_labels` against its formula and PyTorch's own, and `LabelSmoothing` around the loss."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from composer_algorithms import LabelSmoothing, MixUp
from composer_algorithms.functional import smooth_labels
from composer_events import Engine, Event, State

SMOOTHINGS = [0, 0.1, 0.5, 0.9, 1]


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("spatial", [(), (5,), (3, 2)])
def test_index_and_dense_targets_become_the_same_blend_with_uniform(smoothing, spatial):
    logits = torch.randn(6, 4, *spatial)
    indices = torch.randint(4, (6, *spatial))
    dense = F.one_hot(indices, 4).movedim(-1, 1)
    expected = dense.double() * (1 - smoothing) + smoothing / 4

    for target in (indices, indices.int(), dense, dense.float(), dense.half()):
        smoothed = smooth_labels(logits, target, smoothing)
        assert smoothed.dtype == torch.float32
        torch.testing.assert_close(smoothed.double(), expected, atol=1e-6, rtol=0)  # rounding of float32


@given(smoothing=st.floats(0, 1), labels=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_smoothed_targets_stay_a_distribution_with_the_label_on_top(smoothing, labels):
    target = torch.tensor(labels)
    smoothed = smooth_labels(torch.zeros(len(labels), 5), target, smoothing)
    torch.testing.assert_close(smoothed.sum(1), torch.ones(len(labels)))
    # 1e-6: two ways to the same number may round differently
    assert (smoothed.gather(1, target[:, None]).squeeze(1) >= smoothed.max(1).values - 1e-6).all()


def test_zero_smoothing_of_dense_targets_is_the_identity_in_a_new_tensor():
    dense = torch.rand(3, 4)
    smoothed = smooth_labels(torch.zeros(3, 4), dense, 0)
    assert torch.equal(smoothed, dense)
    assert smoothed.data_ptr() != dense.data_ptr()


@pytest.mark.parametrize("dense", [False, True])
def test_the_targets_passed_in_are_not_changed(dense):
    target = torch.rand(3, 4) if dense else torch.tensor([0, 1, 2])
    before = target.clone()
    smooth_labels(torch.zeros(3, 4), target, 0.3)
    assert torch.equal(target, before)


def test_the_mean_loss_equals_that_of_cross_entropy_with_its_own_label_smoothing():
    logits, target = torch.randn(16, 5, dtype=torch.double), torch.randint(5, (16,))
    loss = F.cross_entropy(logits, smooth_labels(logits, target, 0.1).double())
    # float32 targets
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, label_smoothing=0.1), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:Negative label indices:UserWarning")
def test_ignored_labels_add_nothing_to_the_loss():
    logits, target = torch.randn(6, 5, dtype=torch.double), torch.tensor([0, -100, 3, -100, 4, 1])
    smoothed = smooth_labels(logits, target, 0.2)
    assert torch.equal(smoothed[target < 0], torch.zeros(2, 5))
    loss = F.cross_entropy(logits, smoothed.double(), reduction="sum") / 4
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, label_smoothing=0.2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, float("nan")])
def test_a_smoothing_that_is_no_share_is_refused_with_its_value(smoothing):
    with pytest.raises(ValueError, match=rf"smoothing={smoothing!r} is not in \[0, 1\]"):
        smooth_labels(torch.zeros(1, 2), torch.tensor([0]), smoothing)
    with pytest.raises(ValueError, match="smoothing="):
        LabelSmoothing(smoothing)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_logits_without_a_dim_of_classes_are_refused_with_their_shape(shape):
    with pytest.raises(RuntimeError, match=r"logits of shape \((4,)?\) have no class dim"):
        smooth_labels(torch.zeros(shape), torch.zeros(shape))


def test_the_old_argument_names_work_and_name_the_new_ones():
    logits, target = torch.zeros(2, 3), torch.tensor([0, 1])
    expected = smooth_labels(logits, target, 0.2)
    with pytest.warns(DeprecationWarning, match=r"smooth_labels\(alpha=\.\.\.\) is now called smoothing") as caught:
        old = smooth_labels(logits, target, alpha=0.2)
    assert caught[0].filename == __file__
    assert torch.equal(old, expected)
    with pytest.warns(DeprecationWarning, match="target=tensor"):
        assert torch.equal(smooth_labels(logits, targets=target, smoothing=0.2), expected)
    with pytest.warns(DeprecationWarning, match="smoothing=0.2"):
        assert LabelSmoothing(alpha=0.2).smoothing == 0.2
    with pytest.raises(TypeError, match="the old and the new name"):
        smooth_labels(logits, target, alpha=0.2, smoothing=0.1)


def test_targets_are_smooth_during_the_loss_and_restored_after_it(state):
    inputs, labels = state.batch
    algorithm = LabelSmoothing(0.3)
    algorithm.apply(Event.BEFORE_LOSS, state, None)
    assert torch.equal(state.batch[1], smooth_labels(state.outputs, labels, 0.3))
    assert torch.equal(algorithm.original_labels, labels)
    algorithm.apply(Event.AFTER_LOSS, state, None)
    assert state.batch[0] is inputs
    assert state.batch[1] is labels


def test_it_matches_the_events_around_the_loss_only(state):
    algorithm = LabelSmoothing()
    assert [event for event in Event if algorithm.match(event, state)] == [Event.BEFORE_LOSS, Event.AFTER_LOSS]


def test_batches_with_other_keys_work(state):
    state.batch = {"x": state.batch[0], "label": state.batch[1]}
    labels = state.batch["label"]
    algorithm = LabelSmoothing(0.3, target_key="label")
    algorithm.apply(Event.BEFORE_LOSS, state, None)
    assert state.batch["label"].shape == state.outputs.shape
    algorithm.apply(Event.AFTER_LOSS, state, None)
    assert state.batch["label"] is labels


@pytest.mark.parametrize("batch", [{"x": 1}, {1: ["a", "b"]}, (torch.zeros(2),)])
def test_a_batch_without_a_tensor_under_the_key_is_a_type_error_that_names_the_key(state, batch):
    state.batch = batch
    with pytest.raises(TypeError, match="target_key=1"):
        LabelSmoothing().apply(Event.BEFORE_LOSS, state, None)


@pytest.mark.parametrize("mixup_first", [True, False])
def test_it_smooths_what_mixup_has_mixed_in_whichever_order_they_are_listed(state: State, mixup_first):
    mixup, smoothing = MixUp(alpha=1.0), LabelSmoothing(0.2)
    state.algorithms = [mixup, smoothing] if mixup_first else [smoothing, mixup]
    state.set_dataloader([state.batch], "train")
    engine, labels = Engine(state), state.batch[1]

    engine.run_event(Event.BEFORE_FORWARD)
    engine.run_event(Event.BEFORE_LOSS)
    one_hot, weight = F.one_hot(labels, 3).float(), mixup.mixing
    mixed = (1 - weight) * one_hot + weight * one_hot[mixup.indices]
    torch.testing.assert_close(state.batch[1], 0.8 * mixed + 0.2 / 3)

    engine.run_event(Event.AFTER_LOSS)
    assert state.batch[1] is labels


@pytest.mark.parametrize("microbatch_size", [4, 2])
def test_microbatches_lead_to_the_same_weights_as_the_whole_batch(make_loop, make_model, microbatch_size):
    whole, cut = (
        make_loop([LabelSmoothing(0.2)], model=make_model(norm=False), microbatch_size=size).fit().model.state_dict()
        for size in (8, microbatch_size)
    )
    # 12 steps of float32 sums in another order
    torch.testing.assert_close(whole, cut, atol=1e-5, rtol=1e-4)
