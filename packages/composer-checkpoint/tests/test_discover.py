import errno
import json
import os

import pytest

from composer_checkpoint.commit import replace_pointer, write_atomically
from composer_checkpoint.errors import CorruptCheckpointError, NewerCheckpointError, StorageError
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.save_folder import find_newest


def write(path, batch=None, *, whole=True, mtime=None):
    """A checkpoint of one file, or a folder where the name has no suffix, with its time in a manifest beside it."""
    folder = not path.suffix
    manifest = path / MANIFEST_NAME if folder else path.with_name(path.name + ".manifest.json")
    (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
    (path / "__0_0.distcp" if folder else path).write_text("whole" if whole else "torn")
    if batch is not None:
        info = {"timestamp": {"batch": batch, "epoch": 0}}
        manifest.write_text(json.dumps({"format_version": 1, "hash_name": "blake3", "info": info}))
    if mtime is not None:
        os.utime(path, (mtime, mtime))
    return path


def must_be_whole(path):
    if (path / "__0_0.distcp" if path.is_dir() else path).read_text() != "whole":
        raise CorruptCheckpointError(f"{path} is torn")


def find(where):
    return find_newest(where, verify=must_be_whole)


def test_the_one_that_was_trained_longest_is_the_newest_whatever_the_clock_says(tmp_path):
    write(tmp_path / "a.data", 10, mtime=3000)
    write(tmp_path / "b.data", 30, mtime=1000)
    write(tmp_path / "c.data", 20, mtime=2000)
    found = find(tmp_path)
    assert found.path == tmp_path / "b.data"
    assert found.info["timestamp"]["batch"] == 30
    assert found.skipped == ()


def test_names_say_how_far_training_had_come_where_there_is_no_manifest(tmp_path):
    write(tmp_path / "ep1-ba9-rank0.tar", mtime=3000)
    write(tmp_path / "ep2-ba10-rank0.tar", mtime=1000)
    assert find(tmp_path).path.name == "ep2-ba10-rank0.tar"


def test_the_clock_decides_where_nothing_else_does(tmp_path):
    write(tmp_path / "old.tar", mtime=1000)
    write(tmp_path / "new.tar", mtime=2000)
    assert find(tmp_path).path.name == "new.tar"


def test_folders_and_files_compete(tmp_path):
    write(tmp_path / "ep0-ba10", 10)
    write(tmp_path / "ep0-ba20", 20)
    write(tmp_path / "ep0-ba15.data", 15)
    assert find(tmp_path).path.name == "ep0-ba20"


def test_what_is_torn_is_skipped_newest_first_and_said_why(tmp_path, caplog):
    write(tmp_path / "a.data", 10)
    write(tmp_path / "b.data", 20, whole=False)
    write(tmp_path / "c", 30, whole=False)
    found = find(tmp_path)
    assert found.path.name == "a.data"
    assert [(skip.path.name, skip.reason) for skip in found.skipped] == [
        ("c", f"{tmp_path / 'c'} is torn"),
        ("b.data", f"{tmp_path / 'b.data'} is torn"),
    ]
    assert f"Skipped {tmp_path / 'c'}: {tmp_path / 'c'} is torn" in caplog.text


def test_there_is_none_where_all_are_torn_or_nothing_exists(tmp_path, caplog):
    assert find(tmp_path) is None
    assert find(tmp_path / "missing") is None
    write(tmp_path / "a.data", 10, whole=False)
    assert find(tmp_path) is None
    assert "None of the 1 checkpoints" in caplog.text


def test_a_newer_format_is_no_reason_to_go_on_with_an_older_checkpoint(tmp_path):
    write(tmp_path / "ep0-ba10", 10)
    newer = write(tmp_path / "ep0-ba20", 20)
    (newer / MANIFEST_NAME).write_text(json.dumps({"format_version": 99, "hash_name": "blake3"}))
    with pytest.raises(NewerCheckpointError, match="version 99"):
        find_newest(tmp_path, verify=read_its_manifest)


def read_its_manifest(folder):
    Manifest.from_json((folder / MANIFEST_NAME).read_bytes())


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_fails_is_no_reason_to_go_on_with_an_older_checkpoint(tmp_path, number):
    write(tmp_path / "ep0-ba10", 10)

    def fail(path):
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError, match="would lose work") as failure:
        find_newest(tmp_path, verify=fail)
    assert failure.value.errno == number


def test_what_has_no_manifest_counts_only_where_nothing_has_one(tmp_path):
    write(tmp_path / "ep0-ba20")
    assert find(tmp_path).path.name == "ep0-ba20"
    write(tmp_path / "ep0-ba10", 10)
    found = find(tmp_path)
    assert found.path.name == "ep0-ba10"
    assert [(skip.path.name, "no manifest" in skip.reason) for skip in found.skipped] == [("ep0-ba20", True)]


