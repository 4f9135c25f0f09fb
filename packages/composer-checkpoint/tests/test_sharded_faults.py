"""Damaged, mixed, hostile and foreign sharded checkpoints: refused with a sentence, and nothing was changed."""

import io
import os
import pickle
import random
import resource
import shutil
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from composer_checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NoCheckpointError,
    UnsafeCheckpointError,
)
from composer_checkpoint.sharded import load_sharded, read_folder_metadata, save_sharded, verify_folder

MANIFEST = "composer_manifest.json"


def state(value=1.0):
    return {
        "model": {"layer.weight": torch.full((4, 3), value), "layer.bias": torch.full((3,), value)},
        "optim": {"groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "exp_avg": torch.full((4, 3), value)},
        "time": {"batch": 7, "wct": timedelta(seconds=3)},
        "rng": [torch.arange(5, dtype=torch.uint8)],
    }


@pytest.fixture
def folder(tmp_path):
    save_sharded(state(), tmp_path / "ep1", info={"epoch": 1})
    return tmp_path / "ep1"


@pytest.fixture
def foreign(folder):
    """The same without a manifest, as torch and Composer write it."""
    (folder / MANIFEST).unlink()
    return folder


def assert_refused(folder, kind, match):
    target = state(0.0)
    with pytest.raises(kind, match=match):
        load_sharded(target, folder)
    assert target["model"]["layer.weight"].sum() == 0
    assert target["model"]["layer.bias"].sum() == 0
    assert target["optim"]["exp_avg"].sum() == 0


def test_what_was_saved_is_loaded(folder):
    target = state(0.0)
    target["time"] = {"batch": 0, "wct": None}
    load_sharded(target, folder)
    assert target["time"] == {"batch": 7, "wct": timedelta(seconds=3)}
    assert target["optim"]["groups"] == [{"lr": 0.1, "betas": (0.9, 0.95)}]
    for name in ("layer.weight", "layer.bias"):
        assert torch.equal(target["model"][name], state()["model"][name])


def test_a_part_of_the_checkpoint_can_be_loaded_alone(folder):
    target = {"model": state(0.0)["model"]}
    load_sharded(target, folder)
    assert target["model"]["layer.bias"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(24).view(2, 3, 4).transpose(0, 2),
        torch.arange(10.0)[3:7],
        torch.arange(4).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.bfloat16).view(1, 2, 3).to(memory_format=torch.contiguous_format),
    ],
    ids=["scalar", "empty", "transposed", "slice", "float8", "complex", "bool", "bfloat16"],
)
def test_every_kind_of_tensor_comes_back(tmp_path, tensor):
    save_sharded({"t": tensor}, tmp_path / "ep1")
    target = {"t": torch.zeros_like(tensor)}
    load_sharded(target, tmp_path / "ep1")
    assert target["t"].dtype == tensor.dtype
    assert torch.equal(target["t"].to(torch.complex64), tensor.to(torch.complex64))
    verify_folder(tmp_path / "ep1")


def test_one_flipped_bit_anywhere_is_refused_by_loading_and_by_verifying(folder):
    generator = random.Random(0)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for position in sorted(generator.sample(range(len(whole)), min(len(whole), 60))):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged)
            for check in (verify_folder, lambda folder: load_sharded(state(0.0), folder)):
                with pytest.raises(CheckpointError):
                    check(folder)
        file.write_bytes(whole)
    verify_folder(folder)


def test_the_error_names_the_shard_and_the_tensor(folder):
    shard = folder / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    ones = state()["optim"]["exp_avg"].numpy().tobytes()
    content[content.rindex(ones)] ^= 1
    shard.write_bytes(content)
    for check in (verify_folder, lambda folder: load_sharded(state(0.0), folder)):
        with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp: the bytes of '(optim|model)\.[a-z_.]+'"):
            check(folder)


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_shard_that_was_cut_short_is_refused(folder, size):
    shard = folder / "__0_0.distcp"
    os.truncate(shard, size if size >= 0 else shard.stat().st_size - 1)
    assert_refused(folder, CorruptCheckpointError, r"__0_0\.distcp")


