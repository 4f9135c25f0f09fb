import collections
import datetime
import logging
import random
import zipfile

import numpy as np
import pytest
import torch

from composer_checkpoint import (
    NoCheckpointError,
    StorageError,
    UnsafeCheckpointError,
    hash_tensor,
    load_file,
    read_manifest,
    safe_torch_load,
    save_file,
    verify,
)


def composer_state():
    """What a training run with AdamW saves, in Composer's layout."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    clocks = {"total_wct": datetime.timedelta(days=2, seconds=3, microseconds=4), "batch_wct": datetime.timedelta()}
    return {
        "state": {
            "model": model.state_dict(),
            "optimizers": {"AdamW": {"state": states, "param_groups": [{"lr": 1e-3, "params": list(states)}]}},
            "algorithms": [("EMA", {"smoothing": 0.99, "repr": "EMA()"})],
            "timestamp": {"Timestamp": {"epoch": 1, "batch": 7, **clocks}},
            "rank_zero_seed": 17,
            "run_name": "blue-fox",
        },
        "rng": [{"python": random.Random(1).getstate(), "torch": torch.get_rng_state()}],
    }


def assert_same(found, expected):
    """Two trees are equal, with their types; tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


@pytest.mark.parametrize("mmap", [True, False])
def test_save_then_load_gives_back_a_training_state(tmp_path, mmap):
    state = composer_state()
    save_file(state, tmp_path / "ep1.pt")
    assert_same(load_file(tmp_path / "ep1.pt", mmap=mmap), state)


@pytest.mark.parametrize("mmap", [True, False])
def test_torch_load_reads_the_file_with_weights_only(tmp_path, mmap):
    state = composer_state()
    save_file(state, tmp_path / "ep1.pt")
    found = torch.load(tmp_path / "ep1.pt", weights_only=True, mmap=mmap)
    assert_same(found["state"]["model"], state["state"]["model"])
    assert found["state"]["timestamp"]["Timestamp"]["total_wct"] == 2 * 86_400 + 3 + 4e-6  # seconds
    assert datetime.timedelta not in torch.serialization.get_safe_globals()


def test_unzip_finds_the_file_whole(tmp_path):
    save_file(composer_state(), tmp_path / "ep1.pt")
    with zipfile.ZipFile(tmp_path / "ep1.pt") as archive:
        assert archive.testzip() is None


def test_saving_does_not_change_what_is_saved(tmp_path):
    state = composer_state()
    save_file(state, tmp_path / "ep1.pt")
    assert_same(state, composer_state())


def test_equal_states_make_equal_files(tmp_path):
    for name in ("a.pt", "b.pt"):
        save_file({"w": torch.arange(5.0)}, tmp_path / name)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


