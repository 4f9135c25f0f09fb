"""A destination of the log that keeps files in a store."""

import re
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.remote.logger import (
    RemoteUploaderDownloader,
    maybe_create_remote_uploader_downloader_from_uri,
)
from composer_checkpoint.remote.publish import SYMLINK_SUFFIX
from composer_checkpoint.stores import FsspecObjectStore, LibcloudObjectStore
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_events import Engine, Event, Logger, State


class Unreliable(MemoryFileSystem):
    """A store in memory that resets connections while `resets_left` is above zero, and that a test may hold up."""

    protocol = "unreliable"
    cachable = False
    resets_left = 0
    may_go_on = threading.Event()

    def put_file(self, lpath, rpath, **kwargs):
        assert type(self).may_go_on.wait(60)
        if type(self).resets_left > 0 and ".credentials" not in rpath:
            type(self).resets_left -= 1
            raise ConnectionResetError("the store hung up")
        super().put_file(lpath, rpath, **kwargs)


@pytest.fixture
def unreliable(monkeypatch):
    monkeypatch.setattr(Unreliable, "resets_left", 0)
    monkeypatch.setattr(Unreliable, "may_go_on", threading.Event())
    Unreliable.may_go_on.set()
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    yield f"unreliable://{uuid.uuid4().hex}"
    Unreliable.may_go_on.set()


@pytest.fixture
def bucket():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def start():
    """Begin a run whose log goes to a destination; it is closed when the test ends."""
    engines = []

    def begin(destination, run_name="plum"):
        state = State(
            None,
            rank_zero_seed=1,
            run_name=run_name,
            device="cpu",
            dataloader=[],
            max_duration="1ep",
            callbacks=[destination],
        )
        engine = Engine(state, Logger(state, destination))
        engine.run_event(Event.INIT)
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("notes")
    return path


def run_until_raised(engine, event):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        engine.run_event(event)
        time.sleep(0.01)


def content(uri):
    with fsspec.open(uri, "r") as opened:
        return opened.read()


def test_a_file_that_was_handed_over_may_change_and_is_there_when_training_ends(start, bucket, file):
    engine = start(RemoteUploaderDownloader(bucket))
    engine.logger.upload_file("{run_name}/notes.txt", file)
    file.write_text("changed")
    engine.run_event(Event.FIT_END)
    assert content(f"{bucket}/plum/notes.txt") == "notes"


@pytest.mark.parametrize("event", [Event.FIT_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END])
def test_the_ends_wait_for_what_is_under_way(start, unreliable, file, event):
    engine = start(RemoteUploaderDownloader(unreliable))
    Unreliable.may_go_on.clear()
    engine.logger.upload_file("notes.txt", file)
    threading.Timer(0.2, Unreliable.may_go_on.set).start()
    engine.run_event(event)
    assert content(f"{unreliable}/notes.txt") == "notes"


def test_files_have_the_names_that_the_format_gives_them_in_both_directions(start, bucket, file, tmp_path):
    keeper = RemoteUploaderDownloader(f"{bucket}/team", file_path_format_string="/{run_name}/{rank}/{remote_file_name}")
    engine = start(keeper)
    engine.logger.upload_file("deep/notes.txt", file)
    engine.run_event(Event.FIT_END)
    assert content(f"{bucket}/team/plum/0/deep/notes.txt") == "notes"
    assert keeper.get_uri_for_file("deep/notes.txt") == f"{bucket}/team/plum/0/deep/notes.txt"
    keeper.download_file("deep/notes.txt", str(tmp_path / "copy"), progress_bar=False)
    assert (tmp_path / "copy").read_text() == "notes"
    with pytest.raises(FileExistsError):
        keeper.download_file("deep/notes.txt", str(tmp_path / "copy"), progress_bar=False)
    with pytest.raises(FileNotFoundError):
        keeper.download_file("missing", str(tmp_path / "other"), progress_bar=False)


@pytest.mark.parametrize("name", ["latest", "latest.symlink"])
@pytest.mark.parametrize("format_string", ["{remote_file_name}", "x/{remote_file_name}"])
def test_a_pointer_leads_to_its_file(start, bucket, file, tmp_path, name, format_string):
    engine = start(RemoteUploaderDownloader(bucket, file_path_format_string=format_string))
    engine.logger.upload_file("ep1.pt", file)
    (tmp_path / "pointer").write_text("ep1.pt")
    engine.logger.upload_file("latest" + SYMLINK_SUFFIX, tmp_path / "pointer")
    engine.run_event(Event.FIT_END)
    get_file(name, tmp_path / "copy", engine.logger.destinations[0], progress_bar=False)
    assert (tmp_path / "copy").read_text() == "notes"


