import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from composer_models import check_for_index_targets, ensure_targets_one_hot, infer_target_type

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=2)


@given(batch=st.integers(1, 5), classes=st.integers(1, 6), spatial=shapes, seed=st.integers(0, 99))
def test_one_hot_targets_are_torchs_with_the_classes_in_dim_1(batch, classes, spatial, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (batch, *spatial), generator=generator)
    encoded = ensure_targets_one_hot(torch.zeros(batch, classes, *spatial), targets)
    assert torch.equal(encoded, F.one_hot(targets, classes).movedim(-1, 1).float())


@given(batch=st.integers(1, 5), classes=st.integers(1, 6), spatial=shapes)
def test_the_form_of_targets_follows_from_the_shapes(batch, classes, spatial):
    logits = torch.zeros(batch, classes, *spatial)
    assert infer_target_type(logits, logits.clone()) == "one_hot"
    assert infer_target_type(logits, torch.zeros(batch, *spatial)) == "indices"


def test_shapes_that_fit_neither_form_are_refused():
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) do not fit an input of shape \(4, 5\)"):
        infer_target_type(torch.zeros(4, 5), torch.zeros(4, 3))


def test_dense_targets_stay_what_they_are_as_float32():
    targets = torch.tensor([[0, 1], [1, 0]])
    assert torch.equal(ensure_targets_one_hot(torch.zeros(2, 2), targets), targets.float())
    assert ensure_targets_one_hot(torch.zeros(2, 2), targets).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_every_integer_dtype_counts_as_indices(dtype):
    targets = torch.tensor([1, 0], dtype=dtype)
    assert check_for_index_targets(targets)
    assert torch.equal(ensure_targets_one_hot(torch.zeros(2, 2), targets), torch.eye(2).flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
def test_other_dtypes_are_no_indices(dtype):
    assert not check_for_index_targets(torch.zeros(2, dtype=dtype))


def test_more_classes_than_logits_can_be_asked_for():
    assert ensure_targets_one_hot(torch.zeros(1, 2), torch.tensor([1]), num_classes=4).tolist() == [[0, 1, 0, 0]]


def test_negative_labels_become_zero_rows_with_a_warning():
    with pytest.warns(UserWarning, match="Negative label indices are being ignored in conversion to one-hot labels"):
        encoded = ensure_targets_one_hot(torch.zeros(2, 2), torch.tensor([-100, 1]))
    assert encoded.tolist() == [[0, 0], [0, 1]]


def test_a_label_past_the_last_class_is_refused():
    with pytest.raises(ValueError, match=r"num_classes=3 is too few for the label 3.* ignore must be negative"):
        ensure_targets_one_hot(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_floating_point_labels_are_refused():
    with pytest.raises(ValueError, match=r"dtype torch\.float32, which cannot be encoded one-hot"):
        ensure_targets_one_hot(torch.zeros(2, 3), torch.tensor([0.0, 1.0]))


def test_an_empty_batch_gives_an_empty_encoding():
    assert ensure_targets_one_hot(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape == (0, 3)


def test_nothing_is_read_on_other_devices():
    encoded = ensure_targets_one_hot(torch.zeros(2, 3, device="meta"), torch.zeros(2, dtype=torch.long, device="meta"))
    assert encoded.shape == (2, 3)
