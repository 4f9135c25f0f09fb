"""`cutout_batch` against its definition, and `CutOut` on its event."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from composer_algorithms import CutOut, CutOutTransform
from composer_algorithms.functional import cutout_batch
from composer_events import Event


@given(height=st.integers(1, 20), width=st.integers(1, 20), length=st.floats(0, 1), seed=st.integers(0, 999))
def test_one_hole_is_a_square_around_its_centre_as_far_as_the_image_goes(height, width, length, seed):
    x = torch.ones(2, 3, height, width)
    result = cutout_batch(x, length=length, generator=torch.Generator().manual_seed(seed))
    side = int(min(height, width) * length) // 2 * 2
    holes = (result == 0).nonzero()
    assert set(result.unique().tolist()) <= {0.0, 1.0}
    assert (x == 1).all()
    assert all(torch.equal(result[0, 0], result[n, c]) for n in range(2) for c in range(3))
    if side == 0:
        assert len(holes) == 0
        return
    rows, columns = holes[:, 2], holes[:, 3]
    size = (rows.max() - rows.min() + 1).item(), (columns.max() - columns.min() + 1).item()
    assert (result[0, 0] == 0).sum() == size[0] * size[1]
    for extent, low, high, full in (
        (size[0], rows.min(), rows.max(), height),
        (size[1], columns.min(), columns.max(), width),
    ):
        touches_edge = low == 0 or high == full - 1
        assert extent == side or (touches_edge and side // 2 <= extent < side)


@pytest.mark.parametrize("uniform_sampling", [True, False])
def test_how_often_a_pixel_is_covered(uniform_sampling):
    generator = torch.Generator().manual_seed(0)
    covered = torch.zeros(10, 10)
    for _ in range(6000):
        hole = cutout_batch(torch.ones(1, 10, 10), length=0.4, uniform_sampling=uniform_sampling, generator=generator)
        covered += hole[0] == 0
    # A pixel p is covered from the centres p - 1 to p + 2; of those, fewer lie inside the image near its edge.
    centres = torch.tensor([sum(0 <= c < 10 for c in range(p - 1, p + 3)) / 10 for p in range(10)])
    if uniform_sampling:
        centres = torch.full((10,), 4 / 14)
    expected = centres[:, None] * centres
    assert (covered / 6000 - expected).abs().max() < 5 * (0.16 * 0.84 / 6000) ** 0.5


def test_holes_add_up():
    x = torch.ones(1, 64, 64)
    areas = [(cutout_batch(x, n, 0.25, generator=torch.Generator().manual_seed(0)) == 0).sum() for n in (0, 1, 4)]
    assert areas[0] == 0
    assert areas[1] <= 256
    assert areas[1] < areas[2] <= 4 * 256


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_a_pil_image_gets_the_same_hole_as_a_tensor(mode):
    image = Image.new(mode, (12, 9), color="white")
    result = cutout_batch(image, length=0.5, generator=torch.Generator().manual_seed(5))
    tensor = cutout_batch(torch.ones(1, 9, 12), length=0.5, generator=torch.Generator().manual_seed(5))
    assert result.mode == mode
    black = [result.getpixel((x, y)) in (0, (0, 0, 0), (0, 0, 0, 0)) for y in range(9) for x in range(12)]
    assert black == (tensor[0] == 0).flatten().tolist()
    assert image.getpixel((0, 0)) not in (0, (0, 0, 0), (0, 0, 0, 0))
    assert image.tobytes() == Image.new(mode, (12, 9), color="white").tobytes()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64])
def test_dtype_and_shape_stay(dtype):
    for shape in ((3, 8, 8), (2, 3, 8, 8)):
        result = cutout_batch(torch.ones(shape, dtype=dtype))
        assert (result.dtype, result.shape) == (dtype, shape)


def test_without_an_image_it_is_a_transform_that_torchs_seed_repeats():
    transform = cutout_batch(num_holes=2, length=0.5)
    assert repr(transform) == "CutOutTransform(num_holes=2, length=0.5, uniform_sampling=False)"
    x = torch.rand(3, 16, 16)
    torch.manual_seed(1)
    first = transform(x)
    torch.manual_seed(1)
    assert torch.equal(first, CutOutTransform(2, 0.5)(x))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": -0.5}, ValueError, r"length=-0\.5"),
        ({"length": 1.5}, ValueError, r"length=1\.5"),
        ({"num_holes": -1}, ValueError, "num_holes=-1"),
        ({"input": torch.ones(8, 8)}, ValueError, r"shape \(8, 8\) is not an image"),
        ({"input": [1]}, TypeError, "list is not an image"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        cutout_batch(**{"input": torch.ones(3, 8, 8), **arguments})
    if "input" not in arguments:
        with pytest.raises(error, match=message):
            CutOut(**arguments)


def test_older_spellings_work_and_say_what_to_write_instead():
    x = torch.ones(1, 16, 16)
    expected = cutout_batch(x, 2, 0.5, generator=torch.Generator().manual_seed(0))
    with pytest.warns(DeprecationWarning, match="num_holes=2"):
        by_old_name = cutout_batch(x, n_holes=2, length=0.5, generator=torch.Generator().manual_seed(0))
    with pytest.warns(DeprecationWarning, match="0.5 for these images"):
        in_pixels = cutout_batch(x, 2, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(by_old_name, expected)
    assert torch.equal(in_pixels, expected)
    with pytest.warns(DeprecationWarning, match="num_holes=3"):
        assert CutOut(n_holes=3).num_holes == 3


@pytest.mark.parametrize(("length", "side"), [(30, 44), (2, 60), (44, 44)])
@pytest.mark.filterwarnings("ignore:length=:DeprecationWarning")
def test_a_length_in_pixels_is_kept_to_the_pixel(length, side):
    # Its part of the side, times the side, may be less: 44 * (30 / 44) is 29.999...
    hole = cutout_batch(torch.ones(1, 200, side), length=length, generator=torch.Generator().manual_seed(1)) == 0
    rows = hole.any(dim=2).sum().item()  # at this seed the edge is far from the centre's row
    assert rows == length


def test_the_inputs_of_a_loaded_batch_get_holes_and_the_loaded_tensors_do_not(state):
    x, y = torch.ones(4, 3, 8, 8), torch.arange(4)
    state.batch = (x, y)
    algorithm = CutOut(length=1.0)
    assert [event for event in Event if algorithm.match(event, state)] == [Event.AFTER_DATALOADER]
    algorithm.apply(Event.AFTER_DATALOADER, state, None)
    assert (state.batch[0] == 0).any()
    assert state.batch[1] is y
    assert (x == 1).all()
    state.batch = ([x], y)
    with pytest.raises(TypeError, match="input_key=0"):
        algorithm.apply(Event.AFTER_DATALOADER, state, None)


def test_a_checkpoint_makes_the_draws_go_on(state):
    def holes(algorithm, num):
        result = []
        for _ in range(num):
            state.batch = (torch.ones(1, 1, 32, 32), torch.zeros(1))
            algorithm.apply(Event.AFTER_DATALOADER, state, None)
            result.append(state.batch[0])
        return torch.stack(result)

    whole, first, resumed = CutOut(), CutOut(), CutOut()
    holes(first, 3)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(holes(resumed, 2), holes(whole, 5)[3:])
