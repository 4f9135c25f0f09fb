import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_checkpoint import CorruptCheckpointError, files, load_file, save_file

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


def saved(folder, tensor, extension="pt"):
    path = folder / f"x.{extension}"
    save_file({"state": {"model": {"good": torch.ones(3), "w": tensor}}}, path)
    return path


NAN, INF = float("nan"), float("inf")
BAD = [(dtype, bad) for dtype in DTYPES for bad in (NAN, INF, -INF) if dtype != torch.float8_e4m3fn or bad is NAN]


@pytest.mark.parametrize("extension", ["pt", "safetensors"])
@pytest.mark.parametrize(("dtype", "bad"), BAD)  # float8_e4m3fn has no infinity
def test_one_such_element_is_found_in_every_dtype(tmp_path, dtype, bad, extension, caplog):
    values = torch.zeros(100_000)
    values[70_000] = bad
    path = saved(tmp_path, values.to(dtype), extension)
    with pytest.raises(CorruptCheckpointError, match=r"1 tensors are NaN or infinite: state/model/w\."):
        load_file(path, require_finite=True)
    load_file(path)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "state/model/w" in caplog.text


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_such_element_is_found_without_verifying(tmp_path, dtype):
    path = saved(tmp_path, torch.tensor([0, 1, float("nan")]).to(dtype))
    load_file(path, verify=False)
    with pytest.raises(CorruptCheckpointError, match=r"state/model/w\."):
        load_file(path, verify=False, require_finite=True)


def test_what_lies_in_the_same_memory_as_a_weight_does_not_matter(tmp_path):
    memory = torch.tensor([1.0, float("nan"), 2.0])
    load_file(saved(tmp_path, memory[::2]), require_finite=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_numbers_are_finite(tmp_path, dtype):
    largest = torch.finfo(dtype).max
    path = saved(
        tmp_path, torch.tensor([largest, -largest, 0.0, torch.finfo(dtype).tiny], dtype=torch.float64).to(dtype)
    )
    load_file(path, require_finite=True)


def test_complex_and_sparse_weights_are_looked_at(tmp_path):
    with pytest.raises(CorruptCheckpointError, match="NaN or infinite"):
        load_file(saved(tmp_path, torch.tensor([1, complex(0, float("nan"))])), require_finite=True)
    sparse = torch.tensor([[0.0, float("inf")], [0.0, 0.0]]).to_sparse()
    with pytest.warns(UserWarning, match="sparse"), pytest.raises(CorruptCheckpointError, match="NaN or infinite"):
        load_file(saved(tmp_path, sparse), require_finite=True)


def test_optimizer_state_and_integers_are_not_weights(tmp_path):
    state = {"state": {"model": {"n": torch.tensor([1])}, "optimizers": {"m": torch.tensor([float("nan")])}}}
    save_file(state, tmp_path / "x.pt")
    load_file(tmp_path / "x.pt", require_finite=True)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_it_agrees_with_torch_on_all_numbers(tmp_path_factory, values):
    tensor = torch.tensor(values, dtype=torch.float32)
    path = saved(tmp_path_factory.mktemp("x"), tensor)
    if torch.isfinite(tensor).all():
        load_file(path, require_finite=True)
    else:
        with pytest.raises(CorruptCheckpointError):
            load_file(path, require_finite=True)


def test_large_numbers_of_64_bits_are_finite_on_other_devices_too(monkeypatch):
    """On a GPU, weights above 3.4e38 were called infinite, because float32 has no such numbers."""
    monkeypatch.setattr(files.file_io, "FINITE_BITS", {})  # read as on devices whose bits the host does not see
    assert files._is_finite(torch.tensor([1e300], dtype=torch.float64))
    assert not files._is_finite(torch.tensor([float("inf")], dtype=torch.float64))
    assert not files._is_finite(torch.tensor([float("nan")], dtype=torch.float8_e4m3fn))
