"""`resize_batch` against its definition, and `ProgressiveResizing` against its schedule."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from composer_algorithms import ProgressiveResizing
from composer_algorithms.functional import resize_batch
from composer_events import Event, Logger, LoggerDestination
from composer_time import Timestamp


def places(n, height, width):
    return (torch.arange(height)[:, None] * 100.0 + torch.arange(width)).expand(n, 1, -1, -1)


@given(height=st.integers(1, 24), width=st.integers(1, 24), scale=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_a_crop_is_a_window_of_the_image(height, width, scale, seed):
    x = places(2, height, width)
    smaller, target = resize_batch(x, None, scale, "crop", generator=torch.Generator().manual_seed(seed))
    size = max(1, int(height * scale)), max(1, int(width * scale))
    top, left = int(smaller[0, 0, 0, 0]) // 100, int(smaller[0, 0, 0, 0]) % 100
    assert torch.equal(smaller, x[..., top : top + size[0], left : left + size[1]])
    assert smaller.shape[-2:] == size
    assert target is None


def test_every_place_of_a_crop_is_equally_likely():
    generator = torch.Generator().manual_seed(0)
    tops = torch.zeros(6)
    for _ in range(3000):
        smaller, _ = resize_batch(places(1, 10, 10), None, 0.5, "crop", generator=generator)
        tops[int(smaller[0, 0, 0, 0]) // 100] += 1
    assert (tops / 3000 - 1 / 6).abs().max() < 5 * (5 / 36 / 3000) ** 0.5


@given(height=st.integers(1, 24), width=st.integers(1, 24), scale=st.floats(0.01, 0.99))
def test_resizing_takes_the_nearest_pixels(height, width, scale):
    x = places(1, height, width)
    smaller, _ = resize_batch(x, None, scale)
    size = max(1, int(height * scale)), max(1, int(width * scale))
    assert smaller.shape[-2:] == size
    assert set(smaller.unique().tolist()) <= set(x.unique().tolist())
    if min(height, width) * scale >= 1:
        rows = (torch.arange(size[0]) * (1 / torch.tensor(scale))).floor().long()
        assert ((smaller[0, 0, :, 0] // 100) - rows).abs().max() <= 1  # rounding of float32 on the border of a pixel


@pytest.mark.parametrize("interpolation", ["bilinear", "area"])
def test_other_interpolations_are_torchs(interpolation):
    x = torch.rand(2, 3, 16, 12)
    smaller, _ = resize_batch(x, None, 0.5, interpolation=interpolation)
    torch.testing.assert_close(smaller, F.interpolate(x, scale_factor=0.5, mode=interpolation))
    blurred, _ = resize_batch(x, None, 0.5, interpolation="bilinear", antialias=True)
    torch.testing.assert_close(blurred, F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True))


@pytest.mark.parametrize("scale", [1, 1.0, 2.5])
def test_full_size_returns_the_very_objects_and_does_not_look_at_the_target(scale):
    x = torch.rand(1, 1, 2, 2)
    smaller, target = resize_batch(x, None, scale, resize_targets=True)
    assert smaller is x
    assert target is None


@pytest.mark.parametrize("mode", ["crop", "resize"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize("has_classes", [True, False])
def test_targets_become_smaller_in_the_same_way(mode, dtype, has_classes):
    x = places(2, 8, 12)
    target = (x % 100 if has_classes else x[:, 0] % 100).to(dtype)
    smaller, smaller_target = resize_batch(x, target, 0.5, mode, resize_targets=True)
    expected = (smaller % 100 if has_classes else smaller[:, 0] % 100).to(dtype)
    assert torch.equal(smaller_target, expected)
    assert smaller_target.dtype == dtype


def test_targets_of_another_size_are_cropped_at_the_same_place():
    x = places(1, 16, 16)
    target = places(1, 8, 8)
    smaller, smaller_target = resize_batch(x, target, 0.5, "crop", True, generator=torch.Generator().manual_seed(2))
    top = int(smaller[0, 0, 0, 0]) // 100
    assert smaller_target.shape[-2:] == (4, 4)
    assert int(smaller_target[0, 0, 0, 0]) // 100 == top // 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "shrink"}, "mode='shrink' is unknown"),
        ({"interpolation": "cubic"}, "interpolation='cubic' is unknown"),
        ({"antialias": True}, "requires interpolation='bilinear'"),
        ({"scale_factor": 0}, r"scale_factor=0 is not in \(0, inf"),
        ({"input": torch.rand(4, 4)}, r"input of shape \(4, 4\) has no spatial dims"),
        ({"target": torch.zeros(2), "resize_targets": True}, r"got the shape \(2,\)"),
        ({"target": None, "resize_targets": True}, "has no target to resize"),
    ],
)
def test_what_cannot_be_resized_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resize_batch(**{"input": torch.rand(2, 1, 4, 4), "target": None, "scale_factor": 0.5, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "shrink"}, "mode='shrink'"),
        ({"initial_scale": 1.5}, r"initial_scale=1\.5"),
        ({"finetune_fraction": -0.5}, r"finetune_fraction=-0\.5"),
        ({"delay_fraction": 0.75, "finetune_fraction": 0.5}, "add up to more than 1"),
        ({"size_increment": 0}, "size_increment=0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProgressiveResizing(**arguments)


@given(
    initial=st.floats(0, 1),
    delay=st.floats(0, 1),
    finetune=st.floats(0, 1),
    increment=st.integers(1, 9),
    batches=st.integers(0, 20),
    size=st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
def test_no_arguments_lead_to_an_impossible_size(initial, delay, finetune, increment, batches, size):
    finetune = min(finetune, 1 - delay)
    algorithm = ProgressiveResizing("resize", initial, finetune, delay, increment)
    elapsed = batches / 20
    if elapsed < delay:
        assert algorithm.scale_factor(elapsed) == initial
    if elapsed >= 1 - finetune and elapsed >= delay:
        assert algorithm.scale_factor(elapsed) == pytest.approx(1)
    scale = algorithm.scale_factor(elapsed)
    assert initial <= scale <= 1 + 1e-9
    assert all(1 <= algorithm._rounded(side, scale) <= side for side in size)


class Kept(LoggerDestination):
    def __init__(self):
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append(metrics)


@pytest.mark.parametrize("mode", ["crop", "resize"])
@pytest.mark.parametrize(
    ("batch", "scale", "size"), [(0, 0.5, (12, 16)), (6, 0.5, (12, 16)), (8, 0.75, (16, 24)), (10, 1.0, (22, 34))]
)
def test_inputs_grow_by_the_schedule_to_multiples_of_the_increment(state, mode, batch, scale, size):
    state.max_duration, state.timestamp = "12ba", Timestamp(batch=batch)
    x, y = places(2, 22, 34), torch.zeros(2)
    state.batch, before, kept = (x, y), x.clone(), Kept()
    algorithm = ProgressiveResizing(mode, 0.5, 1 / 6, 0.5)
    assert [event for event in Event if algorithm.match(event, state)] == [Event.AFTER_DATALOADER]
    algorithm.apply(Event.AFTER_DATALOADER, state, Logger(state, kept))
    expected = {"height": size[0], "width": size[1], "scale_factor": pytest.approx(scale)}
    assert kept.metrics == [{f"progressive_resizing/{key}": value for key, value in expected.items()}]
    assert state.batch[0].shape[-2:] == size
    assert state.batch[1] is y
    assert torch.equal(x, before)


def test_targets_are_resized_on_demand_and_looked_for_only_then(state):
    state.batch = {"image": places(2, 8, 8), "mask": places(2, 8, 8)[:, 0].long()}
    ProgressiveResizing(input_key="image", target_key="mask", resize_targets=True).apply(
        Event.AFTER_DATALOADER, state, None
    )
    assert torch.equal(state.batch["image"][:, 0].long(), state.batch["mask"])
    state.batch = {"image": places(2, 8, 8)}
    ProgressiveResizing(input_key="image").apply(Event.AFTER_DATALOADER, state, None)
    assert state.batch["image"].shape == (2, 1, 4, 4)
    with pytest.raises(TypeError, match="input_key='x'"):
        ProgressiveResizing(input_key="x").apply(Event.AFTER_DATALOADER, state, None)


def test_a_checkpoint_makes_the_draws_go_on(state):
    def crops(algorithm, num):
        result = []
        for _ in range(num):
            state.batch = (places(1, 32, 32), torch.zeros(1))
            algorithm.apply(Event.AFTER_DATALOADER, state, None)
            result.append(state.batch[0])
        return torch.stack(result)

    whole, first, resumed = (ProgressiveResizing("crop") for _ in range(3))
    crops(first, 3)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(crops(resumed, 2), crops(whole, 5)[3:])
