import pytest
import torch

from composer_events import batch_get, batch_set


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (1, [3, 4, 5]),
        ((1, 2), 5),
        (slice(0, 1), [[0, 1, 2]]),
        ([0, 1], [[0, 1, 2], [3, 4, 5]]),
        (torch.tensor([1]), [[3, 4, 5]]),
        (torch.tensor([True, False]), [[0, 1, 2]]),
    ],
)
def test_a_tensor_is_indexed_as_torch_indexes_it(key, expected):
    assert batch_get(torch.arange(6).reshape(2, 3), key).tolist() == expected


@pytest.mark.parametrize("key", [1, (1, 2), slice(0, 1), [0, 1], torch.tensor([1])])
def test_a_tensor_is_changed_in_place(key):
    batch = torch.arange(6).reshape(2, 3)
    expected = batch.clone()
    expected[key] = 9
    assert batch_set(batch, key, 9) is batch
    assert batch.tolist() == expected.tolist()


def test_the_tensors_of_a_tuple_are_replaced_in_a_copy():
    batch = (torch.zeros(2), torch.ones(2))
    changed = batch_set(batch, 0, torch.full((2,), 5.0))
    assert changed[0].tolist() == [5.0, 5.0]
    assert changed[1] is batch[1]
    assert batch[0].tolist() == [0.0, 0.0]


def test_an_array_is_indexed_as_numpy_indexes_it():
    numpy = pytest.importorskip("numpy")
    batch = numpy.arange(6).reshape(2, 3)
    assert batch_get(batch, (1, 2)) == 5
    assert batch_get(batch, numpy.array([1])).tolist() == [[3, 4, 5]]
    batch_set(batch, [0, 1], 7)
    assert batch.tolist() == [[7, 7, 7], [7, 7, 7]]
