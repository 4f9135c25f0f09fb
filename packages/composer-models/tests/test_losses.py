import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from composer_models import DiceLoss, binary_cross_entropy_with_logits, loss_registry, soft_cross_entropy

seeds = st.integers(0, 999)
spatial_shapes = st.lists(st.integers(1, 3), max_size=2)


def random_logits(seed, batch, classes, spatial=()):
    return torch.randn(batch, classes, *spatial, generator=torch.Generator().manual_seed(seed))


def random_labels(seed, batch, classes, spatial=()):
    return torch.randint(classes, (batch, *spatial), generator=torch.Generator().manual_seed(seed))


def one_hot(labels, classes):
    return F.one_hot(labels, classes).movedim(-1, 1).float()


@given(seed=seeds, spatial=spatial_shapes, reduction=st.sampled_from(["none", "sum", "mean"]))
def test_one_hot_targets_cost_what_their_indices_cost(seed, spatial, reduction):
    logits, labels = random_logits(seed, 4, 5, spatial), random_labels(seed, 4, 5, spatial)
    torch.testing.assert_close(
        soft_cross_entropy(logits, one_hot(labels, 5), reduction=reduction),
        soft_cross_entropy(logits, labels, reduction=reduction),
    )


@given(seed=seeds, share=st.floats(0, 1))
def test_the_loss_of_blended_targets_is_the_blend_of_the_losses(seed, share):
    logits = random_logits(seed, 4, 3)
    one, other = one_hot(random_labels(seed, 4, 3), 3), one_hot(random_labels(seed + 1, 4, 3), 3)
    blended = soft_cross_entropy(logits, share * one + (1 - share) * other)
    expected = share * soft_cross_entropy(logits, one) + (1 - share) * soft_cross_entropy(logits, other)
    torch.testing.assert_close(blended, expected)


@given(seed=seeds, spatial=spatial_shapes)
@pytest.mark.filterwarnings("ignore:Some targets have less")
def test_a_zero_row_counts_as_little_as_an_ignored_index(seed, spatial):
    logits, labels = random_logits(seed, 4, 3, spatial), random_labels(seed, 4, 3, spatial)
    dense = one_hot(labels, 3)
    dense[0], labels[0] = 0, -100
    torch.testing.assert_close(soft_cross_entropy(logits, dense), soft_cross_entropy(logits, labels))


def test_dense_loss_is_the_formula():
    logits, target = random_logits(0, 3, 4), random_logits(1, 3, 4).softmax(dim=1)
    weight = torch.tensor([1.0, 2.0, 0.5, 0.0])
    losses = []
    for i in range(3):
        log_sum = math.log(sum(math.exp(logits[i, k]) for k in range(4)))
        losses.append(-sum((target[i, k] * weight[k] * (logits[i, k] - log_sum)).item() for k in range(4)))
    torch.testing.assert_close(soft_cross_entropy(logits, target, weight, reduction="none"), torch.tensor(losses))
    torch.testing.assert_close(soft_cross_entropy(logits, target, weight), torch.tensor(sum(losses) / 3))


def test_weights_scale_dense_targets_and_do_not_normalise_them():
    logits, target = random_logits(0, 3, 2), one_hot(torch.tensor([0, 1, 1]), 2)
    twice = soft_cross_entropy(logits, target, weight=torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(twice, 2 * soft_cross_entropy(logits, target))


def test_the_ignored_index_can_be_chosen():
    logits = random_logits(0, 3, 4)
    loss = soft_cross_entropy(logits, torch.tensor([0, 2, 3]), ignore_index=3)
    torch.testing.assert_close(loss, soft_cross_entropy(logits[:2], torch.tensor([0, 2])))


def test_an_ignored_index_for_dense_targets_warns():
    with pytest.warns(UserWarning, match="ignore_index=-1 has no effect"):
        soft_cross_entropy(torch.zeros(2, 2), torch.eye(2), ignore_index=-1)


def test_targets_with_less_than_one_total_probability_warn():
    with pytest.warns(UserWarning, match="Some targets have less than 1 total probability"):
        soft_cross_entropy(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.5, 0.0]]))