def test_a_pointer_to_an_older_one_does_not_hide_the_newest(tmp_path):
    write(tmp_path / "a.data", 10)
    write(tmp_path / "b.data", 20)
    replace_pointer(tmp_path / "latest-rank0.pt", tmp_path / "a.data")
    assert find(tmp_path).path.name == "b.data"


def test_a_pointer_to_nothing_is_said_and_the_newest_is_found(tmp_path):
    write(tmp_path / "a.data", 10)
    replace_pointer(tmp_path / "latest-rank0.pt", tmp_path / "gone.pt")
    found = find(tmp_path)
    assert found.path.name == "a.data"
    assert [(skip.path.name, "does not exist" in skip.reason) for skip in found.skipped] == [("latest-rank0.pt", True)]


def test_a_pointer_may_lead_to_another_folder(tmp_path):
    write(tmp_path / "elsewhere" / "a.data", 10)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").symlink_to("../elsewhere/a.data")
    assert find(tmp_path / "run").path == tmp_path / "elsewhere" / "a.data"


def test_a_circle_of_links_is_no_checkpoint(tmp_path):
    (tmp_path / "latest.pt").symlink_to("other.pt")
    (tmp_path / "other.pt").symlink_to("latest.pt")
    assert find(tmp_path) is None


def test_what_is_being_written_is_no_candidate(tmp_path):
    write(tmp_path / "a.data", 10)
    with write_atomically(tmp_path / "b", folder=True) as unfinished:
        write(unfinished / "inside", 20)
        (unfinished / ".metadata").touch()
        found = find(tmp_path)
        assert (found.path.name, found.skipped) == ("a.data", ())


def test_a_folder_that_was_moved_aside_when_its_writer_died_is_still_found(tmp_path):
    write(tmp_path / "ep0-ba20", 20).rename(tmp_path / "ep0-ba20.old-0badcafe-17-1234-01234567")
    write(tmp_path / "ep0-ba10", 10)
    assert find(tmp_path).info["timestamp"]["batch"] == 20


def test_folders_below_and_patterns_are_looked_through(tmp_path):
    write(tmp_path / "seed1" / "ep1" / "x-rank0.data", 10)
    write(tmp_path / "seed1" / "ep1" / "x-rank1.data", 30)
    write(tmp_path / "seed2" / "ep1" / "x-rank0.data", 20)
    assert find(tmp_path).path.name == "x-rank1.data"
    assert find(tmp_path / "**" / "*-rank0.data").path == tmp_path / "seed2" / "ep1" / "x-rank0.data"


def test_a_name_without_a_suffix_is_a_checkpoint_s_if_it_says_the_time(tmp_path):
    (tmp_path / "ep1-ba10-rank0").write_text("whole")
    (tmp_path / "notes").write_text("whole")
    assert find(tmp_path).path.name == "ep1-ba10-rank0"


def test_other_files_are_no_candidates(tmp_path):
    for name in ("notes.txt", "metrics.json", "latest.pt.symlink", ".hidden.pt", "x.manifest.json", "x.ptx"):
        (tmp_path / name).write_text("whole")
    found = find(tmp_path)
    assert found is None


def test_a_manifest_that_cannot_be_read_is_left_to_the_verification(tmp_path):
    write(tmp_path / "ep0-ba10.data", 10)
    path = write(tmp_path / "ep0-ba20.data", 20)
    path.with_name(path.name + ".manifest.json").write_text("{")
    assert find(tmp_path).path == path  # by its name it is the newest, and here only the content is looked at


@pytest.mark.parametrize("timestamp", [None, 3, "later", {}, {"batch": "x"}, {"Timestamp": {"batch": 40}}])
def test_any_information_about_the_time_is_survived(tmp_path, timestamp):
    write(tmp_path / "a.data", 10)
    path = write(tmp_path / "b.data")
    manifest = {"format_version": 1, "hash_name": "blake3", "info": {"timestamp": timestamp}}
    path.with_name("b.data.manifest.json").write_text(json.dumps(manifest))
    assert find(tmp_path).path.name == (
        "b.data" if isinstance(timestamp, dict) and "Timestamp" in timestamp else "a.data"
    )


def test_by_default_each_byte_is_compared_with_the_manifest(tmp_path):
    import torch

    from composer_checkpoint.files import save_file

    for batch in (10, 20):
        save_file(
            {"weight": torch.full((100,), float(batch))},
            tmp_path / f"ba{batch}.pt",
            info={"timestamp": {"batch": batch}},
        )
    damaged = bytearray((tmp_path / "ba20.pt").read_bytes())
    place = bytes(damaged).index(torch.full((100,), 20.0).numpy().tobytes())
    damaged[place] ^= 1
    (tmp_path / "ba20.pt").write_bytes(damaged)
    found = find_newest(tmp_path)
    assert found.path.name == "ba10.pt"
    assert [skip.path.name for skip in found.skipped] == ["ba20.pt"]
