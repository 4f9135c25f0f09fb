import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_events import DataSpec, default_split_batch, ensure_data_spec
from composer_events.data_spec import split_batch_by_count


class Array:
    """As much of a tensor as counting asks for."""

    def __init__(self, *shape):
        self.shape = shape


class Dataset:
    max_seq_len = 7


class Loader(list):
    dataset = Dataset()


def test_a_bare_dataloader_gets_defaults_that_change_nothing():
    spec = DataSpec([1, 2])
    batch = object()
    assert spec.batch_transforms(batch) is batch
    assert spec.microbatch_transforms(batch) is batch
    assert spec.split_batch is default_split_batch
    assert spec.num_samples is None
    assert spec.num_tokens is None


def test_what_is_given_is_what_is_used():
    spec = DataSpec(
        [1],
        num_samples=3,
        num_tokens=4,
        batch_transforms=lambda batch: batch + 1,
        microbatch_transforms=lambda batch: batch * 2,
        split_batch=lambda batch, size: [batch] * size,
        get_num_samples_in_batch=lambda batch: 0.5,
        get_num_tokens_in_batch=lambda batch: 11,
    )
    assert (spec.num_samples, spec.num_tokens) == (3, 4)
    assert spec.batch_transforms(1) == 2
    assert spec.microbatch_transforms(2) == 4
    assert spec.split_batch("a", 2) == ["a", "a"]
    assert spec.get_num_samples_in_batch(None) == 0.5
    assert spec.get_num_tokens_in_batch(None) == 11


def test_the_old_name_of_microbatch_transforms_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="microbatch_transforms"):
        spec = DataSpec([1], device_transforms=lambda batch: batch * 2)
    assert spec.microbatch_transforms(4) == 8


def test_old_and_new_name_together_are_refused():
    with pytest.raises(ValueError, match="two names of one thing"):
        DataSpec([1], device_transforms=len, microbatch_transforms=len)


def test_ensure_data_spec_takes_a_spec_its_arguments_or_a_dataloader():
    spec = DataSpec([1])
    assert ensure_data_spec(spec) is spec
    assert ensure_data_spec({"dataloader": [1], "num_samples": 9}).num_samples == 9
    assert ensure_data_spec([1, 2]).dataloader == [1, 2]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": [1]}, r"has the keys \['name'\], and 'name' is unknown"),
        (
            {"dataloader": [1], "num_sample": 9},
            r"has the keys \['dataloader', 'num_sample'\], and 'num_sample' is unknown",
        ),
        ({0: [1], "b": [1]}, r"has the keys \[0, 'b'\], and 0, 'b' are unknown"),
        ({"num_samples": 9}, r"has the keys \['num_samples'\], and 'dataloader' is missing"),
        ({}, r"has the keys \[\], and 'dataloader' is missing"),
    ],
    ids=str,
)
def test_a_dict_of_anything_but_a_specs_arguments_is_told_what_these_are(given, found):
    with pytest.raises(TypeError, match=found) as error:
        ensure_data_spec(given)
    assert "dataloader, num_samples, num_tokens, batch_transforms, " in str(error.value)
    assert "Evaluator(label=..., dataloader=...)" in str(error.value)


@pytest.mark.parametrize(
    "batch",
    [
        Array(4, 3),
        (Array(4, 3), Array(4)),
        [Array(4, 3), [Array(4), Array(4, 1)]],
        (Array(4), {"mask": Array(4, 2)}),
        {"image": Array(4, 3), "names": ["a", "b", "c", "d"]},
    ],
)
def test_samples_are_counted_along_the_first_dimension(batch):
    assert DataSpec([]).get_num_samples_in_batch(batch) == 4


@pytest.mark.parametrize("batch", [(Array(4), Array(3)), {"a": Array(4), "b": [1, 2]}, [], {}])
def test_an_ambiguous_number_of_samples_is_an_error(batch):
    with pytest.raises(NotImplementedError, match="multiple Tensors"):
        DataSpec([]).get_num_samples_in_batch(batch)