def test_of_many_files_for_one_name_that_wait_the_newest_is_sent(start, unreliable, file, tmp_path):
    engine = start(RemoteUploaderDownloader(unreliable, upload_staging_folder=str(tmp_path / "staging")))
    Unreliable.may_go_on.clear()
    for number in range(10):
        file.write_text(str(number))
        engine.logger.upload_file("log.txt", file, overwrite=True)
    copies = [path for path in (tmp_path / "staging").rglob("*") if path.is_file()]
    assert len(copies) <= 2  # the one that is under way and the newest
    Unreliable.may_go_on.set()
    engine.run_event(Event.FIT_END)
    assert content(f"{unreliable}/log.txt") == "9"


def test_a_name_that_waits_is_refused_without_overwrite(start, unreliable, file):
    engine = start(RemoteUploaderDownloader(unreliable))
    Unreliable.may_go_on.clear()
    engine.logger.upload_file("log.txt", file)
    with pytest.raises(FileExistsError, match=r"Object log.txt was already enqueued.*overwrite=False"):
        engine.logger.upload_file("log.txt", file)
    Unreliable.may_go_on.set()


@pytest.mark.filterwarnings("ignore:The following objects:RuntimeWarning")
@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EPOCH_END, Event.FIT_END])
def test_an_object_that_exists_is_an_error_at_the_next_event(start, bucket, file, event):
    engine = start(RemoteUploaderDownloader(bucket))
    engine.logger.upload_file("log.txt", file)
    engine.run_event(Event.FIT_END)
    engine.logger.upload_file("log.txt", file)
    with pytest.raises(FileExistsError, match=r"log.txt already exists, but overwrite was set to False"):
        run_until_raised(engine, event)


def test_what_may_pass_is_tried_again(start, unreliable, file):
    engine = start(RemoteUploaderDownloader(unreliable, num_attempts=2))
    Unreliable.resets_left = 1
    engine.logger.upload_file("log.txt", file)
    engine.run_event(Event.FIT_END)
    assert content(f"{unreliable}/log.txt") == "notes"


def test_what_does_not_pass_is_raised_and_what_is_left_is_named_when_the_run_is_closed(start, unreliable, file):
    engine = start(RemoteUploaderDownloader(unreliable, num_attempts=1))
    Unreliable.resets_left = 1000
    engine.logger.upload_file("a.txt", file)
    with pytest.raises(Exception, match="the store hung up"):
        engine.run_event(Event.FIT_END)
    engine.logger.upload_file("b.txt", file)
    with pytest.warns(RuntimeWarning, match=r"may not have been uploaded, likely due to a worker crash: a.txt, b.txt"):
        engine.close()


def test_files_that_others_hand_over_while_they_close_are_uploaded(start, bucket, file):
    keeper = RemoteUploaderDownloader(bucket)
    engine = start(keeper)
    engine.logger.upload_file("last.txt", file)
    engine.close()
    assert content(f"{bucket}/last.txt") == "notes"
    start(keeper, "pear").logger.upload_file("next.txt", file)  # and it can be used again


def test_it_serves_one_run_at_a_time(start, bucket):
    keeper = RemoteUploaderDownloader(bucket)
    start(keeper)
    with pytest.raises(RuntimeError, match="in use by the run 'plum'"):
        keeper.init(SimpleNamespace(run_name="pear"), None)


def test_copies_wait_in_the_folder_that_was_asked_for(start, unreliable, file, tmp_path):
    engine = start(RemoteUploaderDownloader(unreliable, upload_staging_folder=str(tmp_path / "staging")))
    Unreliable.may_go_on.clear()
    engine.logger.upload_file("log.txt", file)
    assert [path.read_text() for path in (tmp_path / "staging").rglob("*") if path.is_file()] == ["notes"]
    Unreliable.may_go_on.set()
    engine.close()
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("use_procs", [False, True])
def test_the_arguments_of_the_store_are_passed_on(start, file, tmp_path, use_procs):
    keeper = RemoteUploaderDownloader(
        "libcloud://box",
        backend_kwargs={"provider": "local", "container": "box", "provider_kwargs": {"key": str(tmp_path / "remote")}},
        use_procs=use_procs,
    )
    start(keeper).logger.upload_file("log.txt", file)
    keeper.post_close()
    assert (tmp_path / "remote" / "box" / "log.txt").read_text() == "notes"
    assert isinstance(keeper.remote_backend, LibcloudObjectStore)