def test_targets_without_any_probability_are_refused():
    with pytest.raises(ValueError, match=r"total probability of 0\.0 over shape \(2, 3\)"):
        soft_cross_entropy(torch.zeros(2, 3), torch.zeros(2, 3))


@given(seed=seeds, smoothing=st.floats(0, 0.9), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_smoothed_targets_that_miss_one_by_rounding_do_not_warn(seed, smoothing, dtype):
    target = one_hot(random_labels(seed, 16, 1000), 1000) * (1 - smoothing) + smoothing / 1000
    soft_cross_entropy(torch.zeros(16, 1000, dtype=dtype), target.to(dtype))


def test_integer_one_hot_targets_are_accepted():
    logits = random_logits(0, 3, 3)
    dense = torch.eye(3, dtype=torch.int64)
    torch.testing.assert_close(soft_cross_entropy(logits, dense), F.cross_entropy(logits, torch.arange(3)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_indices_may_have_any_integer_dtype(dtype):
    logits, labels = random_logits(0, 4, 3), random_labels(0, 4, 3)
    assert soft_cross_entropy(logits, labels.to(dtype)) == F.cross_entropy(logits, labels)


def test_floating_point_indices_are_refused():
    with pytest.raises(RuntimeError):
        soft_cross_entropy(torch.zeros(2, 3), torch.tensor([0.0, 1.5]))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dense_loss_of_many_16_bit_examples_keeps_its_digits(dtype, reduction):
    # A loss of about 7 for each of 40 000 examples: the sum is four times the largest float16.
    logits, target = random_logits(0, 40_000, 4).to(dtype) * 4, one_hot(random_labels(1, 40_000, 4), 4).to(dtype)
    expected = soft_cross_entropy(logits.double(), target.double(), reduction=reduction)
    loss = soft_cross_entropy(logits, target, reduction=reduction)
    assert loss.dtype == torch.float32
    # Each example's loss is rounded to 16 bits, by half a unit in the last place at most; the sum adds no error.
    torch.testing.assert_close(loss.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=0)


def test_the_dense_loss_stays_in_one_compiled_graph_and_reads_no_value():
    step = torch.compile(soft_cross_entropy, backend="eager", fullgraph=True)
    torch.testing.assert_close(step(torch.zeros(2, 4), torch.eye(4)[:2]), torch.tensor(math.log(4)))


@pytest.mark.parametrize("loss", [soft_cross_entropy, binary_cross_entropy_with_logits])
def test_an_unknown_reduction_is_refused(loss):
    with pytest.raises(ValueError, match="reduction='average' is not known: choose one of 'none', 'sum', 'mean'"):
        loss(torch.zeros(2, 2), torch.tensor([0, 1]), reduction="average")


def test_binary_cross_entropy_is_a_sum_over_classes_and_a_mean_over_examples():
    logits = torch.tensor([[0.0, 2.0], [-1.0, 1.0]])
    expected = (math.log(2) + softplus(2) + softplus(-1) + softplus(-1)) / 2
    loss = binary_cross_entropy_with_logits(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(loss, torch.tensor(expected))


def softplus(x):
    return math.log1p(math.exp(x))


def test_binary_cross_entropy_leaves_the_scale_alone_if_told():
    logits, labels = random_logits(0, 4, 3), random_labels(0, 4, 3)
    expected = F.binary_cross_entropy_with_logits(logits, one_hot(labels, 3), reduction="sum")
    loss = binary_cross_entropy_with_logits(logits, labels, scale_by_batch_size=False)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("weight", [torch.tensor([3.0, 1.0]), torch.tensor([[3.0, 1.0], [0.0, 0.0]])])
def test_weights_scale_the_elements_of_binary_cross_entropy(weight):
    loss = binary_cross_entropy_with_logits(torch.zeros(2, 2), torch.tensor([0, 1]), weight, "none", None, False)
    # at logits of 0 every element costs log 2
    torch.testing.assert_close(loss, weight.expand(2, 2) * math.log(2))


def test_positive_weights_reach_binary_cross_entropy():
    logits, weight = torch.zeros(1, 2), torch.tensor([3.0, 1.0])
    loss = binary_cross_entropy_with_logits(logits, torch.tensor([0]), pos_weight=weight)
    torch.testing.assert_close(loss, torch.tensor(4 * math.log(2)))


def test_losses_are_found_by_name():
    assert loss_registry == {
        "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
        "soft_cross_entropy": soft_cross_entropy,
    }


@pytest.mark.parametrize(
    ("squared_pred", "jaccard", "batch", "absent"), list(itertools.product([False, True], repeat=4))
)
def test_a_perfect_prediction_has_a_dice_loss_of_exactly_zero(squared_pred, jaccard, batch, absent):
    labels = random_labels(0, 3, 4, (5, 7))
    loss = DiceLoss(squared_pred=squared_pred, jaccard=jaccard, batch=batch, ignore_absent_classes=absent)
    assert loss(one_hot(labels, 4), labels).item() == 0.0


@pytest.mark.parametrize(("squared_pred", "jaccard"), list(itertools.product([False, True], repeat=2)))
def test_dice_loss_is_the_formula(squared_pred, jaccard):
    probabilities, labels = random_logits(0, 2, 3, (4,)).softmax(dim=1), random_labels(1, 2, 3, (4,))
    expected = torch.zeros(2, 3)
    for i, k in itertools.product(range(2), range(3)):
        pred, target = probabilities[i, k], (labels[i] == k).float()
        intersection = (pred * target).sum()
        power = 2 if squared_pred else 1
        union = (pred**power).sum() + (target**power).sum()
        union = 2 * (union - intersection) if jaccard else union
        expected[i, k] = 1 - (2 * intersection + 1e-5) / (union + 1e-5)
    loss = DiceLoss(squared_pred=squared_pred, jaccard=jaccard, reduction="none")
    torch.testing.assert_close(loss(probabilities, labels), expected)


@pytest.mark.filterwarnings("ignore:Negative label indices")
def test_predictions_on_ignored_pixels_do_not_count():
    labels = torch.tensor([[0, 1, -1]])
    pred = one_hot(torch.tensor([[0, 1, 1]]), 2)
    assert DiceLoss()(pred, labels).item() == 0.0


def test_summing_over_the_batch_gives_one_loss_for_each_class():
    pred, labels = random_logits(0, 2, 3, (4,)).softmax(dim=1), random_labels(1, 2, 3, (4,))
    as_one_image = pred.movedim(0, 1).reshape(1, 3, 8), labels.reshape(1, 8)
    torch.testing.assert_close(
        DiceLoss(batch=True, reduction="none")(pred, labels), DiceLoss(reduction="none")(*as_one_image)[0]
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_absent_classes_can_be_left_out(reduction):
    pred, labels = random_logits(0, 1, 3, (6,)).softmax(dim=1), torch.tensor([[0, 2, 2, 0, 0, 2]])
    present = DiceLoss(reduction="none")(pred, labels)[0, [0, 2]]
    loss = DiceLoss(ignore_absent_classes=True, reduction=reduction)(pred, labels)
    torch.testing.assert_close(loss, present if reduction == "none" else getattr(present, reduction)())


@pytest.mark.parametrize(("name", "activate"), [("sigmoid", torch.sigmoid), ("softmax", lambda x: x.softmax(dim=1))])
def test_activations_turn_logits_into_predictions(name, activate):
    logits, labels = random_logits(0, 2, 3, (4,)), random_labels(1, 2, 3, (4,))
    torch.testing.assert_close(DiceLoss(**{name: True})(logits, labels), DiceLoss()(activate(logits), labels))


def test_a_softmax_over_one_channel_is_skipped_with_a_warning():
    pred = torch.rand(2, 1, 4)
    target = torch.ones(2, 1, 4)
    with pytest.warns(UserWarning, match="softmax=True was skipped"):
        loss = DiceLoss(softmax=True)(pred, target)
    assert loss == DiceLoss()(pred, target)


def test_two_activations_are_refused():
    with pytest.raises(ValueError, match="exclude each other"):
        DiceLoss(sigmoid=True, softmax=True)


def test_an_unknown_reduction_of_dice_loss_is_refused():
    with pytest.raises(ValueError, match="reduction='max' is not known"):
        DiceLoss(reduction="max")
