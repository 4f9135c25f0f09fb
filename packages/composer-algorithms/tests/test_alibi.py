"""Slopes, biases, the registry and the cutting of batches. That attention is biased is tested with transformers."""

from types import MappingProxyType

import pytest
import torch
from torch import nn

from composer_algorithms import Alibi
from composer_algorithms.alibi.attention import alibi_bias, alibi_slopes, zero_and_freeze_expand_position_embeddings
from composer_algorithms.alibi.attention_surgery_functions import PolicyRegistry
from composer_events import Event, State


def test_slopes_are_a_geometric_series_for_powers_of_two():
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)


def test_slopes_of_twelve_heads_are_the_published_ones():
    published = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.70711, 0.35355, 0.17678, 0.08839]
    assert alibi_slopes(12) == pytest.approx(published, abs=1e-5)


def test_the_bias_is_the_distance_times_the_slope():
    bias = alibi_bias(torch.tensor([0.5, 0.25]), torch.arange(2) + 1, num_keys=4)
    for head, slope in enumerate((0.5, 0.25)):
        for query in (1, 2):
            assert bias[0, head, query - 1].tolist() == [-slope * abs(query - key) for key in range(4)]


def test_a_table_of_positions_keeps_dtype_and_device():
    model = nn.ModuleDict({"positions": nn.Embedding(4, 6, dtype=torch.bfloat16, device="meta")})
    zero_and_freeze_expand_position_embeddings(model, 9, "positions")
    weight = model["positions"].weight
    assert (weight.shape, weight.dtype, weight.device.type, weight.requires_grad) == (
        (9, 6),
        torch.bfloat16,
        "meta",
        False,
    )


def test_a_missing_table_is_logged_and_one_without_a_parameter_is_refused(caplog):
    with pytest.raises(AttributeError):
        zero_and_freeze_expand_position_embeddings(nn.Linear(2, 2), 4, "wpe")
    assert "Linear has no position embeddings at position_embedding_attribute='wpe'" in caplog.text
    model = nn.Module()
    model.wpe = nn.Module()
    model.wpe.weight = torch.ones(2, 2)
    with pytest.raises(TypeError, match="whose weight is a Tensor"):
        zero_and_freeze_expand_position_embeddings(model, 4, "wpe")


class TestPolicyRegistry:
    def test_a_function_is_registered_for_all_classes(self):
        registry = PolicyRegistry()

        @registry.register(nn.Linear, nn.ReLU)
        def policy(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
            return module

        assert registry == {nn.Linear: policy, nn.ReLU: policy}
        with pytest.raises(ValueError, match="Linear is registered"):
            registry.register(nn.Linear)(policy)

    def test_annotations_may_be_strings(self):
        def policy(module: "nn.Module", module_index: "int", max_sequence_length: "int") -> "nn.Module":
            return module

        assert nn.Linear in _registered(policy)

    def test_no_class_and_what_is_no_module_are_refused(self):
        def policy(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
            return module

        with pytest.raises(ValueError, match="without a class"):
            PolicyRegistry().register()
        with pytest.raises(TypeError, match=r"not a subclass of torch\.nn\.Module"):
            PolicyRegistry().register(int)(policy)

    def test_a_function_that_cannot_be_called_so_is_refused(self):
        def two(module: nn.Module, module_index: int):
            return module

        def wrong_kind(module: nn.Module, module_index: str, max_sequence_length: int):
            return module

        def wrong_name(module: nn.Module, module_index: int, length: int):
            return module

        for function, error, message in (
            (two, ValueError, "takes 2 parameters"),
            (wrong_kind, TypeError, "annotates its parameters"),
            (wrong_name, NameError, "third parameter 'length'"),
        ):
            with pytest.raises(error, match=message):
                _registered(function)


def _registered(function):
    registry = PolicyRegistry()
    registry.register(nn.Linear)(function)
    return registry


def cut(batch, scaling=0.25):
    state = State(nn.Linear(1, 1), rank_zero_seed=0, max_duration="1ep")
    state.batch = batch
    Alibi(16, scaling).apply(Event.AFTER_DATALOADER, state, None)
    return state.batch


def test_sequences_are_cut_and_what_is_there_once_for_each_is_repeated():
    batch = {"input_ids": torch.arange(8).reshape(2, 4), "features": torch.rand(2, 4, 3), "label": torch.tensor([7, 8])}
    batch |= {"text": ["a", "b"], "weight": torch.tensor(2.0)}
    result = cut(batch, 0.5)
    assert result["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert torch.equal(result["features"], batch["features"].reshape(4, 2, 3))
    assert result["label"].tolist() == [7, 7, 8, 8]
    assert result["text"] == ["a", "b"]
    assert result["weight"] == 2
    assert batch["input_ids"].shape == (2, 4), "a loader that keeps its batches finds them as they were"


def test_sequences_can_be_joined():
    assert cut({"input_ids": torch.arange(8).reshape(4, 2)}, 2)["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("batch", [torch.rand(2, 4), (torch.rand(2, 4), torch.rand(2)), {"label": torch.rand(2)}])
def test_batches_without_named_sequences_are_left_alone(batch):
    assert cut(batch) is batch


def test_a_scaling_of_one_changes_nothing():
    batch = {"input_ids": torch.rand(2, 4)}
    assert cut(batch, 1) is batch


@pytest.mark.parametrize(("shape", "scaling"), [((2, 6), 0.25), ((3, 4), 2), ((2, 4), 0.3)])
def test_lengths_that_the_scaling_does_not_divide_are_refused(shape, scaling):
    with pytest.raises(ValueError, match=f"a batch of {shape[0]} sequences of {shape[1]} tokens cannot be split"):
        cut({"input_ids": torch.rand(shape)}, scaling)


def test_a_tensor_of_another_shape_is_refused_with_its_key():
    with pytest.raises(ValueError, match=r"the batch's 'mask' of shape \(2, 1, 4, 4\)"):
        cut({"input_ids": torch.rand(2, 4), "mask": torch.rand(2, 1, 4, 4)})


def test_a_mapping_that_cannot_be_changed_is_copied():
    batch = MappingProxyType({"input_ids": torch.rand(2, 4)})
    assert cut(batch)["input_ids"].shape == (8, 1)


@pytest.mark.parametrize(("length", "scaling"), [(0, 0.25), (-1, 0.25), (16, 0), (16, -0.5)])
def test_numbers_that_leave_no_tokens_are_refused(length, scaling):
    with pytest.raises(ValueError, match=r"is not in [([]"):
        Alibi(length, scaling)


def test_arguments_of_older_releases_are_accepted_and_others_are_not():
    with pytest.warns(DeprecationWarning, match="heads_per_layer=.* are not used any more") as caught:
        Alibi(16, heads_per_layer=12, attention_module_name="attn")
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
        Alibi(16, heads=12)
