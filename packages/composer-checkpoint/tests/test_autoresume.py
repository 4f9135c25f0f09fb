"""The checkpoint with which a run that was started again goes on."""

import errno
import logging
import os

import pytest
import torch

from composer_checkpoint import (
    CheckpointConflictError,
    CheckpointSaver,
    StorageError,
    checkpoint_to_resume,
    load_checkpoint,
)
from composer_checkpoint.stores import FsspecObjectStore


@pytest.fixture
def saved(loop, saver, tmp_path):
    """Save after each of four batches, and return the folder."""
    run = loop([saver("ba{batch}-rank{rank}.pt", save_interval="1ba")], max_duration="4ba")
    run.fit()
    run.engine.close()
    return tmp_path / "checkpoints"


def found(loop, checkpoints):
    run = loop([checkpoints])
    with checkpoint_to_resume(checkpoints, run.state, run.engine.logger) as path:
        return path


def resumed(loop, saver):
    path = found(loop, saver("ba{batch}-rank{rank}.pt", save_interval="1ba"))
    return None if path is None else os.path.basename(path)


def test_the_newest_checkpoint_is_resumed(loop, saver, saved):
    assert resumed(loop, saver) == "ba4-rank0.pt"


def test_an_empty_or_missing_folder_has_nothing_to_resume(loop, saver, tmp_path):
    assert resumed(loop, saver) is None
    (tmp_path / "checkpoints").mkdir()
    assert resumed(loop, saver) is None


def test_a_link_that_leads_to_an_older_checkpoint_decides_nothing(loop, saver, saved):
    os.unlink(saved / "latest-rank0.pt")
    os.symlink("ba2-rank0.pt", saved / "latest-rank0.pt")
    assert resumed(loop, saver) == "ba4-rank0.pt"


def test_a_link_that_leads_nowhere_or_is_missing_does_no_harm(loop, saver, saved):
    os.unlink(saved / "ba4-rank0.pt")
    assert resumed(loop, saver) == "ba3-rank0.pt"
    os.unlink(saved / "latest-rank0.pt")
    assert resumed(loop, saver) == "ba3-rank0.pt"


