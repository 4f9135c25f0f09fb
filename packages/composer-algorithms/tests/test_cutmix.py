"""`cutmix_batch` against its definition, and `CutMix` on its events."""

import collections

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from composer_algorithms import CutMix, LabelSmoothing
from composer_algorithms.functional import cutmix, cutmix_batch
from composer_events import Engine, Event, batch_get


def images(n=4, height=8, width=6):
    return torch.rand(n, 3, height, width), torch.arange(n) % 3


@pytest.fixture
def image_state(state):
    state.batch = images()
    return state


@given(
    x=st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted),
    y=st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted),
    seed=st.integers(0, 99),
)
def test_the_box_comes_from_the_permuted_batch_and_the_rest_from_the_batch(x, y, seed):
    torch.manual_seed(seed)
    inputs, targets = images()
    box, indices = (x[0], y[0], x[1], y[1]), torch.randperm(4)
    mixed, permuted, own_area, used = cutmix_batch(inputs, targets, bbox=box, indices=indices)
    for i in range(4):
        for h in range(8):
            for w in range(6):
                source = indices[i] if box[0] <= h < box[2] and box[1] <= w < box[3] else i
                assert torch.equal(mixed[i, :, h, w], inputs[source, :, h, w])
    assert torch.equal(permuted, targets[indices])
    assert used == box
    assert own_area == pytest.approx(1 - (x[1] - x[0]) * (y[1] - y[0]) / 48)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_dtype_stays_and_the_inputs_are_not_changed(dtype):
    inputs = (255 * torch.rand(6, 3, 8, 8)).to(dtype)
    before = inputs.clone()
    mixed, *_ = cutmix_batch(inputs, torch.arange(6), length=0.5)
    assert mixed.dtype == dtype
    assert torch.equal(inputs, before)
    assert mixed.data_ptr() != inputs.data_ptr()


@pytest.mark.parametrize("uniform_sampling", [True, False])
@pytest.mark.parametrize("length", [0.0, 0.25, 0.5, 1.0])
def test_a_length_is_that_of_the_box_and_never_exceeded(length, uniform_sampling):
    areas = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        *_, own_area, (x1, y1, x2, y2) = cutmix_batch(
            *images(2, 16, 16), length=length, uniform_sampling=uniform_sampling, generator=generator
        )
        assert max(x2 - x1, y2 - y1) <= length * 16
        areas.append(1 - own_area)
    assert sum(areas) / len(areas) <= length**2
    assert (sum(areas) > 0) == (length > 0)


def test_the_area_before_the_edges_cut_it_has_the_mean_of_the_beta_distribution():
    # A centre in the middle of a large image is seldom drawn; the sides of boxes inside are sqrt(1 - w) of the image's.
    ratios = []
    for seed in range(4000):
        generator = torch.Generator().manual_seed(seed)
        *_, (x1, y1, x2, y2) = cutmix_batch(torch.empty(1, 100, 100), torch.zeros(1), alpha=1.0, generator=generator)
        if x1 > 0 and x2 < 100 and y1 > 0 and y2 < 100:
            ratios.append((x2 - x1) / 100)
    # With a uniform w, a side r has density 2r, and lies inside with probability (1 - r)^2: mean 2/5.
    assert abs(sum(ratios) / len(ratios) - 2 / 5) < 0.02


def test_an_alpha_near_0_makes_the_box_the_whole_image_or_nothing_equally_often():
    x, y = images(n=1, height=16, width=16)
    generator = torch.Generator().manual_seed(0)
    areas = [cutmix_batch(x, y, alpha=1e-5, uniform_sampling=True, generator=generator)[2] for _ in range(400)]
    nothing = sum(area == 1 for area in areas) / 400
    assert abs(nothing - 0.5) < 5 * (0.25 / 400) ** 0.5


def test_a_box_may_be_of_numpys_integers():
    x, y = images()
    box = tuple(np.array([1, 2, 5, 4]))
    assert torch.equal(cutmix_batch(x, y, bbox=box, indices=y)[0], cutmix_batch(x, y, bbox=(1, 2, 5, 4), indices=y)[0])


def test_uniform_sampling_covers_every_pixel_equally_often():
    counts = torch.zeros(10, 10)
    for seed in range(6000):
        generator = torch.Generator().manual_seed(seed)
        *_, (x1, y1, x2, y2) = cutmix_batch(
            torch.empty(1, 10, 10), torch.zeros(1), length=0.4, uniform_sampling=True, generator=generator
        )
        counts[x1:x2, y1:y2] += 1
    frequency = counts / 6000
    # 4 of 14 places along each side cover a pixel.
    assert (frequency - (4 / 14) ** 2).abs().max() < 5 * (0.0816 * 0.92 / 6000) ** 0.5


def test_with_alpha_0_the_box_is_as_large_as_the_image():
    *_, (x1, y1, x2, y2) = cutmix_batch(torch.empty(1, 64, 64), torch.zeros(1), alpha=0.0)
    assert min(x2 - x1, y2 - y1) >= 32  # and its centre lies inside