@pytest.mark.parametrize("batch", [object(), "text", {Array(4)}, 3])
def test_a_batch_of_unknown_kind_cannot_be_counted(batch):
    with pytest.raises(NotImplementedError, match="multiple Tensors"):
        DataSpec([]).get_num_samples_in_batch(batch)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": [1.0, 2.0, 3.0], "y": (0, 1, 0), "task": "qa"},
        {"inputs": {"ids": [[1], [2, 3], [4]], "mode": "train"}, "labels": [0, 1, 0]},
        ([1, 2, 3], {"y": [1, 2, 3]}, ["a", "b", "c"]),
        (["a", "b", "c"], [{"boxes": 1}, {"boxes": 2}, {"boxes": 3}]),
        [1, 2, 3],
        ["a", "b", "c"],
    ],
)
def test_a_batch_that_can_be_split_can_be_counted(batch):
    """Training ended at the first batch: `Unable to determine the number of samples in a batch from 'qa'`."""
    assert DataSpec([]).get_num_samples_in_batch(batch) == 3
    assert len(default_split_batch(batch, 1)) == 3


@pytest.mark.parametrize("batch", [(Array(4), 3), {"a": 1}, Array(), (Array(),)])
def test_parts_that_have_no_length_are_an_error(batch):
    with pytest.raises(ValueError, match="Unable to determine"):
        DataSpec([]).get_num_samples_in_batch(batch)


@pytest.mark.parametrize(
    ("dataloader", "batch", "expected"),
    [
        ([], {"input_ids": Array(4, 16), "labels": Array(4)}, 64),
        ([], {"input_ids": Array(4, 16, 2)}, 64),
        ([], {"input_ids": [[1, 2], [3]]}, 3),
        (Loader(), {"input_ids": Array(4, 16)}, 64),
        (Loader(), (Array(4), Array(4)), 28),
        ([], (Array(4), Array(4)), 0),
        ([], object(), 0),
    ],
)
def test_tokens_are_counted_from_input_ids_or_from_the_greatest_length(dataloader, batch, expected):
    assert DataSpec(dataloader).get_num_tokens_in_batch(batch) == expected


def test_a_number_of_tokens_stands_for_every_kind_of_token():
    spec = DataSpec([], get_num_tokens_in_batch=lambda batch: 5)
    assert spec.get_num_tokens_in_batch(None, "loss_generating") == 5


def test_tokens_can_be_counted_by_kind():
    spec = DataSpec([], get_num_tokens_in_batch=lambda batch: {"total": 5, "loss_generating": 3})
    assert spec.get_num_tokens_in_batch(None) == 5
    assert spec.get_num_tokens_in_batch(None, token_type="loss_generating") == 3
    with pytest.raises(ValueError, match="token_type='padding'"):
        spec.get_num_tokens_in_batch(None, "padding")


def test_a_count_of_tokens_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"returned 2\.5"):
        DataSpec([], get_num_tokens_in_batch=lambda batch: 2.5).get_num_tokens_in_batch(None)


@settings(deadline=None)  # a busy machine is no failure
@given(batch=st.lists(st.text(), min_size=1) | st.lists(st.integers(), min_size=1), data=st.data())
def test_joined_microbatches_are_the_batch(batch, data):
    size = data.draw(st.integers(1, len(batch)))
    microbatches = default_split_batch(batch, size)
    assert [item for microbatch in microbatches for item in microbatch] == batch
    assert all(len(microbatch) == size for microbatch in microbatches[:-1])
    assert 1 <= len(microbatches[-1]) <= size


def test_a_mapping_is_cut_into_mappings_and_single_values_go_into_each():
    rest = {"task": "qa", "weight": 0.5, "last": True, "mask": None}
    batch = {"names": ["a", "b", "c"], "nested": {"ids": (1, 2, 3)}, **rest}
    assert default_split_batch(batch, 2) == [
        {"names": ["a", "b"], "nested": {"ids": (1, 2)}, **rest},
        {"names": ["c"], "nested": {"ids": (3,)}, **rest},
    ]