def test_a_missing_shard_is_named(folder):
    (folder / "__0_0.distcp").unlink()
    assert_refused(folder, CorruptCheckpointError, r"lacks the shard __0_0\.distcp")


def test_a_missing_shard_of_a_foreign_folder_is_named(foreign):
    (foreign / "__0_0.distcp").unlink()
    assert_refused(foreign, CorruptCheckpointError, r"lacks the shard __0_0\.distcp, which holds")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_files_of_two_steps_are_refused(folder, tmp_path, name):
    """As a later save leaves them that overwrote a folder in place and failed."""
    save_sharded(state(2.0), tmp_path / "ep2")
    shutil.copy(tmp_path / "ep2" / name, folder / name)
    assert_refused(folder, CorruptCheckpointError, name)


def test_a_folder_without_metadata_is_no_checkpoint(folder):
    (folder / ".metadata").unlink()
    assert_refused(folder, NoCheckpointError, "has no .metadata")
    assert_refused(folder.parent / "ep9", NoCheckpointError, "does not exist")


def test_a_foreign_folder_loads_with_a_warning(foreign, caplog):
    target = state(0.0)
    load_sharded(target, foreign)
    assert target["model"]["layer.bias"].tolist() == [1, 1, 1]
    assert "it is loaded unverified" in caplog.text
    assert verify_folder(foreign) is None


def test_a_flipped_bit_of_a_foreign_tensor_does_not_have_its_checksum(foreign):
    shard = foreign / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[content.rindex(state()["optim"]["exp_avg"].numpy().tobytes())] ^= 1
    shard.write_bytes(content)
    assert_refused(foreign, CorruptCheckpointError, r"__0_0\.distcp: '(optim|model).*' do not have their checksum")
    with pytest.raises(CorruptCheckpointError, match="do not have their checksum"):
        verify_folder(foreign)
    load_sharded(state(0.0), foreign, verify=False)