def test_a_generator_repeats_the_draws_and_without_one_the_global_seed_does():
    inputs, targets = images(16)
    first, second = (cutmix_batch(inputs, targets, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    torch.manual_seed(8)
    first = cutmix_batch(inputs, targets)
    torch.manual_seed(8)
    assert torch.equal(first[0], cutmix_batch(inputs, targets)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0.5, "bbox": (0, 0, 1, 1)}, "both define the size of the box"),
        ({"length": 1.5}, r"length=1\.5 is not in \[0, 1\]"),
        ({"alpha": -1.0}, r"alpha=-1\.0 is not in \[0, inf"),
        ({"bbox": (0, 0, 9, 2)}, r"bbox=\(0, 0, 9, 2\) does not lie in images of 8 x 6"),
        ({"bbox": (3, 0, 1, 2)}, r"bbox=\(3, 0, 1, 2\)"),
        ({"target": torch.zeros(3)}, r"target of shape \(3,\)"),
        ({"input": torch.zeros(4, 8)}, r"input of shape \(4, 8\) is not a batch of images"),
    ],
)
def test_what_cannot_be_mixed_is_refused(arguments, message):
    inputs, targets = images()
    with pytest.raises(ValueError, match=message):
        cutmix_batch(**{"input": inputs, "target": targets, **arguments})


def test_the_form_of_the_first_documents_returns_the_images_alone():
    inputs, targets = images()
    torch.manual_seed(3)
    expected = cutmix_batch(inputs, targets, alpha=1)[0]
    torch.manual_seed(3)
    with pytest.warns(DeprecationWarning, match="cutmix_batch"):
        assert torch.equal(cutmix(inputs, targets, alpha=1, num_classes=3), expected)


def test_the_form_of_the_first_documents_returns_mixed_targets_on_demand():
    inputs, targets = images()
    torch.manual_seed(3)
    _, permuted, own_area, _ = cutmix_batch(inputs, targets)
    torch.manual_seed(3)
    with pytest.warns(DeprecationWarning, match="cutmix_batch"):
        _, mixed = cutmix(inputs, targets, n_classes=3, return_targets=True)
    expected = own_area * F.one_hot(targets, 3) + (1 - own_area) * F.one_hot(permuted, 3)
    torch.testing.assert_close(mixed, expected)
    with pytest.warns(DeprecationWarning, match="cutmix_batch"), pytest.raises(ValueError, match="pass num_classes"):
        cutmix(inputs, targets, return_targets=True)


def test_targets_are_mixed_by_area_during_the_loss_and_restored_after_it(image_state):
    state = image_state
    inputs, targets = state.batch
    algorithm = CutMix()
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    expected, permuted, own_area, _ = cutmix_batch(inputs, targets, bbox=algorithm._bbox, indices=algorithm._indices)
    assert torch.equal(state.batch[0], expected)
    assert torch.equal(algorithm._permuted_target, permuted)
    assert algorithm._adjusted_lambda == own_area
    algorithm.apply(Event.BEFORE_LOSS, state, None)
    one_hot = own_area * F.one_hot(targets, 3) + (1 - own_area) * F.one_hot(permuted, 3)
    torch.testing.assert_close(state.batch[1], one_hot)
    algorithm.apply(Event.AFTER_LOSS, state, None)
    assert state.batch[1] is targets