def test_damaged_checkpoints_are_skipped_and_named_with_the_reason(loop, saver, saved, caplog):
    (saved / "ba4-rank0.pt").write_bytes(b"")
    content = bytearray((saved / "ba3-rank0.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (saved / "ba3-rank0.pt").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert resumed(loop, saver) == "ba2-rank0.pt"
    assert "ba4-rank0.pt" in caplog.text
    assert "ba3-rank0.pt" in caplog.text


def test_no_run_begins_anew_where_checkpoints_are_that_cannot_be_used(loop, saver, saved):
    for path in saved.glob("ba*.pt"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointConflictError, match=r"(?s)4 checkpoints.*ba4-rank0.pt.*ba1.*save_overwrite=True"):
        resumed(loop, saver)


def test_a_disk_that_does_not_let_us_read_is_no_reason_to_begin_anew(loop, saver, saved, monkeypatch):
    real = os.listdir

    def refuse(path="."):
        if os.fspath(path) == os.fspath(saved):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(StorageError, match="cannot be looked through"):
        resumed(loop, saver)


def test_later_checkpoints_of_a_run_that_somebody_went_back_from_are_not_resumed(loop, saver, saved, caplog):
    run = loop([saver("ba{batch}-rank{rank}.pt", save_interval="1ba", overwrite=True)], max_duration="2ba")
    load_checkpoint(saved / "ba1-rank0.pt", run.state, run.engine.logger)
    run.fit()
    run.engine.close()
    assert resumed(loop, saver) == "ba2-rank0.pt"
    assert "a run that was abandoned" in caplog.text


def test_a_resumed_run_goes_on_with_the_checkpoints_of_the_one_before(loop, saver, saved):
    checkpoints = saver("ba{batch}-rank{rank}.pt", save_interval="1ba")
    run = loop([checkpoints], max_duration="6ba")
    with checkpoint_to_resume(checkpoints, run.state, run.engine.logger) as path:
        load_checkpoint(path, run.state, run.engine.logger)
    run.fit()
    run.engine.close()
    os.unlink(saved / "latest-rank0.pt")
    os.symlink("ba3-rank0.pt", saved / "latest-rank0.pt")  # as if killed before the link moved
    assert resumed(loop, saver) == "ba6-rank0.pt"


def test_what_is_no_checkpoint_of_training_is_not_resumed(loop, saver, saved):
    torch.save({"x": 1}, saved / "ba9-rank0.pt")
    assert resumed(loop, saver) == "ba4-rank0.pt"
    for path in saved.glob("ba[1-4]-*"):
        path.unlink()
    with pytest.raises(CheckpointConflictError, match="has no 'state'"):
        resumed(loop, saver)


def test_other_files_in_the_folder_are_not_resumed(loop, saver, saved):
    torch.save({"weight": torch.ones(1)}, saved / "pretrained-ba9.pt")
    (saved / "ba9-rank0.pt.tmp-unfinished").touch()
    assert resumed(loop, saver) == "ba4-rank0.pt"


def test_checkpoints_of_weights_alone_are_not_resumed(loop, saver):
    first = loop([saver("ba{batch}-rank{rank}.pt", save_interval="1ba", weights_only=True)], max_duration="2ba")
    first.fit()
    first.engine.close()
    with pytest.raises(CheckpointConflictError, match="weights only"):
        resumed(loop, saver)


def test_a_run_with_another_file_name_follows_the_link(loop, saver, saved):
    assert os.path.basename(found(loop, saver("epoch{epoch}.pt"))) == "ba4-rank0.pt"


def test_a_run_of_another_name_has_its_own_checkpoints(loop, tmp_path):
    def to(folder):
        return CheckpointSaver(str(tmp_path / "{run_name}"), "ba{batch}.pt", save_interval="1ba")

    first = loop([to(tmp_path)], max_duration="2ba")
    first.fit()
    first.engine.close()
    assert os.path.basename(found(loop, to(tmp_path))) == "ba2.pt"
    run = loop([checkpoints := to(tmp_path)])
    run.state.run_name = "pear"
    with checkpoint_to_resume(checkpoints, run.state, run.engine.logger) as path:
        assert path is None


def remote(bucket):
    return CheckpointSaver(
        f"memory://{bucket}/run", "ba{batch}.pt", "run/ba{batch}.pt", "latest.pt", "run/latest.pt", "1ba"
    )


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (None, 3),
        ("run/latest.pt.symlink", 3),  # without a pointer
        ("run/ba3.pt", 2),  # the pointer leads to what is damaged
    ],
)
def test_a_remote_folder_is_looked_through_when_nothing_is_here(loop, tmp_path, damage, expected):
    bucket = f"resume-{expected}-{damage is None}-{'symlink' in str(damage)}"
    first = loop([remote(bucket)], max_duration="3ba")
    first.fit()
    first.engine.close()
    store = FsspecObjectStore(f"memory://{bucket}")
    if damage is not None:
        (tmp_path / "damaged").write_bytes(b"cut short")
        store.upload_object(damage, str(tmp_path / "damaged"))
    checkpoints = remote(bucket)
    run = loop([checkpoints])
    with checkpoint_to_resume(checkpoints, run.state, run.engine.logger) as path:
        load_checkpoint(path, run.state, run.engine.logger)
    assert run.state.timestamp.batch == expected
    assert not os.path.exists(path)


def test_a_resumed_run_replaces_what_is_damaged_in_the_store(loop, tmp_path):
    first = loop([remote("replaced")], max_duration="3ba")
    first.fit()
    first.engine.close()
    store = FsspecObjectStore("memory://replaced")
    (tmp_path / "damaged").write_bytes(b"cut short")
    store.upload_object("run/ba3.pt", str(tmp_path / "damaged"))
    checkpoints = remote("replaced")
    run = loop([checkpoints], max_duration="3ba", num_batches=3)
    with checkpoint_to_resume(checkpoints, run.state, run.engine.logger) as path:
        load_checkpoint(path, run.state, run.engine.logger)
    run.fit()
    assert store.get_object_size("run/ba3.pt") > 100
