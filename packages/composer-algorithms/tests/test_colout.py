"""`colout_batch` against its definition, and `ColOut` on its events."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from composer_algorithms import ColOut, ColOutTransform
from composer_algorithms.functional import colout_batch
from composer_events import Event


def places(height, width):
    """An image whose pixels say where they are."""
    return torch.arange(height)[:, None] * 1000 + torch.arange(width)


@given(
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    p_row=st.floats(0, 0.9),
    p_col=st.floats(0, 0.9),
    seed=st.integers(0, 999),
)
def test_the_rows_and_columns_that_remain_are_whole_and_in_order(height, width, p_row, p_col, seed):
    x = places(height, width).expand(2, 3, -1, -1)
    result = colout_batch(x, p_row, p_col, generator=torch.Generator().manual_seed(seed))
    assert result.shape == (2, 3, int((1 - p_row) * height), int((1 - p_col) * width))
    if result.numel() == 0:
        return
    rows, columns = result[0, 0, :, 0] // 1000, result[0, 0, 0] % 1000
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert columns.tolist() == sorted(set(columns.tolist()))
    assert torch.equal(result, x[:, :, rows][..., columns])


def test_every_row_is_kept_equally_often():
    generator = torch.Generator().manual_seed(0)
    kept = torch.zeros(10)
    for _ in range(4000):
        kept[colout_batch(places(10, 1)[None], 0.3, 0.0, generator=generator)[0, :, 0] // 1000] += 1
    assert (kept / 4000 - 0.7).abs().max() < 5 * (0.7 * 0.3 / 4000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dtype_stays_and_memory_format_does_not_matter(dtype, memory_format):
    x = (255 * torch.rand(2, 3, 8, 8)).to(dtype).contiguous(memory_format=memory_format)
    result = colout_batch(x, 0.5, 0.25, generator=torch.Generator().manual_seed(0))
    expected = colout_batch(x.contiguous().double(), 0.5, 0.25, generator=torch.Generator().manual_seed(0))
    assert result.dtype == dtype
    assert torch.equal(result.double(), expected)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_a_pil_image_loses_the_same_rows_and_columns_as_a_tensor(mode):
    image = Image.frombytes("L", (12, 9), bytes(range(108))).convert(mode)
    result = colout_batch(image, 0.4, 0.5, generator=torch.Generator().manual_seed(5))
    tensor = torch.arange(108, dtype=torch.uint8).view(1, 9, 12)
    expected = colout_batch(tensor, 0.4, 0.5, generator=torch.Generator().manual_seed(5))
    assert (result.mode, result.size) == (mode, (6, 5))
    assert result.convert("L").tobytes() == bytes(expected.flatten().tolist())


@pytest.mark.parametrize(
    ("target", "resize_target", "is_resized"),
    [
        (torch.arange(4), "auto", False),
        (torch.zeros(4, 8), "auto", False),
        (places(8, 6).expand(4, -1, -1), "auto", True),
        (places(8, 6).expand(4, -1, -1), "AUTO", True),
        (places(8, 6).expand(4, -1, -1), False, False),
        (places(4, 6).expand(4, -1, -1), "auto", False),
        (places(8, 6).expand(4, -1, -1), True, True),
    ],
)
def test_a_target_of_the_inputs_size_loses_the_same_rows_and_columns(target, resize_target, is_resized):
    x = places(8, 6).expand(4, 3, -1, -1)
    result = colout_batch((x, target), 0.5, 0.5, resize_target)
    if not is_resized:
        assert result.shape == (4, 3, 4, 3)
        return
    smaller, smaller_target = result
    assert torch.equal(smaller[:, 0], smaller_target)


def test_a_pair_of_pil_images_loses_the_same_rows_and_columns():
    image = Image.frombytes("L", (4, 4), bytes(range(16)))
    smaller, target = colout_batch((image, image.copy()), 0.5, 0.5)
    assert smaller.tobytes() == target.tobytes()


@pytest.mark.parametrize("mode", ["P", "1"])
def test_a_mask_of_numbered_colours_or_of_bits_stays_one(mode):
    colours = Image.new("RGB", (10, 8), "red")
    colours.paste("blue", (3, 2, 9, 7))
    mask = colours.convert("P", palette=Image.Palette.ADAPTIVE, colors=2) if mode == "P" else colours.convert("1")
    torch.manual_seed(2)
    result = colout_batch(mask, 0.5, 0.5)
    torch.manual_seed(2)
    expected = colout_batch(mask.convert("RGB"), 0.5, 0.5)
    assert (result.mode, result.size) == (mode, (5, 4))
    assert result.convert("RGB").tobytes() == expected.tobytes()


def test_without_an_image_it_is_a_transform_that_torchs_seed_repeats():
    transform = colout_batch(p_row=0.5, p_col=0.25)
    assert repr(transform) == "ColOutTransform(p_row=0.5, p_col=0.25, resize_target='auto')"
    x = torch.rand(3, 16, 16)
    torch.manual_seed(1)
    first = transform(x)
    torch.manual_seed(1)
    assert torch.equal(first, ColOutTransform(0.5, 0.25)(x))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"p_row": -0.1}, ValueError, r"p_row=-0\.1"),
        ({"p_col": 1.1}, ValueError, r"p_col=1\.1"),
        ({"resize_target": "maybe"}, ValueError, "resize_target='maybe'"),
        ({"sample": (1, 2, 3)}, ValueError, "tuple of 3 parts"),
        ({"sample": torch.zeros(8, 8)}, ValueError, r"shape \(8, 8\) is not an image"),
        ({"sample": (torch.zeros(1, 8, 8), torch.zeros(1, 4, 4)), "resize_target": True}, ValueError, "8 x 8.* 4 x 4"),
        ({"sample": "cat.png"}, TypeError, "str is not an image"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        colout_batch(**{"sample": torch.zeros(1, 8, 8), **arguments})
    if "sample" not in arguments:
        with pytest.raises(error, match=message):
            ColOut(**arguments)


def test_resized_targets_need_whole_batches():
    with pytest.raises(NotImplementedError, match="batch=True"):
        ColOut(batch=False, resize_target=True)


def test_a_loaded_batch_is_cut_and_its_other_target_is_the_same_object(state):
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
    state.batch, before = (x, y), x.clone()
    algorithm = ColOut(0.5, 0.25, True)
    assert [event for event in Event if algorithm.match(event, state)] == [Event.AFTER_DATALOADER]
    algorithm.apply(Event.AFTER_DATALOADER, state, None)
    assert state.batch[0].shape == (4, 3, 4, 6)
    assert state.batch[1] is y
    assert torch.equal(x, before)


def test_targets_with_a_value_for_each_pixel_are_cut_too(state):
    x = places(8, 6).expand(4, 1, -1, -1)
    state.batch = {"image": x, "mask": x[:, 0]}
    ColOut(0.5, 0.5, input_key="image", target_key="mask").apply(Event.AFTER_DATALOADER, state, None)
    assert state.batch["mask"].shape == (4, 4, 3)
    assert torch.equal(state.batch["image"][:, 0], state.batch["mask"])


@pytest.mark.parametrize("key", ["input_key", "target_key"])
def test_what_is_no_tensor_is_refused_by_name(state, key):
    state.batch = (torch.rand(4, 3, 8, 8), [1])
    with pytest.raises(NotImplementedError, match=f"{key}=1"):
        ColOut(**{key: 1}).apply(Event.AFTER_DATALOADER, state, None)


def test_a_checkpoint_makes_the_draws_go_on(state):
    def cut(algorithm, num):
        result = []
        for _ in range(num):
            state.batch = (places(32, 32).expand(1, 1, -1, -1), torch.zeros(1))
            algorithm.apply(Event.AFTER_DATALOADER, state, None)
            result.append(state.batch[0])
        return torch.stack(result)

    whole, first, resumed = ColOut(), ColOut(), ColOut()
    cut(first, 3)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(cut(resumed, 2), cut(whole, 5)[3:])
