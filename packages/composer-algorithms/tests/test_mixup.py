"""`mixup_batch` against its formula, and `MixUp` on its events."""

import collections

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer_algorithms import LabelSmoothing, MixUp
from composer_algorithms.functional import mixup_batch
from composer_events import Algorithm, Engine, Event, State, batch_get


@given(mixing=st.floats(0, 1), size=st.integers(1, 6), seed=st.integers(0, 99))
def test_the_result_is_the_weighted_sum_with_the_permuted_batch(mixing, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(size, 3, 2, generator=generator), torch.arange(size)
    indices = torch.randperm(size, generator=generator)
    mixed, permuted, used = mixup_batch(x, y, mixing, indices=indices)
    expected = (1 - mixing) * x.double() + mixing * x[indices].double()
    torch.testing.assert_close(mixed, expected.float())
    assert torch.equal(permuted, y[indices])
    assert used == mixing


@given(size=st.integers(1, 20), seed=st.integers(0, 99))
def test_the_permutation_loses_no_example(size, seed):
    generator = torch.Generator().manual_seed(seed)
    _, permuted, _ = mixup_batch(torch.rand(size, 1), torch.arange(size), generator=generator)
    assert sorted(permuted.tolist()) == list(range(size))


def test_no_mixing_is_the_identity_bit_for_bit():
    x = torch.randn(16, 3)
    for arguments in ({"mixing": 0.0}, {"alpha": 0.0}):
        mixed, _, weight = mixup_batch(x, torch.arange(16), **arguments)
        assert torch.equal(mixed, x)
        assert weight == 0


def test_no_mixing_keeps_values_that_are_not_finite():
    x = torch.tensor([[float("inf"), 1.0], [-float("inf"), float("nan")]])
    mixed, permuted, _ = mixup_batch(x, torch.arange(2), 0.0, indices=torch.tensor([1, 0]))
    assert torch.equal(mixed.nan_to_num(7.0), x.nan_to_num(7.0))
    assert mixed.data_ptr() != x.data_ptr()
    assert permuted.tolist() == [1, 0]


@pytest.mark.parametrize("target", [torch.arange(3), torch.arange(5), torch.tensor(1)])
def test_a_target_of_another_length_than_the_input_is_refused_with_both_shapes(state, target):
    message = rf"target of shape \({', '.join(map(str, target.shape))},?\) .*\(4, 4\)"
    with pytest.raises(ValueError, match=message):
        mixup_batch(torch.rand(4, 4), target, 0.5)
    state.batch = (torch.rand(4, 4), target)
    with pytest.raises(ValueError, match=message):
        MixUp().apply(Event.BEFORE_FORWARD, state, None)


def test_the_inputs_are_not_changed():
    x, y = torch.rand(4, 3), torch.arange(4)
    before = x.clone()
    mixed, _, _ = mixup_batch(x, y, 0.5)
    assert torch.equal(x, before)
    assert torch.equal(y, torch.arange(4))
    assert mixed.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.uint8, torch.float32),
    ],
)
def test_floating_dtypes_stay_and_integers_become_float32(dtype, expected):
    x = torch.tensor([[0, 200], [100, 0]]).to(dtype)
    mixed, _, _ = mixup_batch(x, torch.arange(2), 0.25, indices=torch.tensor([1, 0]))
    assert mixed.dtype == expected
    torch.testing.assert_close(mixed.float(), torch.tensor([[25.0, 150.0], [75.0, 50.0]]))


def test_gradients_flow_to_both_examples():
    x = torch.rand(2, 1, requires_grad=True)
    mixed, _, _ = mixup_batch(x, torch.arange(2), 0.25, indices=torch.tensor([1, 0]))
    mixed[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0.75], [0.25]]))


def test_drawn_weights_have_the_distribution_of_the_folded_beta():
    # For z ~ Beta(1, 1), uniform, min(z, 1 - z) is uniform on [0, 0.5]: mean 1/4, variance 1/48.
    generator = torch.Generator().manual_seed(0)
    x, y = torch.zeros(1, 1), torch.zeros(1)
    weights = torch.tensor([mixup_batch(x, y, alpha=1.0, generator=generator)[2] for _ in range(4000)])
    assert weights.min() >= 0
    assert weights.max() <= 0.5
    assert abs(weights.mean() - 1 / 4) < 0.01  # four standard errors of 4000 draws
    assert abs(weights.var() - 1 / 48) < 0.002


