"""The single changes of images against PIL and formulas, and RandAugment and AugMix that put them together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from PIL.Image import Resampling, Transform

from composer_algorithms import AugmentAndMixTransform, AugMix, RandAugment, RandAugmentTransform
from composer_algorithms import augmentation as p
from composer_algorithms.augmentation import augmentation_sets, image_as_type, map_pillow_function
from composer_algorithms.functional import augmix_image, randaugment_image


def noise(size=(16, 12), mode="RGB", seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], len(mode)), dtype=np.uint8)
    return Image.fromarray(values.squeeze())


def strengths(draw, num=400):
    torch.manual_seed(0)
    return [draw() for _ in range(num)]


def test_the_sets_have_the_primitives_of_the_paper():
    names = {key: [function.__name__ for function in functions] for key, functions in augmentation_sets.items()}
    assert len(names["safe"]) == 9
    assert names["all"] == [*names["safe"], "color", "contrast", "brightness", "sharpness"]
    assert names["original"] == [*names["safe"], *(f"{name}_original" for name in names["all"][9:])]


@pytest.mark.parametrize(
    "name", sorted({function.__name__ for functions in augmentation_sets.values() for function in functions})
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("level", [0, 1, 10])
def test_every_primitive_keeps_size_and_mode_and_leaves_the_image_alone(name, mode, level):
    image = noise(mode=mode)
    before = image.tobytes()
    torch.manual_seed(0)
    result = getattr(p, name)(image, level)
    assert (result.size, result.mode) == (image.size, mode)
    assert image.tobytes() == before


def test_tonal_primitives_are_pils_own():
    image = noise()
    assert p.autocontrast(image, 5).tobytes() == ImageOps.autocontrast(image).tobytes()
    assert p.equalize(image, 5).tobytes() == ImageOps.equalize(image).tobytes()
    few_bits = {ImageOps.posterize(image, bits).tobytes() for bits in (1, 2, 3, 4)}
    assert set(strengths(lambda: p.posterize(image, 10).tobytes())) == few_bits
    inverted = {ImageOps.solarize(image, threshold).tobytes() for threshold in range(257)}
    assert set(strengths(lambda: p.solarize(image, 10).tobytes())) <= inverted


def test_translations_move_whole_pixels_up_to_a_third_of_the_side_both_ways():
    image = Image.fromarray(np.tile(np.arange(30, dtype=np.uint8) * 8, (21, 1)))

    def shift():
        row = np.asarray(p.translate_x(image, 10))[0]
        shown = row[row > 0]
        return int((shown[0] // 8) - np.flatnonzero(row > 0)[0])

    shifts = strengths(shift)
    assert set(shifts) == set(range(-9, 10))  # int of less than a third of 30

    def is_moved_up_or_down(seed):
        torch.manual_seed(seed)
        columns = np.asarray(p.translate_y(image.rotate(90, expand=True), 10))
        return not np.array_equal(columns, np.asarray(image.rotate(90, expand=True)))

    assert any(map(is_moved_up_or_down, range(5)))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_translations_have_the_values_of_pils_bilinear_ones(mode):
    image = noise().convert(mode)
    bilinear = {
        image.transform(image.size, Transform.AFFINE, (1, 0, x, 0, 1, 0), resample=Resampling.BILINEAR).tobytes()
        for x in range(-image.width, image.width + 1)
    }
    assert set(strengths(lambda: p.translate_x(image, 10).tobytes())) <= bilinear


def test_a_rotation_is_one_of_pils_by_whole_degrees_below_30():
    image = noise()
    turned = {image.rotate(a, resample=Image.Resampling.BILINEAR).tobytes() for a in range(-29, 30)}
    assert set(strengths(lambda: p.rotate(image, 10).tobytes())) <= turned
    assert len(set(strengths(lambda: p.rotate(image, 10).tobytes()))) > 40


def test_a_shear_moves_rows_in_proportion_to_their_distance_from_the_top():
    image = Image.fromarray(np.tile(np.arange(100, dtype=np.uint8), (41, 1)))

    def slope():
        rows = np.asarray(p.shear_x(image, 10)).astype(float)
        assert np.abs(rows[0, 5:95] - np.arange(5, 95)).max() <= 1
        return (rows[40, 50] - rows[0, 50]) / 40

    slopes = np.array(strengths(slope))
    assert np.abs(slopes).max() <= 0.3 + 0.05
    assert (slopes > 0.1).any()
    assert (slopes < -0.1).any()


def test_brightness_is_scaled_by_the_factors_of_its_law():
    image = Image.new("L", (1, 1), 100)
    factors = np.array(strengths(lambda: p.brightness(image, 2).getpixel((0, 0)) / 100, 4000))
    # Half of the factors are uniform in [1, 2] times 0.75, the other half in [0.82, 1].
    assert factors.min() >= 0.74
    assert factors.max() <= 1.5
    expected = (0.75 * 1.5 + 0.91) / 2
    assert abs(factors.mean() - expected) < 0.02


def test_the_papers_own_factors_reach_from_a_tenth_to_almost_two():
    image = Image.new("L", (1, 1), 100)
    factors = np.array(strengths(lambda: p.brightness_original(image, 10).getpixel((0, 0)) / 100, 4000))
    assert abs(factors.mean() - (0.118 + 1.9) / 2) < 0.03
    assert 0.1 < factors.min() < 0.2
    assert 1.8 < factors.max() <= 1.9
    assert p.color_original(noise(), 5).tobytes() != noise().tobytes()


def test_colour_is_scaled_as_pil_does_it(monkeypatch):
    monkeypatch.setattr(p, "draw_integer", lambda low, high: 1)
    monkeypatch.setattr(p, "draw_uniform", lambda low, high: (low + high) / 2)
    image = noise()
    for name in ("Color", "Contrast", "Sharpness"):
        expected = getattr(ImageEnhance, name)(image).enhance(3.0)  # between 1 and 5
        assert getattr(p, name.lower())(image, 5).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 8, 6), (1, 8, 6), (2, 3, 8, 6)])
def test_a_function_of_pil_images_works_on_tensors_of_every_kind(dtype, shape):
    values = torch.randint(256, shape, dtype=torch.uint8)
    x = values if dtype == torch.uint8 else (values.double() / 255).to(dtype)
    before = x.clone()
    result = map_pillow_function(ImageOps.mirror, x)
    assert result.dtype == dtype
    torch.testing.assert_close(result, x.flip(-1), rtol=0, atol=0 if dtype != torch.float16 else 1e-3)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (torch.zeros(8, 8), ValueError, r"shape \(8, 8\)"),
        (torch.zeros(5, 8, 8), ValueError, r"shape \(5, 8, 8\)"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), TypeError, "int64"),
        ("cat.png", TypeError, "str is not an image"),
    ],
)
def test_what_is_no_image_is_refused(image, error, message):
    with pytest.raises(error, match=message):
        map_pillow_function(ImageOps.mirror, image)


def test_an_image_is_given_as_the_type_that_is_asked_for():
    image, tensor, batch = noise(), torch.rand(3, 4, 4), torch.rand(2, 3, 4, 4)
    assert image_as_type(image, Image.Image) is image
    assert image_as_type(tensor, torch.Tensor) is tensor
    assert image_as_type(batch, torch.Tensor) is batch
    as_tensor = image_as_type(image, torch.Tensor)
    torch.testing.assert_close(as_tensor, torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255)
    assert image_as_type(as_tensor, Image.Image).tobytes() == image.tobytes()
    with pytest.raises(TypeError, match="not a type of image"):
        image_as_type(image, np.ndarray)
    with pytest.raises(ValueError, match="each image of a batch by itself"):
        image_as_type(batch, Image.Image)


@given(seed=st.integers(0, 99), depth=st.integers(0, 4))
def test_randaugment_applies_as_many_primitives_of_the_set_as_it_should(seed, depth):
    seen = []
    functions = [lambda image, level, name=name: seen.append((name, level)) or image for name in "abc"]
    torch.manual_seed(seed)
    randaugment_image(noise(), severity=4, depth=depth, augmentation_set=functions)
    assert [level for _, level in seen] == [4] * depth


def test_randaugment_draws_each_primitive_equally_often():
    counts = dict.fromkeys("abcd", 0)

    def make(name):
        def count(image, level):
            counts[name] += 1
            return image

        return count

    torch.manual_seed(0)
    transform = RandAugmentTransform(depth=2, augmentation_set=[make(name) for name in "abcd"])
    image = noise((1, 1))
    for _ in range(2000):
        transform(image)
    assert all(abs(count / 4000 - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5 for count in counts.values())


@pytest.mark.parametrize("function", [randaugment_image, augmix_image])
@pytest.mark.parametrize("image", [noise(), torch.randint(256, (3, 12, 16), dtype=torch.uint8)], ids=["PIL", "uint8"])
def test_the_seed_repeats_an_augmented_image_and_another_gives_another(function, image):
    def augmented(seed):
        torch.manual_seed(seed)
        result = function(image)
        assert type(result) is type(image) or isinstance(result, Image.Image)
        return np.asarray(result).tobytes()

    assert augmented(1) == augmented(1)
    assert len({augmented(seed) for seed in range(10)}) > 5


@given(
    seed=st.integers(0, 99),
    width=st.integers(1, 4),
    depth=st.integers(-1, 3),
    alpha=st.sampled_from([0.2, 1.0, 5.0]),
)
def test_augmix_is_the_weighted_sum_of_its_chains(seed, width, depth, alpha):
    # Each chain paints the image in a colour of its own; the result says what the weights were.
    chains = []

    def paint(image, level):
        chains.append(image)
        return Image.new("L", image.size, 200)

    torch.manual_seed(seed)
    result = augmix_image(Image.new("L", (2, 2), 100), 3, depth, width, alpha, [paint])
    value = result.getpixel((0, 0))
    assert 99 <= value <= 200  # between the image and the chains, rounded down
    num_chains_begun = sum(image.getpixel((0, 0)) == 100 for image in chains)
    assert num_chains_begun == width
    if depth > 0:
        assert len(chains) == width * depth
    else:
        assert width <= len(chains) <= 3 * width


def test_augmix_mixes_with_the_mean_of_its_distributions():
    torch.manual_seed(0)
    image = Image.new("L", (1, 1), 0)
    values = [
        augmix_image(image, 3, 1, 3, 1.0, [lambda image, level: Image.new("L", (1, 1), 250)]).getpixel((0, 0))
        for _ in range(3000)
    ]
    # m is uniform, the chains' weights add up to 1, and rounding down takes half a step.
    assert abs(np.mean(values) - (125 - 0.5)) < 5 * 250 / (12 * 3000) ** 0.5
    assert abs(np.std(values) - 250 / 12**0.5) < 4


@pytest.mark.parametrize("make", [RandAugment, RandAugmentTransform, randaugment_image])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"severity": -1}, ValueError, "severity=-1"),
        ({"severity": 11}, ValueError, "severity=11"),
        ({"depth": -1}, ValueError, "depth=-1"),
        ({"augmentation_set": "some"}, KeyError, "some"),
    ],
)
def test_what_randaugment_cannot_do_is_refused(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


@pytest.mark.parametrize("make", [AugMix, AugmentAndMixTransform, augmix_image])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"severity": 10.5}, ValueError, r"severity=10\.5"),
        ({"width": 0}, ValueError, "width=0"),
        ({"alpha": 0}, ValueError, "alpha=0"),
        ({"augmentation_set": "some"}, KeyError, "some"),
    ],
)
def test_what_augmix_cannot_do_is_refused(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


@pytest.mark.parametrize("make", [RandAugmentTransform, AugmentAndMixTransform])
@pytest.mark.parametrize("mode", ["RGBA", "P", "1", "F"])
def test_a_pil_image_of_a_mode_that_pil_cannot_change_is_refused_each_time(make, mode):
    image = noise().convert(mode)
    for _ in range(3):  # whichever primitives are drawn
        with pytest.raises(TypeError, match=f"mode {mode!r} cannot be augmented: convert it to 'RGB'"):
            make()(image)


@pytest.mark.parametrize("make", [RandAugmentTransform, AugmentAndMixTransform])
def test_functions_of_ones_own_may_take_other_modes(make):
    image = noise().convert("RGBA")
    assert make(augmentation_set=[lambda pil_img, level: pil_img.rotate(180)])(image).mode == "RGBA"


@pytest.mark.parametrize("function", [randaugment_image, augmix_image])
def test_a_batch_of_no_images_stays_one(function):
    assert function(torch.rand(0, 3, 8, 6)).shape == (0, 3, 8, 6)


def test_the_old_documents_put_the_function_among_the_transforms():
    transform = randaugment_image()
    assert isinstance(transform, RandAugmentTransform)
    assert "severity=9, depth=2" in repr(transform)
    assert "autocontrast" in repr(augmix_image())
    assert transform(noise()).size == (16, 12)