@pytest.mark.parametrize("batch", [{"task": "qa", "weight": 1.0}, {}, [], ()])
def test_a_batch_without_anything_to_cut_is_one_microbatch(batch):
    assert default_split_batch(batch, 2) == [batch]


def test_the_items_of_a_tuple_are_cut_alike():
    batch = (["a", "b", "c"], [1, 2, 3], {"ids": [4, 5, 6], "task": "qa"})
    assert default_split_batch(batch, 2) == [
        (["a", "b"], [1, 2], {"ids": [4, 5], "task": "qa"}),
        (["c"], [3], {"ids": [6], "task": "qa"}),
    ]


@pytest.mark.parametrize("batch", [([1, 2, 3], [1, 2]), {"a": [1, 2, 3], "b": [1, 2]}, ([1], {"a": [1, 2]})])
def test_parts_of_unequal_length_are_refused_rather_than_cut_short(batch):
    with pytest.raises(ValueError, match="differ in length"):
        default_split_batch(batch, 1)


@pytest.mark.parametrize("batch", [([1, 2], object()), {"a": [1, 2], "b": object()}, (1, "a")])
def test_a_part_that_cannot_be_cut_is_refused(batch):
    with pytest.raises(ValueError, match="cannot cut"):
        default_split_batch(batch, 1)


@pytest.mark.parametrize("batch", [object(), "text", {1, 2}])
def test_a_batch_of_unknown_kind_is_refused(batch):
    with pytest.raises(NotImplementedError, match="Pass split_batch"):
        default_split_batch(batch, 1)


def test_a_size_may_be_any_kind_of_whole_number():
    class Two:
        """As NumPy's integers are: no `int`, and as good as one."""

        def __index__(self):
            return 2

    assert default_split_batch([1, 2, 3], Two()) == [[1, 2], [3]]


@pytest.mark.parametrize("size", [1.5, 2.0, "2", 0, -1, True, None])
def test_a_size_that_is_no_positive_whole_number_is_refused(size):
    with pytest.raises(ValueError, match="microbatch_size="):
        default_split_batch([1, 2], size)


@pytest.mark.parametrize("batch", [[1, 2], (["a", "b"], ["c", "d"])])
def test_a_batch_shorter_than_a_microbatch_stays_whole_with_a_warning(batch):
    with pytest.warns(UserWarning, match="Cannot split list of length 2 into batches of size 3"):
        assert default_split_batch(batch, 3) == [batch]


@pytest.mark.parametrize(("count", "expected"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (4, [2, 2, 1]), (5, [1] * 5)])
def test_splitting_by_count_gives_equal_sizes_as_torch_chunk_does(count, expected):
    assert [len(microbatch) for microbatch in split_batch_by_count(list("abcde"), count)] == expected


def test_more_microbatches_than_samples_gives_one_sample_each_with_a_warning():
    with pytest.warns(UserWarning, match="Cannot split"):
        assert split_batch_by_count([1, 2], 3) == [[1], [2]]


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused(count):
    with pytest.raises(ValueError, match="num_microbatches="):
        split_batch_by_count([1, 2], count)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"num_samples": "64"}, TypeError, "num_samples='64' must be a whole number, 0 or more"),
        ({"num_samples": -1}, ValueError, "num_samples=-1 must be 0 or more"),
        ({"num_tokens": 0.5}, TypeError, "num_tokens=0.5 must be a whole number, 0 or more"),
        ({"batch_transforms": 3}, TypeError, "batch_transforms=3 must be a function, or None"),
        ({"microbatch_transforms": []}, TypeError, r"microbatch_transforms=\[\] must be a function, or None"),
        ({"split_batch": 4}, TypeError, "split_batch=4 must be a function, or None"),
        ({"get_num_samples_in_batch": 4}, TypeError, "get_num_samples_in_batch=4 must be a function, or None"),
        ({"get_num_tokens_in_batch": 4}, TypeError, "get_num_tokens_in_batch=4 must be a function, or None"),
    ],
)
def test_what_cannot_transform_cut_or_count_is_refused_at_once(settings, kind, message):
    with pytest.raises(kind, match=message):
        DataSpec([1, 2], **settings)
