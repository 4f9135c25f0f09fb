"""Stores that have no server here: how they are addressed, and what is said when credentials are missing.

Hugging Face's is a small server on this machine that speaks its protocol.
"""

import base64
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from composer_checkpoint.remote.logger import maybe_create_remote_uploader_downloader_from_uri
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.stores import AzureObjectStore, FsspecObjectStore, GCSObjectStore, OCIObjectStore
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri
from composer_events import Logger, State

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """A user without any credentials, on a machine in no cloud."""
    for name in ("GCS_KEY", "GCS_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "OCI_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))


def test_google_without_credentials_names_what_to_set():
    with pytest.raises(ValueError, match="GCS_KEY and GCS_SECRET"):
        GCSObjectStore("bucket")


def test_google_s_emulator_needs_no_credentials(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    assert GCSObjectStore("bucket", "prefix/").get_uri("x") == "gs://bucket/prefix/x"


def test_oracle_without_credentials_names_what_to_set(monkeypatch):
    with pytest.raises(ValueError, match="OCI_CONFIG_FILE"):
        maybe_create_object_store_from_uri("oci://bucket@namespace/x")
    monkeypatch.setenv("OCI_CONFIG_FILE", "/no/such/file")
    with pytest.raises(ValueError, match="'/no/such/file' is not a file"):
        OCIObjectStore("bucket")


@pytest.mark.parametrize("scheme", ["azure", "az"])
def test_azure_without_credentials_names_what_to_set(scheme, monkeypatch):
    """Seen before: "unable to connect to account for Must provide either a connection_string or account_name"."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"az://box.* needs credentials.*AZURE_STORAGE_CONNECTION_STRING"):
        maybe_create_object_store_from_uri(f"{scheme}://box/x")


def test_azure_s_account_comes_from_the_variables_that_composer_names(monkeypatch):
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "someone")
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "c2VjcmV0")
    store = maybe_create_object_store_from_uri("azure://box/x")
    assert isinstance(store, AzureObjectStore)
    assert store.get_uri("x") == "az://box/x"
    assert (store.filesystem.account_name, store.filesystem.account_key) == ("someone", "c2VjcmV0")


def test_a_repository_of_hugging_face_is_a_store():
    store = maybe_create_object_store_from_uri("hf://someone/model/ep1.pt")
    assert isinstance(store, FsspecObjectStore)
    assert store.get_uri("model/ep1.pt") == "hf://someone/model/ep1.pt"


class Hub(BaseHTTPRequestHandler):
    """Has the repository someone/model, and no other."""

    files: dict[str, bytes]

    def log_message(self, *_):
        pass

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def listed(self, below=""):
        files = {name: content for name, content in self.files.items() if name.startswith(below)}
        return [{"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40} for name in files]

    def do_GET(self):
        if not self.path.startswith("/api/models/someone/model"):
            return self.answer({"error": "Repository not found"}, 404)
        if "/tree/" in self.path:
            return self.answer(self.listed())
        return self.answer({"id": "someone/model", "sha": "a" * 40, "siblings": [], "private": False})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.startswith("/api/models/someone/model"):
            return self.answer({"error": "Repository not found"}, 404)
        if "/paths-info/" in self.path:
            return self.answer(self.listed())
        if "/preupload/" in self.path:
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            return self.answer({"files": [{k: v for k, v in file.items() if k != "sample"} for file in files]})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer(
            {"commitOid": "a" * 40, "commitUrl": f"http://{self.headers['Host']}/someone/model/commit/{'a' * 40}"}
        )


@pytest.fixture
def hub(monkeypatch):
    handler = type("OneHub", (Hub,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.constants.ENDPOINT"):
        monkeypatch.setattr(name, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_run_saves_into_a_repository_of_hugging_face(hub, tmp_path):
    (tmp_path / "ep1.pt").write_bytes(b"weights")
    uploader = RemoteUploader("hf://someone/model/run")
    uploader.init()
    uploader.upload_file_async("model/run/ep1.pt", tmp_path / "ep1.pt", overwrite=True)
    uploader.wait_and_close()
    assert set(hub.files) == {".credentials_validated_successfully", "run/ep1.pt"}
    assert hub.files["run/ep1.pt"] == b"weights"


def test_a_logger_for_a_repository_of_hugging_face_finds_that_it_can_write(hub):
    sender = maybe_create_remote_uploader_downloader_from_uri("hf://someone/model/traces", [])
    state = State(None, 0, "run", "cpu")
    sender.init(state, Logger(state))
    sender.post_close()
    assert set(hub.files) == {".credentials_validated_successfully"}