UNUSUAL = {
    "an empty tensor": torch.empty(0, 3),
    "a scalar": torch.tensor(3),
    "a boolean": torch.tensor([True, False]),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "unsigned 16 bits": torch.ones(3, dtype=torch.uint16),
    "a transposed one": torch.arange(12.0).reshape(3, 4).t(),
    "a part of another": torch.arange(20.0)[3:9],
    "a conjugated view": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "an expanded one": torch.ones(1).expand(5),
    "every other element": torch.arange(10)[::2],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_manifest_has_the_hash_of_the_elements_in_row_major_order(tmp_path, name):
    manifest = save_file({"x": UNUSUAL[name]}, tmp_path / "x.pt")
    entry = manifest.tensors["x"]
    assert entry.hash == hash_tensor(UNUSUAL[name].clone().resolve_conj())
    assert (entry.dtype, entry.shape) == (str(UNUSUAL[name].dtype).removeprefix("torch."), tuple(UNUSUAL[name].shape))
    found = load_file(tmp_path / "x.pt")["x"]
    assert found.dtype == UNUSUAL[name].dtype
    assert torch.equal(
        found.float() if "float8" in name else found,
        UNUSUAL[name].to(found.dtype if "float8" not in name else torch.float32),
    )
    assert read_manifest(tmp_path / "x.pt") == manifest == verify(tmp_path / "x.pt")


def test_tensors_that_share_memory_share_it_after_loading(tmp_path):
    weight = torch.arange(6.0)
    save_file({"embedding": weight, "head": weight, "row": weight[2:4]}, tmp_path / "tied.pt")
    found = load_file(tmp_path / "tied.pt", mmap=False)
    found["embedding"][2] = 40.0
    assert found["head"][2] == 40.0
    assert found["row"][0] == 40.0


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_parameter_stays_one_and_a_sparse_tensor_too(tmp_path):
    sparse = torch.eye(3).to_sparse()
    save_file({"p": torch.nn.Parameter(torch.ones(2)), "s": sparse}, tmp_path / "x.pt")
    found = load_file(tmp_path / "x.pt")
    assert isinstance(found["p"], torch.nn.Parameter)
    assert torch.equal(found["s"].to_dense(), torch.eye(3))


def test_containers_come_back_as_what_they_were(tmp_path):
    state = {
        "ordered": collections.OrderedDict(a=1),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, a=[1]),
        "deque": collections.deque([1, 2]),
        "set": {1, 2},
        "frozenset": frozenset("ab"),
        "nested": [(1, [2, {"x": (3.5, None, True, b"bytes", "text")}])],
        "huge": 1 << 80,
    }
    save_file(state, tmp_path / "x.pt")
    found = load_file(tmp_path / "x.pt")
    assert found == state
    assert [type(value) for value in found.values()] == [type(value) for value in state.values()]
    assert found["default"]["missing"] == []


def test_what_is_in_a_deque_and_what_is_shared_comes_back_as_it_was(tmp_path):
    queue = collections.deque([datetime.timedelta(1), np.arange(3)])
    save_file({"one": queue, "other": [queue], "nested": collections.deque([queue])}, tmp_path / "x.pt")
    found = load_file(tmp_path / "x.pt")
    for copy in (found["one"], found["other"][0], found["nested"][0]):
        assert type(copy) is collections.deque
        assert copy[0] == datetime.timedelta(1)
        np.testing.assert_array_equal(copy[1], np.arange(3))


def test_numpy_values_are_tensors_and_numbers_to_other_readers_and_arrays_again_to_us(tmp_path):
    state = {"scores": np.arange(6.0).reshape(2, 3)[:, ::-1], "best": np.float32(0.5), "names": np.array(["a", "bc"])}
    save_file(state, tmp_path / "x.pt")
    found = load_file(tmp_path / "x.pt")
    assert isinstance(found["scores"], np.ndarray)
    np.testing.assert_array_equal(found["scores"], state["scores"])
    assert type(found["best"]) is float
    assert found["names"].tolist() == ["a", "bc"]


def test_the_manifest_says_what_the_caller_noted(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "x.pt", info={"run_name": "blue-fox", "world_size": 2})
    info = read_manifest(tmp_path / "x.pt").info
    assert (info["run_name"], info["world_size"], info["torch_version"]) == ("blue-fox", 2, str(torch.__version__))


def test_nothing_lies_beside_the_file(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "x.pt.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt.gz"]


def test_an_unfinished_file_has_the_format_of_its_final_name(tmp_path):
    unfinished = tmp_path / "x.safetensors.tmp-host-12-ab"
    save_file({"w": torch.ones(2)}, unfinished)
    assert unfinished.read_bytes()[8:9] == b"{"
    assert torch.equal(load_file(unfinished)["w"], torch.ones(2))


def test_a_file_of_torch_loads_with_a_note_that_nobody_verified_it(tmp_path, caplog):
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    assert torch.equal(load_file(tmp_path / "x.pt")["w"], torch.ones(2))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "unverified" in caplog.text
    assert verify(tmp_path / "x.pt") is None
    assert read_manifest(tmp_path / "x.pt") is None