def test_for_small_alpha_the_variance_is_that_of_the_beta_distribution():
    # E[(z - 1/2)^2] = 1 / (4 (2 alpha + 1)) is not changed by folding.
    generator = torch.Generator().manual_seed(0)
    x, y = torch.zeros(1, 1), torch.zeros(1)
    weights = torch.tensor([mixup_batch(x, y, alpha=0.2, generator=generator)[2] for _ in range(4000)])
    assert abs(((weights - 0.5) ** 2).mean() - 1 / (4 * 1.4)) < 0.008


def test_a_generator_repeats_the_draws_and_without_one_the_global_seed_does():
    x, y = torch.rand(32, 2), torch.arange(32)
    first, second = (mixup_batch(x, y, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert first[2] == second[2]
    torch.manual_seed(8)
    first = mixup_batch(x, y)
    torch.manual_seed(8)
    second = mixup_batch(x, y)
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2]


@pytest.mark.parametrize("alpha", ["0.2", None, True])
def test_an_alpha_that_is_no_number_is_refused_with_its_value(alpha):
    with pytest.raises(TypeError, match=f"alpha={alpha!r} is not a number"):
        mixup_batch(torch.rand(2, 1), torch.arange(2), alpha=alpha)
    with pytest.raises(TypeError, match=f"alpha={alpha!r} is not a number"):
        MixUp(alpha)


@pytest.mark.parametrize("alpha", [-1.0, float("nan"), float("inf")])
def test_an_impossible_alpha_is_refused_with_its_value(alpha):
    with pytest.raises(ValueError, match=f"alpha={alpha!r}"):
        mixup_batch(torch.rand(2, 1), torch.arange(2), alpha=alpha)
    with pytest.raises(ValueError, match=f"alpha={alpha!r}"):
        MixUp(alpha)


def test_a_weight_outside_zero_to_one_is_refused():
    with pytest.raises(ValueError, match=r"mixing=1\.5 is not in \[0, 1\]"):
        mixup_batch(torch.rand(2, 1), torch.arange(2), 1.5)


def test_the_old_arguments_work_and_say_what_to_write_instead():
    x, y, indices = torch.rand(3, 2), torch.arange(3), torch.tensor([2, 0, 1])
    expected = mixup_batch(x, y, 0.3, indices=indices)[0]
    with pytest.warns(DeprecationWarning, match="write mixing=0.3"):
        assert torch.equal(mixup_batch(x, y, interpolation_lambda=0.3, indices=indices)[0], expected)
    with pytest.warns(DeprecationWarning, match="leave n_classes out"):
        assert torch.equal(mixup_batch(x, y, n_classes=10, mixing=0.3, indices=indices)[0], expected)
    with pytest.warns(DeprecationWarning, match="mixup_batch") as caught:  # as in 0.4, the number of classes third
        assert torch.equal(mixup_batch(x, y, 10, interpolation_lambda=0.3, indices=indices)[0], expected)
    assert {warning.filename for warning in caught} == {__file__}
    with pytest.warns(DeprecationWarning, match="leave num_classes out"):
        assert MixUp(num_classes=10, alpha=0.4).alpha == 0.4


def test_targets_are_mixed_during_the_loss_and_restored_after_it(state):
    x, y = state.batch
    algorithm = MixUp(alpha=1.0)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    weight, indices = algorithm.mixing, algorithm.indices
    torch.testing.assert_close(state.batch[0], (1 - weight) * x + weight * x[indices])
    assert torch.equal(algorithm.permuted_target, y[indices])
    assert state.batch[1] is y

    algorithm.apply(Event.BEFORE_LOSS, state, None)
    one_hot = F.one_hot(y, 3).float()
    torch.testing.assert_close(state.batch[1], (1 - weight) * one_hot + weight * one_hot[indices])
    algorithm.apply(Event.AFTER_LOSS, state, None)
    assert state.batch[1] is y


def test_interpolated_loss_is_the_weighted_sum_of_both_losses(state):
    y = state.batch[1]
    algorithm = MixUp(alpha=1.0, interpolate_loss=True)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    state.loss = state.model.loss(state.outputs, state.batch)
    algorithm.apply(Event.BEFORE_BACKWARD, state, None)
    weight = algorithm.mixing
    losses = [F.cross_entropy(state.outputs, target) for target in (y, y[algorithm.indices])]
    torch.testing.assert_close(state.loss, (1 - weight) * losses[0] + weight * losses[1])
    assert state.batch[1] is y


@pytest.mark.parametrize("interpolate_loss", [True, False])
def test_both_ways_have_the_same_gradient_for_cross_entropy(state, interpolate_loss):
    algorithm = MixUp(alpha=1.0, interpolate_loss=interpolate_loss)
    original = state.batch
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    for event in (Event.BEFORE_LOSS, None, Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
        if event is None:
            state.loss = state.model.loss(state.outputs, state.batch)
        elif algorithm.match(event, state):
            algorithm.apply(event, state, None)
    state.loss.backward()

    outputs = state.outputs.detach().requires_grad_()
    weight, y = algorithm.mixing, original[1]
    expected = (1 - weight) * F.cross_entropy(outputs, y)
    expected = expected + weight * F.cross_entropy(outputs, y[algorithm.indices])
    expected.backward()
    torch.testing.assert_close(state.outputs.grad, outputs.grad)


def loss_on_events(state: State, algorithms: list[Algorithm]) -> torch.Tensor:
    state.algorithms = algorithms
    state.set_dataloader([state.batch], "train")
    engine = Engine(state)
    for event in (Event.BEFORE_FORWARD, Event.BEFORE_LOSS):
        engine.run_event(event)
    state.loss = state.model.loss(state.outputs, state.batch)
    for event in (Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
        engine.run_event(event)
    return state.loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_both_ways_have_the_same_loss_beside_label_smoothing(state, smoothing):
    batch = state.batch
    of_targets = loss_on_events(state, [LabelSmoothing(smoothing), MixUp(1.0)])
    state.batch = batch
    mixup = MixUp(1.0, interpolate_loss=True)
    of_losses = loss_on_events(state, [LabelSmoothing(smoothing), mixup])
    torch.testing.assert_close(of_losses, of_targets, atol=1e-6, rtol=0)  # rounding of float32
    y, permuted = batch[1], batch[1][mixup.indices]
    expected = torch.lerp(
        F.cross_entropy(state.outputs, y, label_smoothing=smoothing),
        F.cross_entropy(state.outputs, permuted, label_smoothing=smoothing),
        mixup.mixing,
    )
    torch.testing.assert_close(of_losses, expected, atol=1e-6, rtol=0)


def test_label_smoothing_of_another_part_of_the_batch_leaves_the_second_loss_alone(state):
    x, y = state.batch
    state.batch = (x, y, y)
    mixup = MixUp(1.0, interpolate_loss=True)
    loss = loss_on_events(state, [LabelSmoothing(0.5, target_key=2), mixup])
    losses = [F.cross_entropy(state.outputs, target) for target in (y, y[mixup.indices])]
    torch.testing.assert_close(loss, (1 - mixup.mixing) * losses[0] + mixup.mixing * losses[1])


@pytest.mark.parametrize(
    ("precision", "dtype"), [("amp_bf16", torch.bfloat16), ("fp32", torch.float32), (None, torch.float32)]
)
def test_the_second_loss_is_computed_in_the_precision_of_the_state(state, precision, dtype):
    seen = []

    def loss(outputs, batch):
        scores = outputs @ outputs.T  # autocast decides on the dtype of a product
        seen.append(scores.dtype)
        return scores.float().mean()

    state.model.loss, state.loss = loss, torch.zeros(())
    state.precision = precision
    if precision is None:  # as a loop's own state may have it
        state._precision = None
    algorithm = MixUp(1.0, interpolate_loss=True)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    algorithm.apply(Event.BEFORE_BACKWARD, state, None)
    assert seen == [dtype]


@pytest.mark.parametrize("error", [NotImplementedError, TypeError])
@pytest.mark.parametrize("algorithm", [MixUp(), LabelSmoothing()], ids=repr)
def test_a_batch_that_is_one_tensor_is_refused_and_keeps_its_values(state, algorithm, error):
    state.batch = torch.rand(4, 4)
    before = state.batch.clone()
    event = Event.BEFORE_FORWARD if isinstance(algorithm, MixUp) else Event.BEFORE_LOSS
    with pytest.raises(error, match=r"(input_key=0|target_key=1).* one tensor of shape \(4, 4\)"):
        algorithm.apply(event, state, None)
    assert torch.equal(state.batch, before)


def test_a_batch_that_is_one_tensor_works_with_functions_as_keys(state):
    table = state.batch = torch.rand(4, 5)
    before = table.clone()

    def put(columns):
        def setter(batch, value):
            batch = batch.clone()
            batch[:, columns] = value
            return batch

        return setter

    input_key, target_key = (lambda batch: batch[:, :4], put(slice(4))), (lambda batch: batch[:, 4], put(4))
    algorithm = MixUp(1.0, True, input_key, target_key)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    expected = torch.lerp(before[:, :4], before[algorithm.indices, :4], algorithm.mixing)
    torch.testing.assert_close(state.batch[:, :4], expected)
    assert torch.equal(table, before)


@pytest.mark.parametrize(
    ("interpolate_loss", "events"),
    [
        (False, [Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS]),
        (True, [Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD]),
    ],
)
def test_it_matches_the_events_where_it_changes_something(state, interpolate_loss, events):
    algorithm = MixUp(interpolate_loss=interpolate_loss)
    assert [event for event in Event if algorithm.match(event, state)] == events


Pair = collections.namedtuple("Pair", "image label")


@pytest.mark.parametrize("interpolate_loss", [True, False])
@pytest.mark.parametrize(
    ("make_batch", "input_key", "target_key"),
    [
        (lambda x, y: (x, y), 0, 1),
        (lambda x, y: [x, y], 0, 1),
        (lambda x, y: {"image": x, "label": y}, "image", "label"),
        (lambda x, y: Pair(x, y), "image", "label"),
        (
            lambda x, y: {"in": {"x": x}, "y": y},
            (lambda b: b["in"]["x"], lambda b, v: {**b, "in": {"x": v}}),
            "y",
        ),
    ],
    ids=["tuple", "list", "dict", "namedtuple", "getter and setter"],
)
def test_batches_of_every_form_are_mixed(state, make_batch, input_key, target_key, interpolate_loss):
    x, y = state.batch
    before = x.clone()
    state.batch = make_batch(x, y)
    state.model.loss = lambda outputs, batch: F.cross_entropy(outputs, batch_get(batch, target_key))
    algorithm = MixUp(1.0, interpolate_loss, input_key, target_key)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    assert not torch.equal(state.batch_get_item(input_key), x)
    if interpolate_loss:
        state.loss = F.cross_entropy(state.outputs, y)
        algorithm.apply(Event.BEFORE_BACKWARD, state, None)
    else:
        algorithm.apply(Event.BEFORE_LOSS, state, None)
        assert state.batch_get_item(target_key).shape == state.outputs.shape
        algorithm.apply(Event.AFTER_LOSS, state, None)
    assert state.batch_get_item(target_key) is y
    assert torch.equal(x, before)


@pytest.mark.parametrize("error", [NotImplementedError, TypeError])
def test_what_is_no_tensor_is_refused_by_name(state, error):
    x, y = state.batch
    state.batch = (x, [y])
    with pytest.raises(error, match="target_key=1"):
        MixUp().apply(Event.BEFORE_FORWARD, state, None)
    state.batch = ([x], y)
    with pytest.raises(error, match="input_key=0"):
        MixUp().apply(Event.BEFORE_FORWARD, state, None)
    state.batch, state.outputs = (x, y), [state.outputs]
    algorithm = MixUp()
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    with pytest.raises(error, match="output"):
        algorithm.apply(Event.BEFORE_LOSS, state, None)
    state.outputs, state.loss = state.outputs[0], {"total": torch.ones(())}
    algorithm = MixUp(interpolate_loss=True)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    with pytest.raises(error, match="the loss"):
        algorithm.apply(Event.BEFORE_BACKWARD, state, None)


def test_the_loss_is_found_inside_a_wrapper_and_missed_by_name(state):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    algorithm = MixUp(1.0, interpolate_loss=True)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    state.loss = torch.zeros(())
    state.model = Wrapper(state.model)
    algorithm.apply(Event.BEFORE_BACKWARD, state, None)
    assert state.loss > 0

    state.model, state.loss = nn.Linear(1, 1), torch.zeros(())
    with pytest.raises(AttributeError, match="Linear has no method loss"):
        algorithm.apply(Event.BEFORE_BACKWARD, state, None)
    state.model.loss = 3
    with pytest.raises(TypeError, match=r"Linear\.loss is 3"):
        algorithm.apply(Event.BEFORE_BACKWARD, state, None)


def draws(state: State, num_draws: int, algorithm: MixUp) -> list[tuple[list[int], float]]:
    batch, drawn = (torch.rand(16, 2), torch.arange(16)), []
    for _ in range(num_draws):
        state.batch = batch
        algorithm.apply(Event.BEFORE_FORWARD, state, None)
        drawn.append((algorithm.indices.tolist(), algorithm.mixing))
    return drawn


def test_draws_depend_on_seed_rank_and_number_only(state, monkeypatch):
    drawn = draws(state, 5, MixUp())
    torch.manual_seed(1234)
    assert draws(state, 5, MixUp()) == drawn
    assert len({str(draw) for draw in drawn}) == 5
    monkeypatch.setenv("RANK", "1")
    on_rank_1 = draws(state, 5, MixUp())
    assert all(one != other for one, other in zip(drawn, on_rank_1, strict=True))
    monkeypatch.delenv("RANK")
    state.rank_zero_seed += 1  # what rank 1 was seeded with before
    assert draws(state, 5, MixUp()) not in (drawn, on_rank_1)


def test_a_checkpoint_of_rank_0_makes_every_rank_go_on_where_it_was(state, monkeypatch):
    rank_0 = MixUp()
    draws(state, 3, rank_0)
    saved = rank_0.state_dict()
    monkeypatch.setenv("RANK", "1")
    whole = draws(state, 5, MixUp())
    resumed = MixUp()
    resumed.load_state_dict(saved)
    assert draws(state, 2, resumed) == whole[3:]


def test_training_resumed_from_a_checkpoint_ends_with_the_same_weights(make_loop, make_saver):
    saver = make_saver("3ba")
    whole = make_loop([MixUp(1.0)], [saver]).fit()
    for checkpoint in saver.checkpoints[:-1]:
        resumed = make_loop([MixUp(1.0)], seed=17).resume_from(checkpoint).fit()
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_state_of_composer_itself_loads():
    algorithm = MixUp()
    algorithm.load_state_dict({"repr": "<composer.algorithms.mixup.mixup.MixUp object>"})
    assert algorithm.state_dict()["num_draws"] == 0


def test_mixup_as_composers_welcome_tour_writes_it_trains(make_loop):
    class TourMixUp(Algorithm):
        def match(self, event, state):
            return event in [Event.AFTER_DATALOADER, Event.AFTER_LOSS]

        def apply(self, event, state, logger):
            input, target = state.batch

            if event == Event.AFTER_DATALOADER:
                new_input, self.permuted_target, self.mixing = mixup_batch(input, target, alpha=0.2)
                state.batch = (new_input, target)

            if event == Event.AFTER_LOSS:
                modified_batch = (input, self.permuted_target)
                new_loss = state.model.loss(state.outputs, modified_batch)
                state.loss *= 1 - self.mixing
                state.loss += self.mixing * new_loss
                losses.append(state.loss.item())

    losses = []
    make_loop([TourMixUp()], max_duration="8ep").fit()
    assert sum(losses[-4:]) < sum(losses[:4])


def cut(batch, size):
    return list(zip(*[part.split(size) for part in batch], strict=True))


@pytest.mark.parametrize("interpolate_loss", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_drawn_once_per_batch_training_does_not_depend_on_how_batches_are_cut(
    make_loop, make_model, interpolate_loss, size
):
    uncut = make_loop([MixUp(1.0, interpolate_loss)], model=make_model(norm=False)).fit()
    mixup = MixUp(1.0, interpolate_loss, draw_per="batch")
    pieces = make_loop([mixup], model=make_model(norm=False), microbatch_size=size).fit()
    # Twelve steps whose gradients are summed in another order, in float32.
    torch.testing.assert_close(pieces.model.state_dict(), uncut.model.state_dict(), rtol=1e-4, atol=1e-5)


def test_drawn_once_per_batch_an_attempt_that_starts_again_gets_the_same_targets(state):
    algorithm = MixUp(alpha=1.0, draw_per="batch")
    algorithm.apply(Event.BATCH_START, state, None)
    whole, seen = state.batch, []
    for size in (4, 2):  # as when the device ran out of memory with the larger microbatch
        algorithm.apply(Event.BEFORE_TRAIN_BATCH, state, None)
        taken = []
        for state.batch in cut(whole, size):
            algorithm.apply(Event.BEFORE_FORWARD, state, None)
            taken.append(algorithm.permuted_target)
        seen.append(torch.cat(taken))
    assert torch.equal(*seen)
    assert torch.equal(seen[0], whole[1][algorithm.indices])


@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_drawn_once_per_batch_training_resumes_with_the_same_weights(make_loop, make_saver, interpolate_loss):
    def mixup():
        return MixUp(alpha=1.0, interpolate_loss=interpolate_loss, draw_per="batch")

    saver = make_saver("5ba")
    whole = make_loop([mixup()], [saver], microbatch_size=3).fit()
    resumed = make_loop([mixup()], microbatch_size=3).resume_from(saver.checkpoints[0]).fit()
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_drawn_once_per_batch_a_loop_without_batch_start_is_refused(state):
    with pytest.raises(RuntimeError, match=r"microbatches up to now have 4 examples, and the batch .* had 0"):
        MixUp(draw_per="batch").apply(Event.BEFORE_FORWARD, state, None)


def test_drawing_per_anything_else_is_refused():
    with pytest.raises(ValueError, match="draw_per='epoch' is unknown"):
        MixUp(draw_per="epoch")