class Runs:
    """A pickle that would make a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_metadata_that_would_run_a_program_is_refused(foreign, tmp_path):
    raw = pickle.loads((foreign / ".metadata").read_bytes())
    raw.planner_data = Runs(tmp_path / "ran")
    (foreign / ".metadata").write_bytes(pickle.dumps(raw))
    assert_refused(foreign, UnsafeCheckpointError, r"\.metadata: .*posix\.mkdir")
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_item_that_would_run_a_program_is_refused(tmp_path):
    hostile = state() | {"time": {"batch": Runs(tmp_path / "ran"), "wct": 0}}
    dcp.save(hostile, checkpoint_id=tmp_path / "ep1", no_dist=True)  # as others write it; ours refuses to save it
    assert_refused(tmp_path / "ep1", UnsafeCheckpointError, r"__0_0\.distcp: 'time\.batch' .*posix\.mkdir")
    with pytest.raises(UnsafeCheckpointError):
        verify_folder(tmp_path / "ep1")
    assert not (tmp_path / "ran").exists()


def test_what_is_more_than_data_is_refused_when_it_is_saved(tmp_path):
    hostile = state() | {"time": {"batch": Runs(tmp_path / "ran"), "wct": 0}}
    with pytest.raises(UnsafeCheckpointError, match=r"time\.batch \(posix\.mkdir\)"):
        save_sharded(hostile, tmp_path / "ep1")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_would_run_a_program_is_refused(foreign, tmp_path):
    hostile = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), hostile)
    raw = pickle.loads((foreign / ".metadata").read_bytes())
    for index, info in raw.storage_data.items():
        raw.storage_data[index] = _StorageInfo("__9_9.distcp", 0, max(info.length, len(hostile.getvalue())))
    (foreign / ".metadata").write_bytes(pickle.dumps(raw))
    (foreign / "__9_9.distcp").write_bytes(hostile.getvalue().ljust(1 << 16))
    assert_refused(foreign, CheckpointError, r"__9_9\.distcp")
    for index in raw.storage_data:
        raw.storage_data[index] = _StorageInfo("__9_9.distcp", 0, len(hostile.getvalue()))
    (foreign / ".metadata").write_bytes(pickle.dumps(raw))
    assert_refused(foreign, UnsafeCheckpointError, r"posix\.mkdir")
    assert not (tmp_path / "ran").exists()


def described(size=(4,), chunks=(((0,), (4,)),), dtype=torch.float32, infos=None, path=("w",)):
    """A `.metadata` of one tensor, as it should not be."""
    parts = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), parts)
    entry.properties.dtype = dtype
    stored = {MetadataIndex("w", part.offsets): _StorageInfo("__0_0.distcp", 0, 1000) for part in parts}
    for index, info in (infos or {}).items():
        stored[MetadataIndex("w", index)] = _StorageInfo(*info)
    return Metadata({"w": entry}, {"w": path}, stored)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (described(size=(1 << 40,), chunks=[((0,), (1 << 40,))]), "at least 4398046511104 bytes"),
        (described(size=(1 << 62,), chunks=[((0,), (1 << 62,))]), "fewer than 2\\^63 bytes"),
        (described(size=(-4,), chunks=[((0,), (-4,))]), "counts from 0"),
        (described(size=(4,), chunks=[((0,), (3,)), ((2,), (2,))]), "overlapping parts"),
        (described(size=(4,), chunks=[((0,), (2,)), ((1,), (2,))]), "overlapping parts"),
        (described(size=(4, 4), chunks=[((0, 0), (3, 3)), ((2, 2), (1, 7))]), "leaves it"),
        (described(size=(4, 4), chunks=[((0, 0), (3, 4)), ((2, 0), (2, 2))]), "overlapping parts"),
        (described(size=(4,), chunks=[((0,), (3,))]), "3 of 4 elements"),
        (described(size=(4,), chunks=[((2,), (3,))]), "leaves it"),
        (described(size=(4,), chunks=[((0, 0), (2, 2))]), "offsets of a part"),
        (described(size=(1,) * 65, chunks=[]), "up to 64 counts"),
        (described(dtype="float32"), "torch.dtype"),
        (described(infos={(0,): ("../../etc/passwd", 0, 1000)}), "the name of a file of the same folder"),
        (described(infos={(0,): ("/etc/passwd", 0, 1000)}), "the name of a file of the same folder"),
        (described(infos={(0,): ("__0_0.distcp", -1, 1000)}), "offset -1"),
        (described(infos={(0,): ("__0_0.distcp", 0, -1000)}), "-1000 bytes"),
        (described(infos={(0,): ("__0_0.distcp", 0, 1 << 40)}), "cut short or is of another save"),
        (described(infos={(0,): ("__7_0.distcp", 0, 1000)}), "lacks the shard __7_0.distcp"),
        (described(path=("w", 1 << 40)), "names and small indices"),
        (described(path=()), "names and small indices"),
        (Metadata({"w": BytesStorageMetadata()}, None, {}), "the name of a file"),
        (Metadata({"w": 7}, None, {}), "a description of a tensor"),
        (Metadata({3: BytesStorageMetadata()}, None, {}), "a string"),
        (Metadata([1], None, {}), "a dict"),
        ({"w": 1}, "a Metadata"),
    ],
)
def test_a_metadata_that_cannot_be_is_refused(foreign, metadata, match):
    (foreign / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=match):
        read_folder_metadata(foreign)


def unfolding():
    """A tuple that reaches its innermost by 2**60 paths."""
    value = ()
    for _ in range(60):
        value = (value, value)
    return value


def endless_metadata(where):
    raw = described()
    entry, info = raw.state_dict_metadata["w"], next(iter(raw.storage_data.values()))
    match where:
        case "state_dict_metadata" | "planner_data" | "storage_data":
            setattr(raw, where, unfolding())
        case "size" | "chunks" | "properties":
            setattr(entry, where, unfolding())
        case "dtype":
            entry.properties.dtype = unfolding()
        case "relative_path" | "offset" | "length" | "transform_descriptors":
            object.__setattr__(info, where, unfolding())
        case "path":
            raw.planner_data["w"] = unfolding()
        case "sizes" | "offsets":
            object.__setattr__(entry.chunks[0], where, unfolding())
        case "entry":
            raw.state_dict_metadata["w"] = unfolding()
        case "key":
            raw.state_dict_metadata = {("w",) * 9: entry}
        case "long name":
            raw.state_dict_metadata = {"w" * 100_000: entry}
    return raw


FIELDS = (
    "state_dict_metadata planner_data storage_data entry key size chunks properties dtype sizes offsets relative_path "
    "offset length transform_descriptors path"
)


@pytest.mark.parametrize("where", [*FIELDS.split(), "long name"])
def test_no_message_unfolds_what_a_metadata_has(foreign, where):
    (foreign / ".metadata").write_bytes(pickle.dumps(endless_metadata(where)))
    with pytest.raises(CheckpointError) as refusal:
        read_folder_metadata(foreign)
    assert len(str(refusal.value)) < 2000


def test_parts_of_a_grid_of_devices_are_read(foreign):
    grid = [((row, column), (1, 1)) for row in range(64) for column in range(64)]
    (foreign / ".metadata").write_bytes(pickle.dumps(described(size=(64, 64), chunks=grid)))
    assert len(read_folder_metadata(foreign).state_dict_metadata["w"].chunks) == 64 * 64


def test_parts_that_lie_so_that_each_must_be_compared_with_all_are_refused(foreign):
    rows = 3000
    halves = [((0, row), (row + 1, 1)) for row in range(rows)] + [
        ((row + 1, row), (rows - row, 1)) for row in range(rows)
    ]
    (foreign / ".metadata").write_bytes(pickle.dumps(described(size=(rows + 1, rows), chunks=halves)))
    with pytest.raises(CorruptCheckpointError, match="in no order"):
        read_folder_metadata(foreign)


class Dict:
    """Pickles as a dict that need not be there, which with these keys would take long."""

    def __init__(self, items):
        self.items = items

    def __reduce__(self):
        return dict, (), None, None, iter(self.items)


def test_indices_whose_numbers_have_one_hash_take_no_endless_time(foreign):
    raw = described()
    one_hash = [tuple(5 + (number >> bit & 1) * (2**61 - 1) for bit in range(13)) for number in range(1 << 13)]
    raw.storage_data = Dict([*raw.storage_data.items(), *((MetadataIndex("w", offset), None) for offset in one_hash)])
    (foreign / ".metadata").write_bytes(pickle.dumps(raw))
    assert list(read_folder_metadata(foreign).storage_data) == [MetadataIndex("w", torch.Size([0]))]


@pytest.mark.parametrize("name", ["Metadata", "TensorProperties", "MetadataIndex"])
def test_a_metadata_cannot_change_the_classes_that_it_names(foreign, name):
    """BUILD on a class instead of an object would set the attributes of the class."""
    program = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\nN}X\x05\x00\x00\x00spoilK\x01s\x86b."
    )
    (foreign / ".metadata").write_bytes(program)
    with pytest.raises(CheckpointError):
        read_folder_metadata(foreign)
    assert not hasattr(getattr(torch.distributed.checkpoint.metadata, name), "spoil")


def test_a_metadata_of_torch_2_2_is_read(foreign):
    old = torch.distributed._shard.sharded_tensor.metadata.TensorProperties
    raw = pickle.loads((foreign / ".metadata").read_bytes())
    for entry in raw.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.properties = old(dtype=entry.properties.dtype)
    del raw.storage_meta, raw.version
    (foreign / ".metadata").write_bytes(pickle.dumps(raw))
    target = {"model": state(0.0)["model"]}
    load_sharded(target, foreign)
    assert target["model"]["layer.bias"].tolist() == [1, 1, 1]


def test_names_of_torch_2_3_are_found(foreign):
    """Up to torch 2.3, a list of dicts without tensors was one item."""
    groups = io.BytesIO()
    torch.save([{"lr": 0.5}], groups)
    raw = pickle.loads((foreign / ".metadata").read_bytes())
    for name in list(raw.state_dict_metadata):
        if name.startswith("optim.groups"):
            del raw.state_dict_metadata[name], raw.planner_data[name], raw.storage_data[MetadataIndex(name)]
    raw.state_dict_metadata["optim.groups"] = BytesStorageMetadata()
    raw.planner_data["optim.groups"] = ("optim", "groups")
    raw.storage_data[MetadataIndex("optim.groups")] = _StorageInfo("__0_1.distcp", 0, len(groups.getvalue()))
    (foreign / "__0_1.distcp").write_bytes(groups.getvalue())
    (foreign / ".metadata").write_bytes(pickle.dumps(raw))
    target = {"optim": {"groups": [{"lr": 0.1}], "exp_avg": torch.zeros(4, 3)}}
    load_sharded(target, foreign)
    assert target["optim"]["groups"] == [{"lr": 0.5}]
    assert target["optim"]["exp_avg"].sum() == 12


def other_model():
    return {
        "model": {
            "layer.weight": torch.zeros(4, 5),
            "layer.bias": torch.zeros(3),
            **{f"extra{i:02}": torch.zeros(1) for i in range(12)},
        }
    }


def test_another_models_checkpoint_is_refused_with_lists_of_at_most_ten(folder):
    target = other_model()
    del target["model"]["layer.bias"]
    with pytest.raises(IncompatibleCheckpointError) as caught:
        load_sharded(target, folder)
    text = str(caught.value)
    assert "12 missing from the checkpoint: model.extra00, " in text
    assert "model.extra09 and 2 more" in text
    assert "1 in the checkpoint but not asked for: model.layer.bias" in text
    assert "1 different: model.layer.weight (shape (4, 5) here and (4, 3) there)" in text


def test_what_fits_is_loaded_when_not_strict(folder, caplog):
    target = other_model()
    load_sharded(target, folder, strict=False)
    assert target["model"]["layer.bias"].tolist() == [1, 1, 1]
    assert target["model"]["layer.weight"].sum() == 0
    assert "Loaded 1 of 14 entries" in caplog.text


def test_a_checkpoint_of_which_nothing_fits_is_refused_when_not_strict_too(folder):
    with pytest.raises(IncompatibleCheckpointError, match="nothing of the checkpoint fits"):
        load_sharded({"net": {"w": torch.zeros(2)}}, folder, strict=False)


def test_another_dtype_is_refused_and_converted_when_not_strict(folder):
    target = {"model": {name: tensor.double() * 0 for name, tensor in state()["model"].items()}}
    with pytest.raises(IncompatibleCheckpointError, match=r"torch\.float64 here and torch\.float32 there"):
        load_sharded(target, folder)
    load_sharded(target, folder, strict=False)
    assert target["model"]["layer.bias"].tolist() == [1, 1, 1]


def test_optimizer_state_in_another_parameter_order_is_refused(tmp_path):
    """By position, as plain optimizers number their parameters, the shapes do not fit any more."""
    first, second = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(5))

    def moments(parameters):
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"optim": optimizer.state_dict()}

    save_sharded(moments([first, second]), tmp_path / "ep1")
    with pytest.raises(IncompatibleCheckpointError, match="load weights only if the optimizer's entries differ"):
        load_sharded(moments([second, first]), tmp_path / "ep1")


def test_remote_folders_are_written_verified_and_read():
    uri = "memory://run/ep1"
    manifest = save_sharded(state(), uri)
    target = state(0.0)
    load_sharded(target, uri)
    assert target["model"]["layer.bias"].tolist() == [1, 1, 1]
    assert verify_folder(uri) == manifest
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_sharded(state(), uri)
    save_sharded(state(2.0), uri, overwrite=True)
    load_sharded(target, uri)
    assert target["model"]["layer.bias"].tolist() == [2, 2, 2]


def test_a_full_disk_leaves_the_checkpoint_before_untouched(folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="could not be written"):
            save_sharded({"w": torch.zeros(1 << 16)}, folder, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in folder.parent.iterdir()] == ["ep1"]
    load_sharded(state(0.0), folder)


def test_a_folder_that_is_no_sharded_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("1")
    with pytest.raises(FileExistsError, match="mine is a folder with precious, which is no sharded checkpoint"):
        save_sharded(state(), tmp_path / "mine", overwrite=True)
    assert os.listdir(tmp_path / "mine") == ["precious"]
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        save_sharded(state(), tmp_path / "empty", overwrite=True)
    verify_folder(tmp_path / "empty")