@pytest.mark.parametrize("arguments", [{"num_concurrent_uploads": 0}, {"num_attempts": 0}])
def test_a_count_of_nothing_is_refused(bucket, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        RemoteUploaderDownloader(bucket, **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_uri", 5),
        ("backend_kwargs", [("region", "here")]),
        ("file_path_format_string", 5),
        ("num_concurrent_uploads", "2"),
        ("upload_staging_folder", 5),
        ("use_procs", "no"),
        ("num_attempts", 1.5),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_at_once(bucket, name, value):
    with pytest.raises(TypeError, match=rf"{name}={re.escape(repr(value))} .*(Pass|must be)"):
        RemoteUploaderDownloader(**{"bucket_uri": bucket, name: value})


def test_a_local_path_is_refused_and_an_unknown_scheme_when_it_is_needed():
    with pytest.raises(ValueError, match="is a local path"):
        RemoteUploaderDownloader("some/folder")
    keeper = RemoteUploaderDownloader("nowhere://bucket")
    with pytest.raises(ValueError, match="nowhere"):
        _ = keeper.remote_backend


def test_the_name_of_the_run_is_needed_where_the_format_has_it(bucket, tmp_path):
    keeper = RemoteUploaderDownloader(bucket, file_path_format_string="{run_name}/{remote_file_name}")
    with pytest.raises(RuntimeError, match="needs the name of the run"):
        keeper.download_file("x", str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("uri", "bucket_uri", "backend_kwargs"),
    [
        ("s3://box/a/b", "s3://box", {"bucket": "box"}),
        ("gs://box/a", "gs://box", {"bucket": "box"}),
        ("oci://box@space/a", "oci://box@space", {"bucket": "box"}),
        ("memory://box/a", "memory://box", {}),
        (
            "azure://box/a",
            "libcloud://box",
            {
                "provider": "AZURE_BLOBS",
                "container": "box",
                "key_environ": "AZURE_ACCOUNT_NAME",
                "secret_environ": "AZURE_ACCOUNT_ACCESS_KEY",
            },
        ),
        ("dbfs:/Volumes/a/b/c/d", "dbfs:/Volumes/a/b/c/d", {"path": "Volumes/a/b/c/d"}),
    ],
)
def test_a_destination_is_made_for_the_bucket_of_an_address(uri, bucket_uri, backend_kwargs):
    made = maybe_create_remote_uploader_downloader_from_uri(uri, [])
    assert made.bucket_uri == bucket_uri
    assert made.backend_kwargs == backend_kwargs
    with pytest.warns(UserWarning, match="There already exists a RemoteUploaderDownloader object to handle"):
        assert maybe_create_remote_uploader_downloader_from_uri(uri, [made]) is None


def test_a_local_path_needs_no_destination_and_some_schemes_cannot_have_one():
    assert maybe_create_remote_uploader_downloader_from_uri("/a/b", []) is None
    for uri in ("wandb://entity/project", "nowhere://box"):
        with pytest.raises(NotImplementedError):
            maybe_create_remote_uploader_downloader_from_uri(uri, [])


def fail_on_rank_one(remote, event):
    keeper = RemoteUploaderDownloader(remote)
    state = State(
        None, rank_zero_seed=1, run_name="plum", device="cpu", dataloader=[], max_duration="1ep", callbacks=[keeper]
    )
    engine = Engine(state, Logger(state, keeper))
    engine.run_event(Event.INIT)
    file = Path(f"{remote.removeprefix('file://')}.{dist.get_global_rank()}")
    file.write_text("x")
    if dist.get_global_rank() == 1:
        engine.logger.upload_file("x", file)
    engine.run_event(Event.FIT_END)
    if dist.get_global_rank() == 1:
        engine.logger.upload_file("x", file)
    try:
        run_until_raised(engine, event)
    except FileExistsError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("event", [Event.EPOCH_END, Event.FIT_END])
def test_an_upload_that_failed_on_one_rank_is_an_error_on_all(tmp_path, event):
    first, second = run_ranks(fail_on_rank_one, (tmp_path / "remote").as_uri(), event, store=tmp_path / "store")
    assert first == second
    assert "already exists, but overwrite was set to False" in first


def test_only_rank_zero_writes_the_probe(start, bucket):
    start(RemoteUploaderDownloader(bucket, file_path_format_string="r/{remote_file_name}"))
    assert FsspecObjectStore(bucket).list_objects() == ["r/.credentials_validated_successfully"]