def test_interpolated_loss_is_the_weighted_sum_of_both_losses(image_state):
    state, targets = image_state, image_state.batch[1]
    algorithm = CutMix(interpolate_loss=True)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    state.loss = state.model.loss(state.outputs, state.batch)
    algorithm.apply(Event.BEFORE_BACKWARD, state, None)
    weight = algorithm._adjusted_lambda
    losses = [F.cross_entropy(state.outputs, target) for target in (targets, targets[algorithm._indices])]
    torch.testing.assert_close(state.loss, weight * losses[0] + (1 - weight) * losses[1])
    assert state.batch[1] is targets


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_both_ways_have_the_same_loss_beside_label_smoothing(image_state, smoothing):
    state, batch, losses = image_state, image_state.batch, []
    for interpolate_loss in (False, True):
        state.batch, state.algorithms = batch, [LabelSmoothing(smoothing), CutMix(interpolate_loss=interpolate_loss)]
        state.set_dataloader([batch], "train")
        engine = Engine(state)
        for event in (Event.BEFORE_FORWARD, Event.BEFORE_LOSS):
            engine.run_event(event)
        state.loss = state.model.loss(state.outputs, state.batch)
        for event in (Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
            engine.run_event(event)
        losses.append(state.loss)
    torch.testing.assert_close(losses[0], losses[1])


def test_targets_with_a_value_for_each_pixel_get_the_box_too(image_state):
    state = image_state
    inputs, masks = torch.rand(4, 3, 8, 6), torch.randint(5, (4, 8, 6))
    before, state.batch = masks.clone(), (inputs, masks)
    algorithm = CutMix()
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    algorithm.apply(Event.BEFORE_LOSS, state, None)
    expected = cutmix_batch(masks.unsqueeze(1), masks, bbox=algorithm._bbox, indices=algorithm._indices)[0]
    assert torch.equal(state.batch[1], expected.squeeze(1))
    assert torch.equal(masks, before)
    algorithm.apply(Event.AFTER_LOSS, state, None)
    assert state.batch[1] is masks
    with pytest.raises(ValueError, match="a value for each pixel"):
        CutMix(interpolate_loss=True).apply(Event.BEFORE_FORWARD, state, None)


@pytest.mark.parametrize("interpolate_loss", [True, False])
def test_it_matches_the_events_where_it_changes_something(state, interpolate_loss):
    expected = [Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD]
    if not interpolate_loss:
        expected = [Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS]
    algorithm = CutMix(interpolate_loss=interpolate_loss)
    assert [event for event in Event if algorithm.match(event, state)] == expected


Pair = collections.namedtuple("Pair", "image label")


@pytest.mark.parametrize("interpolate_loss", [True, False])
@pytest.mark.parametrize(
    ("make_batch", "input_key", "target_key"),
    [
        (lambda x, y: (x, y), 0, 1),
        (lambda x, y: [x, y], 0, 1),
        (lambda x, y: {"image": x, "label": y}, "image", "label"),
        (lambda x, y: Pair(x, y), "image", "label"),
    ],
    ids=["tuple", "list", "dict", "namedtuple"],
)
def test_batches_of_every_form_are_mixed(image_state, make_batch, input_key, target_key, interpolate_loss):
    state = image_state
    inputs, targets = state.batch
    before, state.batch = inputs.clone(), make_batch(inputs, targets)
    state.model.loss = lambda outputs, batch: F.cross_entropy(outputs, batch_get(batch, target_key))
    algorithm = CutMix(0.0, interpolate_loss, input_key=input_key, target_key=target_key)
    algorithm.apply(Event.BEFORE_FORWARD, state, None)
    if interpolate_loss:
        state.loss = F.cross_entropy(state.outputs, targets)
        algorithm.apply(Event.BEFORE_BACKWARD, state, None)
    else:
        algorithm.apply(Event.BEFORE_LOSS, state, None)
        algorithm.apply(Event.AFTER_LOSS, state, None)
    assert state.batch_get_item(target_key) is targets
    assert torch.equal(inputs, before)


def test_what_is_no_tensor_is_refused_by_name(image_state):
    image_state.batch = (image_state.batch[0], [1, 2])
    with pytest.raises(NotImplementedError, match="target_key=1"):
        CutMix().apply(Event.BEFORE_FORWARD, image_state, None)


def test_an_older_argument_is_accepted_and_without_effect():
    with pytest.warns(DeprecationWarning, match="leave num_classes out"):
        assert repr(CutMix(num_classes=10, alpha=0.4)).startswith("CutMix(alpha=0.4")


def test_a_checkpoint_makes_the_draws_go_on(image_state):
    def boxes(algorithm, num):
        drawn = []
        for _ in range(num):
            image_state.batch = images(height=64, width=64)
            algorithm.apply(Event.BEFORE_FORWARD, image_state, None)
            drawn.append((algorithm._bbox, algorithm._indices.tolist()))
        return drawn

    whole, first, resumed = CutMix(), CutMix(), CutMix()
    boxes(first, 3)
    resumed.load_state_dict(first.state_dict())
    assert boxes(resumed, 2) == boxes(whole, 5)[3:]


def test_drawn_for_a_whole_batch_its_microbatches_get_their_part(image_state):
    state, (inputs, targets) = image_state, image_state.batch
    algorithm = CutMix(draw_per="batch")
    events = [Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS]
    assert [event for event in Event if algorithm.match(event, state)] == events
    algorithm.apply(Event.BATCH_START, state, None)
    mixed, permuted, own_area, _ = cutmix_batch(inputs, targets, bbox=algorithm._bbox, indices=algorithm._indices)
    assert torch.equal(state.batch[0], mixed)
    logits = state.outputs
    algorithm.apply(Event.BEFORE_TRAIN_BATCH, state, None)
    for part in (slice(0, 1), slice(1, 4)):
        state.batch, state.outputs = (mixed[part], targets[part]), logits[part]
        algorithm.apply(Event.BEFORE_FORWARD, state, None)
        assert torch.equal(state.batch[0], mixed[part])
        algorithm.apply(Event.BEFORE_LOSS, state, None)
        one_hot = own_area * F.one_hot(targets[part], 3) + (1 - own_area) * F.one_hot(permuted[part], 3)
        torch.testing.assert_close(state.batch[1], one_hot)
    with pytest.raises(ValueError, match="draw_per='epoch'"):
        CutMix(draw_per="epoch")
