import importlib.util
import os
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from composer_checkpoint.errors import CorruptCheckpointError, StorageError
from composer_checkpoint.remote.fetch import create_symlink_file, extract_path_from_symlink, get_file
from composer_checkpoint.stores import FsspecObjectStore, ObjectStoreTransientError

WEIGHTS = bytes(range(256)) * 1000


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(
        sys.modules["composer_checkpoint.stores.base"], "time", SimpleNamespace(sleep=lambda seconds: None)
    )


@pytest.fixture
def store(tmp_path):
    made = FsspecObjectStore(f"memory://{uuid.uuid4().hex}")

    def put(name, content):
        made.filesystem.pipe_file(f"{made.uri.removeprefix('memory://')}/{name}", content)

    made.put = put
    put("run/ep1.pt", WEIGHTS)
    return made


@pytest.fixture
def web():
    """A server on loopback that answers each path with what was put there, in turn."""
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            pending = answers.get(self.path, [404])
            answer = pending.pop(0) if len(pending) > 1 else pending[0]
            if isinstance(answer, int):
                self.send_error(answer)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(WEIGHTS)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", answers=answers)
        server.shutdown()
        thread.join()


def get(path, destination, **options):
    get_file(path, destination, progress_bar=False, **options)
    return destination.read_bytes()


def test_a_local_file_becomes_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(WEIGHTS)
    assert get("x.pt", tmp_path / "deep" / "link") == WEIGHTS
    assert os.readlink(tmp_path / "deep" / "link") == str(tmp_path / "x.pt")


def test_a_local_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Local path .*gone does not exist"):
        get_file(tmp_path / "gone", tmp_path / "x")


def test_a_local_link_replaces_only_if_asked(tmp_path):
    (tmp_path / "x").write_text("new")
    (tmp_path / "y").write_text("old")
    with pytest.raises(FileExistsError):
        get_file(tmp_path / "x", tmp_path / "y")
    assert get(tmp_path / "x", tmp_path / "y", overwrite=True) == b"new"


@pytest.mark.parametrize("installed", [True, False])
def test_a_progress_bar_is_shown_where_there_is_one(store, tmp_path, capsys, monkeypatch, installed):
    if not installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    elif importlib.util.find_spec("tqdm") is None:
        pytest.skip("tqdm is not installed")
    get_file("run/ep1.pt", tmp_path / "x", object_store=store)
    assert ("Downloading run/ep1.pt" in capsys.readouterr().err) == installed


def test_an_address_and_a_name_in_a_store_lead_to_the_same_file(store, tmp_path):
    assert get(f"{store.uri}/run/ep1.pt", tmp_path / "a") == WEIGHTS
    assert get("run/ep1.pt", tmp_path / "b", object_store=store) == WEIGHTS
    assert get(f"{store.uri}/run/ep1.pt", tmp_path / "c", object_store=store) == WEIGHTS


def test_a_logger_that_can_download_is_a_store_too(tmp_path):
    class Destination:
        def download_file(self, remote_file_name, destination, overwrite, progress_bar):
            with open(destination, "xb") as file:
                file.write(remote_file_name.encode())

    assert get("run/x", tmp_path / "x", object_store=Destination()) == b"run/x"


def test_what_cannot_download_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"object_store=3 cannot download"):
        get_file("run/x.pt", tmp_path / "x.pt", 3)


def test_pointers_are_followed_also_through_others_and_when_only_they_exist(store, tmp_path):
    store.put("run/latest.pt.symlink", b"run/ep1.pt")
    store.put("newest.symlink", f"{store.uri}/run/latest.pt.symlink".encode())
    for number, name in enumerate(["run/latest.pt.symlink", "run/latest.pt", "newest.symlink", "newest"]):
        assert get(name, tmp_path / str(number), object_store=store) == WEIGHTS
    assert extract_path_from_symlink("run/latest.pt.symlink", store) == "run/ep1.pt"


def test_what_is_not_there_is_named_as_it_was_asked_for(store, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run/gone\.pt does not exist"):
        get("run/gone.pt", tmp_path / "x", object_store=store)
    store.put("broken.symlink", b"run/gone.pt")
    with pytest.raises(FileNotFoundError):
        get("broken", tmp_path / "x", object_store=store)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x95\x1d\x00\x00\x00",
        b"",
        b"a\nb",
        b"x" * 5000,
        b"../../etc/passwd",
        b"cos\nsystem\n(S'id'\ntR.",
        b"\xff",
    ],
    ids=["pickle", "empty", "lines", "long", "escape", "old pickle", "not text"],
)
def test_a_pointer_that_is_none_is_refused(store, tmp_path, content):
    store.put("latest.symlink", content)
    with pytest.raises(CorruptCheckpointError, match=r"pointer|leads out"):
        get("latest.symlink", tmp_path / "x", object_store=store)
    assert list(tmp_path.iterdir()) == []


def test_a_circle_of_pointers_ends(store, tmp_path):
    store.put("a.symlink", b"b.symlink")
    store.put("b.symlink", b"a.symlink")
    with pytest.raises(CorruptCheckpointError, match="in a circle"):
        get("a.symlink", tmp_path / "x", object_store=store)


def test_a_pointer_file_ends_in_symlink_and_is_not_replaced(tmp_path):
    create_symlink_file("run/ep1.pt", tmp_path / "latest.symlink")
    assert (tmp_path / "latest.symlink").read_text() == "run/ep1.pt"
    with pytest.raises(FileExistsError):
        create_symlink_file("run/ep2.pt", tmp_path / "latest.symlink")
    with pytest.raises(ValueError, match="must end in"):
        create_symlink_file("run/ep1.pt", tmp_path / "latest")
    (tmp_path / "link").symlink_to("target")
    assert extract_path_from_symlink(tmp_path / "link") == "target"


def test_a_file_comes_from_the_web_whole(web, tmp_path):
    web.answers["/x.pt"] = [WEIGHTS]
    assert get(f"{web.url}/x.pt", tmp_path / "deep" / "x.pt") == WEIGHTS
    with pytest.raises(FileExistsError):
        get(f"{web.url}/x.pt", tmp_path / "deep" / "x.pt")
    assert get(f"{web.url}/x.pt", tmp_path / "deep" / "x.pt", overwrite=True) == WEIGHTS


def test_what_the_web_does_not_have_is_not_found(web, tmp_path):
    with pytest.raises(FileNotFoundError, match="404"):
        get(f"{web.url}/gone", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_the_web_refuses_is_said(web, tmp_path):
    web.answers["/x.pt"] = [403]
    with pytest.raises(StorageError, match="403"):
        get(f"{web.url}/x.pt", tmp_path / "x")


@pytest.mark.parametrize("fault", [429, 500, 503, WEIGHTS[:1000], b""], ids=["429", "500", "503", "cut", "nothing"])
def test_what_passes_on_the_web_is_tried_again_and_what_does_not_is_an_error(web, tmp_path, fault):
    web.answers["/x.pt"] = [fault, fault, WEIGHTS]
    assert get(f"{web.url}/x.pt", tmp_path / "x") == WEIGHTS
    web.answers["/x.pt"] = [fault]
    with pytest.raises(ObjectStoreTransientError):
        get(f"{web.url}/x.pt", tmp_path / "y")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_server_that_is_not_there_is_an_error_that_may_pass(tmp_path):
    with pytest.raises(ObjectStoreTransientError, match="refused"):
        get("http://127.0.0.1:9/x", tmp_path / "x")
