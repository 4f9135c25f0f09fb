import bz2
import collections
import copyreg
import datetime
import functools
import gzip
import io
import lzma
import os
import pickle
import shutil
import subprocess
import tarfile
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from composer_checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    hash_file,
    inspect_file,
    load_file,
    load_sharded,
    read_manifest,
    safe_torch_load,
    safe_unpickle,
    save_file,
    verify,
)


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def call(function, *arguments):
    return pickle.dumps(Calls(function, *arguments), protocol=2)


def hostile_pickles(command):
    """Pickles that run a shell command, and a name that the refusal must have."""
    storage = io.BytesIO()
    torch.save(Calls(os.system, command), storage, _use_new_zipfile_serialization=False)
    text = b"X" + len(command).to_bytes(4, "little") + command.encode()
    system = b"cposix\nsystem\n"
    return {
        "os.system": (call(os.system, command), "posix.system"),
        "subprocess": (
            call(subprocess.call, command, 1, None, None, None, None, None, True, True),
            "(subprocess|commands).call",
        ),
        "builtins.eval": (call(eval, f"__import__('os').system({command!r})"), "builtins.eval"),
        "builtins.exec": (call(exec, f"import os; os.system({command!r})"), "builtins.exec"),
        "protocol 4": (pickle.dumps(Calls(os.system, command), protocol=4), "posix.system"),
        "posix under another name": (
            b"\x80\x02" + b"cos\nsystem\n" + text + b"\x85R.",
            "os.system",
        ),
        "a dotted name": (
            b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93" + text + b"\x85R.",
            "torch.os.system",
        ),
        "pkgutil": (
            b"\x80\x02cpkgutil\nresolve_name\nX\x09\x00\x00\x00os:system\x85R" + text + b"\x85R.",
            "pkgutil.resolve_name",
        ),
        "getattr": (
            b"\x80\x02cbuiltins\ngetattr\nNN\x86R.",
            "builtins.getattr",
        ),
        "partial": (call(functools.partial, os.system, command), "functools.partial"),
        "importlib": (b"\x80\x02cimportlib\nimport_module\nX\x02\x00\x00\x00os\x85R.", "importlib.import_module"),
        "a nested storage": (call(torch.storage._load_from_bytes, storage.getvalue()), "_load_from_bytes|posix.system"),
        "torch.load": (b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00x\x85R.", "torch.load"),
        "numpy": (b"\x80\x02cnumpy\nload\nX\x01\x00\x00\x00x\x85R.", "numpy.load"),
        "INST": (b"\x80\x02(" + text + b"iposix\nsystem\n.", "INST.*posix.system"),
        "OBJ": (b"\x80\x02(" + system + text + b"o.", "OBJ"),
        "BUILD": (b"\x80\x02cinspect\nSignature\n)\x81}X\x01\x00\x00\x00aK\x01sb.", "inspect.Signature"),
        "NEWOBJ_EX": (b"\x80\x04" + system + text + b"\x85}\x92.", "posix.system"),
        "a persistent id": (b"\x80\x02" + text + b"Q.", "refers to"),
    }


NAMES = list(hostile_pickles("true"))


@pytest.fixture
def marker(tmp_path):
    """A file that would be there if any of the code had run."""
    path = tmp_path / "it-ran"
    yield path
    assert not path.exists()


@pytest.fixture
def payload(request, marker):
    return hostile_pickles(f"touch {marker}")[request.param]


@pytest.fixture
def warm_extension():
    """An extension code whose answer is in the cache of the process, where no restricted look-up sees it."""
    copyreg.add_extension("posix", "system", 0xF0)
    pickle.loads(b"\x80\x02\x82\xf0.")
    yield
    copyreg.remove_extension("posix", "system", 0xF0)


def as_zip(data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def as_legacy(data):
    buffer = io.BytesIO()
    torch.save([], buffer, _use_new_zipfile_serialization=False)
    whole = buffer.getvalue()
    empty = pickle.dumps([], protocol=2)
    at = whole.index(empty)
    return whole[:at] + data + whole[at + len(empty) :]


def as_tar(data):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("composer_states.pt")
        info.size = len(as_zip(data))
        archive.addfile(info, io.BytesIO(as_zip(data)))
    return buffer.getvalue()


CARRIERS = {
    "x.pt": as_zip,
    "no_extension": as_zip,
    "legacy.pt": as_legacy,
    "resumption.pkl": bytes,
    "rng.pt": bytes,
    "latest-rank0.pt.symlink": bytes,
    "x.tar": as_tar,
    "x.tar.gz": lambda data: gzip.compress(as_tar(data)),
    "x.tar.lzma": lambda data: lzma.compress(as_tar(data)),
    "x.pt.gz": lambda data: gzip.compress(as_zip(data)),
    "x.pt.xz": lambda data: lzma.compress(as_zip(data)),
    "x.pt.bz2": lambda data: bz2.compress(as_zip(data)),
}


@pytest.mark.parametrize("payload", NAMES, indirect=True)
def test_a_pickle_that_would_run_a_command_is_refused_with_the_name(payload):
    data, name = payload
    with pytest.raises(UnsafeCheckpointError, match=name):
        safe_unpickle(data)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("payload", NAMES, indirect=True)
def test_every_carrier_of_it_is_refused(tmp_path, carrier, payload):
    data, name = payload
    path = tmp_path / carrier
    path.write_bytes(CARRIERS[carrier](data))
    for call in (load_file, safe_torch_load):
        with pytest.raises(UnsafeCheckpointError, match=name) as caught:
            call(path)
        assert str(path) in str(caught.value)
    with pytest.raises(CheckpointError):
        verify(path)


@pytest.fixture
def folder(tmp_path):
    """A sharded checkpoint as torch itself writes it: without a manifest, which would tell of any change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save({"epoch": 3}, checkpoint_id=tmp_path / "ep1", no_dist=True)
    return tmp_path / "ep1"


def put_metadata(folder, data):
    (folder / ".metadata").write_bytes(data)


def put_item(folder, data):
    (folder / "__0_0.distcp").write_bytes(as_zip(data))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = metadata.storage_data.values()
    place.offset, place.length = 0, len(as_zip(data))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("put", [put_metadata, put_item])
@pytest.mark.parametrize("payload", NAMES, indirect=True)
def test_the_files_of_a_sharded_checkpoint_are_refused_with_it(folder, put, payload):
    data, name = payload
    put(folder, data)
    for use in (verify, lambda folder: load_sharded({"epoch": 0}, folder)):
        with pytest.raises(UnsafeCheckpointError, match=name):
            use(folder)


@pytest.mark.usefixtures("warm_extension")
@pytest.mark.parametrize("put", [put_metadata, put_item])
def test_a_registered_extension_is_refused_in_a_sharded_checkpoint_too(folder, put, marker):
    command = f"touch {marker}".encode()
    put(folder, b"\x80\x02\x82\xf0X" + len(command).to_bytes(4, "little") + command + b"\x85R.")
    for use in (verify, lambda folder: load_sharded({"epoch": 0}, folder)):
        with pytest.raises(UnsafeCheckpointError, match="EXT1"):
            use(folder)


@pytest.mark.usefixtures("warm_extension")
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_registered_extension_is_refused_in_every_carrier(tmp_path, carrier, marker):
    command = f"touch {marker}".encode()
    data = b"\x80\x02\x82\xf0X" + len(command).to_bytes(4, "little") + command + b"\x85R."
    (tmp_path / carrier).write_bytes(CARRIERS[carrier](data))
    with pytest.raises(UnsafeCheckpointError, match="EXT1"):
        load_file(tmp_path / carrier)


@pytest.mark.parametrize("command", ["zstd", "lz4", "lzop"])
def test_carriers_compressed_by_other_programs_are_refused(tmp_path, marker, command):
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    extension = {"zstd": "zst", "lz4": "lz4", "lzop": "lzo"}[command]
    whole = as_zip(call(os.system, f"touch {marker}"))
    path = tmp_path / f"x.pt.{extension}"
    path.write_bytes(subprocess.run([command, "-c"], input=whole, capture_output=True, check=True).stdout)
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.system"):
        load_file(path)


def test_an_object_with_reduce_ex_inside_a_whole_state_is_refused(tmp_path, marker):
    class Sneaky:
        def __reduce_ex__(self, protocol):
            return os.system, (f"touch {marker}",)

    torch.save({"state": {"model": {"w": torch.ones(2)}, "callbacks": [Sneaky()]}}, tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"asks for posix\.system.*global not in allowlist.*trusted=True"):
        load_file(tmp_path / "x.pt")
    with pytest.raises(pickle.UnpicklingError):  # which is what Composer raises
        load_file(tmp_path / "x.pt")


def test_a_seal_does_not_make_a_file_safe(tmp_path, marker, caplog):
    save_file({"state": {"x": Calls(os.system, f"touch {marker}")}}, tmp_path / "x.pt", allow_untrusted=True)
    assert read_manifest_or_error(tmp_path / "x.pt") == "UnsafeCheckpointError"
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.system"):
        load_file(tmp_path / "x.pt")


def read_manifest_or_error(path):
    try:
        return read_manifest(path)
    except CheckpointError as error:
        return type(error).__name__


@pytest.mark.parametrize("payload", ["os.system", "builtins.eval", "pkgutil", "a nested storage"], indirect=True)
def test_inspecting_names_what_a_file_asks_for_and_runs_nothing(tmp_path, payload):
    data, name = payload
    (tmp_path / "x.pt").write_bytes(as_zip(data))
    description = inspect_file(tmp_path / "x.pt")
    assert any(part in " ".join(description.unsafe_globals) for part in name.split("|"))


def test_a_data_only_name_of_a_class_is_not_imported(tmp_path):
    state = {"state": {"integrations": {"huggingface": {"model": {"class": "os.system"}}}, "algorithms": ["os.system"]}}
    save_file(state, tmp_path / "x.pt")
    assert load_file(tmp_path / "x.pt") == state


def test_trust_is_for_one_call_and_is_logged_with_the_files_hash(tmp_path, caplog):
    torch.save({"x": pickle.PickleError("mine")}, tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"_pickle\.PickleError|pickle\.PickleError"):
        load_file(tmp_path / "x.pt")
    caplog.clear()
    assert str(load_file(tmp_path / "x.pt", trusted=True)["x"]) == "mine"
    assert hash_file(tmp_path / "x.pt", "blake3") in caplog.text
    assert "may run any code" in caplog.text
    with pytest.raises(UnsafeCheckpointError):
        load_file(tmp_path / "x.pt")


def test_a_trusted_file_must_be_whole_and_gives_back_what_was_saved(tmp_path):
    content = {"x": pickle.PickleError("mine"), "w": torch.ones(64), "t": datetime.timedelta(3)}
    save_file(content, tmp_path / "x.pt", allow_untrusted=True)
    assert load_file(tmp_path / "x.pt", trusted=True)["t"] == datetime.timedelta(3)
    whole = bytearray((tmp_path / "x.pt").read_bytes())
    whole[whole.index(torch.ones(64).numpy().tobytes())] ^= 1
    (tmp_path / "x.pt").write_bytes(whole)
    with pytest.raises(CorruptCheckpointError, match="the bytes of w are not"):
        load_file(tmp_path / "x.pt", trusted=True)


@pytest.mark.parametrize("legacy", [True, False])
def test_older_files_and_plain_pickles_can_be_trusted_too(tmp_path, legacy):
    torch.save({"x": pickle.PickleError("mine")}, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"x": pickle.PickleError("mine")}))
    for name in ("x.pt", "x.pkl"):
        assert str(load_file(tmp_path / name, trusted=True)["x"]) == "mine"


def test_a_tensor_that_no_name_leads_to_is_checked_as_well(tmp_path):
    hidden = rebuilt_tensor(4, (1 << 40,), (0,)).replace(b"}", b"\x8f", 1)  # a set instead of the dict
    hidden = hidden.replace(b"X\x01\x00\x00\x00w", b"(X\x01\x00\x00\x00w", 1)
    hidden = hidden[:-2] + b"\x90."
    buffer = io.BytesIO(as_zip(hidden))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("archive/data/0", bytes(16))
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CorruptCheckpointError, match=r"a tensor of shape .1099511627776,. .* repeats 4 elements"):
        load_file(tmp_path / "x.pt")


def test_trust_is_given_to_one_call_and_logged_and_no_variable_gives_it_to_a_process(tmp_path, caplog, monkeypatch):
    torch.save({"x": pickle.PickleError("mine")}, tmp_path / "x.pt")
    monkeypatch.setenv("COMPOSER_TRUST_CHECKPOINT", "1")
    load_file(tmp_path / "x.pt", trusted=True)
    assert hash_file(tmp_path / "x.pt", "blake3") in caplog.text
    with pytest.raises(UnsafeCheckpointError, match="PickleError"):
        load_file(tmp_path / "x.pt")


def rebuilt_tensor(numel, size, stride, offset=0, key="0"):
    """A pickle of one float32 tensor with a geometry of one's own."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, {})

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", torch.FloatStorage, key, "cpu", numel) if isinstance(obj, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({"w": Tensor()})
    return buffer.getvalue()


GEOMETRIES = {
    "stride 0 to a huge size": (4, (1 << 40,), (0,)),
    "overlapping rows of a huge size": (4, (1 << 30, 2), (0, 1)),
    "more elements than there are": (4, (5,), (1,)),
    "an offset past the end": (4, (2,), (1,), 3),
    "a negative size": (4, (-1,), (1,)),
    "a negative stride": (4, (2,), (-1,)),
    "a size of 2**63": (4, (1 << 63,), (0,)),
    "a product beyond 2**64": (4, (1 << 40, 1 << 40), (0, 0)),
    "many dims": (4, (1,) * 100, (1,) * 100),
    "fewer strides than sizes": (4, (2, 2), (1,)),
    "more bytes than the file has": (1 << 50, (1 << 50,), (1,)),
    "a storage of negative size": (-4, (1,), (1,)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_tensor_that_does_not_fit_its_bytes_is_refused(tmp_path, name):
    path = tmp_path / "x.pt"
    buffer = io.BytesIO(as_zip(rebuilt_tensor(*GEOMETRIES[name])))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("archive/data/0", bytes(16))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(CorruptCheckpointError, match=r"Load another checkpoint|save it with"):
        load_file(path)


def test_a_small_expanded_tensor_of_torch_loads(tmp_path):
    torch.save({"mask": torch.ones(1, 1, 8).expand(4, 8, 8)}, tmp_path / "x.pt")
    assert torch.equal(load_file(tmp_path / "x.pt")["mask"], torch.ones(4, 8, 8))


def test_a_storage_that_the_file_lacks_is_named(tmp_path):
    (tmp_path / "x.pt").write_bytes(as_zip(rebuilt_tensor(4, (4,), (1,), key="../../etc/passwd")))
    with pytest.raises(CorruptCheckpointError, match=r"w needs 16 bytes of float32, and the file has none"):
        load_file(tmp_path / "x.pt")


def test_a_program_of_torchscript_is_refused(tmp_path):
    buffer = io.BytesIO(as_zip(pickle.dumps({}, protocol=2)))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("archive/constants.pkl", b"\x80\x02).")
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(UnsafeCheckpointError, match="TorchScript"):
        load_file(tmp_path / "x.pt")


@pytest.mark.parametrize("what", ["compressed member", "doubled member", "fake end in the comment", "other folder"])
def test_a_zip_that_readers_could_read_differently_is_refused(tmp_path, what):
    buffer = io.BytesIO(as_zip(pickle.dumps({}, protocol=2)))
    with zipfile.ZipFile(buffer, "a") as archive:
        if what == "compressed member":
            archive.writestr("archive/data/0", bytes(1000), compress_type=zipfile.ZIP_DEFLATED)
        elif what == "doubled member":
            archive.writestr("archive/DATA.pkl", call(os.system, "true"))
        elif what == "fake end in the comment":
            archive.comment = b"PK\x05\x06" + bytes(18)
        else:
            archive.writestr("second/data.pkl", b"\x80\x02).")
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CorruptCheckpointError):
        load_file(tmp_path / "x.pt")


def test_a_dict_whose_method_is_hidden_by_an_attribute_is_refused(tmp_path):
    state = collections.OrderedDict(w=torch.ones(2))
    state.items = set
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CorruptCheckpointError, match="a dict has no attributes"):
        load_file(tmp_path / "x.pt")


def test_endless_nesting_takes_no_endless_time(tmp_path):
    deep = []
    for _ in range(100):
        deep = [deep, deep]  # 2**100 paths lead to the innermost
    torch.save({"x": deep}, tmp_path / "x.pt")
    assert load_file(tmp_path / "x.pt")["x"][0] is not None
    loop = []
    loop.append(loop)
    torch.save(loop, tmp_path / "y.pt")
    assert isinstance(load_file(tmp_path / "y.pt")[0], list)


def named(name):
    module, _, name = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


REBUILDING = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor", "_rebuild_parameter")
CHANGED_NAMES = [
    "torch.FloatStorage",
    "torch.float32",
    "torch.storage.UntypedStorage",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    "torch.torch_version.TorchVersion",
    "collections.OrderedDict",
    "collections.Counter",
    *(f"torch._utils.{name}" for name in REBUILDING),
]
# Attributes as a dict, as slots and as fields in order: of functions, of classes, of our descriptions of a dtype.
OTHER_ATTRIBUTES = b"".join(
    pickle.dumps(name, protocol=2)[2:-3] + value
    for name, value in [("__defaults__", b")"), ("__new__", b"K\x01"), ("name", b"K\x01"), ("item_bytes", b"K\x01")]
)
OTHER_STATES = {
    "dict": b"}(" + OTHER_ATTRIBUTES + b"u",
    "slots": b"N}(" + OTHER_ATTRIBUTES + b"u\x86",
    "fields": b"](X\x07\x00\x00\x00float32K\x01e",
}


@pytest.mark.parametrize("carrier", ["x.pt", "legacy.pt"])
@pytest.mark.parametrize("state", OTHER_STATES)
@pytest.mark.parametrize("name", CHANGED_NAMES)
def test_a_refused_file_has_changed_nothing_for_the_next(tmp_path, name, state, carrier):
    good = {"w": torch.nn.Parameter(torch.arange(8.0)), "o": collections.OrderedDict(a=torch.ones(2, dtype=torch.int8))}
    save_file(good, tmp_path / "good.pt")
    described = inspect_file(tmp_path / "good.pt")
    (tmp_path / carrier).write_bytes(CARRIERS[carrier](b"\x80\x02" + named(name) + OTHER_STATES[state] + b"b."))
    for open_file in (load_file, verify, inspect_file):
        with pytest.raises(CheckpointError):
            open_file(tmp_path / carrier)
    found = load_file(tmp_path / "good.pt")
    assert torch.equal(found["w"], good["w"])
    assert torch.equal(found["o"]["a"], good["o"]["a"])
    assert inspect_file(tmp_path / "good.pt") == described


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_carrier_can_copy_its_largest_part_thousands_of_times(tmp_path, carrier):
    text = b"X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
    encode = named("_codecs.encode") + b"q\x02X\x06\x00\x00\x00latin1q\x03](" + b"h\x02h\x01h\x03\x86R" * 6000
    (tmp_path / carrier).write_bytes(CARRIERS[carrier](b"\x80\x02" + text + b"q\x01" + encode + b"e."))
    with pytest.raises(CorruptCheckpointError, match="use up the memory"):
        load_file(tmp_path / carrier)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_carrier_can_nest_deeper_than_is_read(tmp_path, carrier):
    data = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    (tmp_path / carrier).write_bytes(CARRIERS[carrier](data))
    with pytest.raises(CorruptCheckpointError, match="levels deep"):
        load_file(tmp_path / carrier)


def test_a_tree_that_unfolds_to_endless_is_saved_and_loaded_with_what_had_to_be_turned_into_something_else(tmp_path):
    tree = {"when": datetime.timedelta(3)}
    for _ in range(60):
        tree = {"one": tree, "other": tree}
    save_file(tree, tmp_path / "x.pt")
    found = load_file(tmp_path / "x.pt")
    for _ in range(60):
        found = found["other"]
    assert found == {"when": datetime.timedelta(3)}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_carrier_takes_endless_time_over_keys(tmp_path, carrier):
    doubled = b")q\x00" + b"".join(b"0h" + bytes([n, ord("h"), n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    (tmp_path / carrier).write_bytes(CARRIERS[carrier](b"\x80\x02}" + doubled + b"Ns."))
    for call in (load_file, verify):
        with pytest.raises(CorruptCheckpointError, match="endless time"):
            call(tmp_path / carrier)


def test_no_message_is_as_long_as_what_the_file_holds(tmp_path):
    save_file({"w" * 1_000_000: torch.ones(64)}, tmp_path / "x.pt")
    whole = bytearray((tmp_path / "x.pt").read_bytes())
    whole[whole.index(torch.ones(64).numpy().tobytes())] ^= 1
    (tmp_path / "x.pt").write_bytes(whole)
    with pytest.raises(CorruptCheckpointError, match="are not those that were written") as refusal:
        load_file(tmp_path / "x.pt")
    assert len(str(refusal.value)) < 11_000


def test_names_are_not_repeated_until_memory_is_full(tmp_path):
    key = b"X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
    data = b"\x80\x02](" + key + b"q\x010" + b"}h\x01}s" * 2000 + b"e."
    (tmp_path / "x.pkl").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="has names of no checkpoint"):
        load_file(tmp_path / "x.pkl")


def test_a_file_that_asks_for_countless_classes_makes_none_of_them(tmp_path):
    data = b"\x80\x02](" + b"".join(named(f"a.b{number}") for number in range(2000)) + b"e."
    (tmp_path / "x.pt").write_bytes(as_zip(data))
    with pytest.raises(UnsafeCheckpointError, match="more than 1000 functions and classes"):
        inspect_file(tmp_path / "x.pt")