class Mine(dict):
    """More than data, although it is a dict."""


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (random.Random(1), r"state/callbacks/Mine/h \(.*random\.Random"),
        ([1, print], r"state/callbacks/Mine/h/1 \(.*print"),
        (lambda: 1, r"state/callbacks/Mine/h \(a function, which cannot be pickled"),
        ({1, random.Random}, r"state/callbacks/Mine/h \(.*random\.Random"),
        (Mine(), r"Mine"),
    ],
)
@pytest.mark.parametrize("name", ["x.pt", "x.tar"])
def test_what_is_more_than_data_is_refused_when_it_is_saved_and_named(tmp_path, name, value, told):
    content = {"state": {"callbacks": {"Mine": {"h": value}}, "model": {"w": torch.ones(2)}}}
    with pytest.raises(UnsafeCheckpointError, match=told):
        save_file(content, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_what_is_more_than_data_may_be_saved_for_loading_with_trust(tmp_path, caplog):
    save_file({"callbacks": {"Mine": random.Random(1)}}, tmp_path / "x.pt", allow_untrusted=True)
    assert "random.Random" in caplog.text
    assert "trusted=True" in caplog.text
    assert load_file(tmp_path / "x.pt", trusted=True)["callbacks"]["Mine"].random() == random.Random(1).random()


@pytest.mark.parametrize("maxlen", [None, 0, 1, 10])
def test_a_queue_keeps_its_greatest_length(tmp_path, maxlen):
    queue = collections.deque([1.0, 2.0], maxlen)
    save_file({"h": queue}, tmp_path / "x.pt")
    loaded = load_file(tmp_path / "x.pt")["h"]
    assert (loaded, loaded.maxlen) == (queue, queue.maxlen)


def test_a_path_without_a_file_is_a_file_not_found_error(tmp_path):
    for call in (load_file, verify, read_manifest, safe_torch_load):
        with pytest.raises(NoCheckpointError, match=r"there is no checkpoint at .*none\.pt"):
            call(tmp_path / "none.pt")
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none.tar.gz")


def test_a_folder_that_cannot_be_written_to_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"x\.pt' could not be written") as caught:
        save_file({"w": torch.ones(1)}, tmp_path / "missing" / "x.pt")
    assert isinstance(caught.value, OSError)


def test_a_full_disk_is_a_storage_error_with_its_number():
    with pytest.raises(StorageError) as caught:
        save_file({"w": torch.ones(1 << 20)}, "/dev/full")
    assert caught.value.errno == 28


def test_weights_that_are_not_finite_are_named_and_refused_on_request(tmp_path, caplog):
    state = {"state": {"model": {"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")])}, "run_name": "x"}}
    save_file(state, tmp_path / "x.pt")
    load_file(tmp_path / "x.pt")
    assert "state/model/bad" in caplog.text
    assert "state/model/good" not in caplog.text
    with pytest.raises(Exception, match=r"NaN or infinite: state/model/bad\."):
        load_file(tmp_path / "x.pt", require_finite=True)


def test_large_finite_weights_are_finite(tmp_path):
    save_file({"w": torch.full((8,), 60_000.0, dtype=torch.float16)}, tmp_path / "x.pt")
    load_file(tmp_path / "x.pt", require_finite=True)


def test_composers_name_for_loading_does_the_same(tmp_path):
    save_file({"w": torch.arange(3)}, tmp_path / "x.pt")
    assert safe_torch_load(tmp_path / "x.pt")["w"].tolist() == [0, 1, 2]
    assert safe_torch_load(tmp_path / "x.pt", map_location="meta")["w"].is_meta


def test_the_users_own_list_of_torch_stays_as_it_is(tmp_path):
    save_file({"w": datetime.timedelta(1)}, tmp_path / "x.pt")
    load_file(tmp_path / "x.pt")
    assert datetime.timedelta not in torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([datetime.timedelta]):
        load_file(tmp_path / "x.pt")
        assert datetime.timedelta in torch.serialization.get_safe_globals()
