"""What is converted is published to a Hub: a small server on this machine that speaks its protocol."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM

from composer_checkpoint import save_file


class Hub(BaseHTTPRequestHandler):
    """Has one repository at most, as plain files by their names."""

    files: dict[str, bytes]
    created: dict | None
    damages = False

    def log_message(self, *_):
        pass

    def answer(self, value, status=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        hub = type(self)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        host = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            if hub.created is not None:
                return self.answer({"error": "You already created this repo", "url": f"{host}/me/plum"}, 409)
            hub.created = json.loads(body)
            return self.answer({"url": f"{host}/me/plum", "name": "me/plum"})
        if "/preupload/" in self.path:
            listed = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": listed})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        if hub.damages:
            hub.files["model.safetensors"] = hub.files["model.safetensors"][:-1] + b"?"
        return self.answer({"commitOid": "a" * 40, "commitUrl": f"{host}/me/plum/commit/{'a' * 40}"})

    def do_GET(self):
        name = self.path.rpartition("/")[2].partition("?")[0]
        return self.answer(type(self).files[name], ETag=f'"{name}"', X_Repo_Commit="a" * 40)

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch):
    handler = type("OneHub", (Hub,), {"files": {}, "created": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"  # as HF_ENDPOINT says it before huggingface_hub is loaded
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def saved(make_model, checkpoint_of, tmp_path):
    model = make_model("gpt2")
    save_file(checkpoint_of(model), tmp_path / "ep1.pt")
    return model, tmp_path / "ep1.pt"


def test_a_folder_is_published_whole_and_loads_from_there(saved, hub, ckpt, tmp_path):
    model, path = saved
    more = ["--push-to-hub", "me/plum", "--private", "--test-uploaded-model"]
    code, told = ckpt("convert", path, tmp_path / "out", *more)
    assert code == 0, told
    assert any("/me/plum/commit/" in note for note in told["warnings"])
    assert hub.created["name"] == "plum"
    assert hub.created.get("private") or hub.created.get("visibility") == "private"
    (tmp_path / "from-hub").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "from-hub" / name).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "from-hub")
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())


def test_a_repository_that_is_there_stays_unless_it_may_be_replaced(saved, hub, ckpt, tmp_path):
    _, path = saved
    hub.created = {}
    code, told = ckpt("convert", path, tmp_path / "out", "--hf_repo_for_upload", "me/plum")
    assert code == 1
    assert "already" in told["error"]["message"]
    assert not hub.files
    assert ckpt("convert", path, tmp_path / "out", "--hf_repo_for_upload", "me/plum", "--overwrite")[0] == 0
    assert {"config.json", "model.safetensors"} <= hub.files.keys()


def test_what_has_not_arrived_as_it_was_sent_is_told(saved, hub, ckpt, tmp_path):
    _, path = saved
    hub.damages = True
    more = ["--push-to-hub", "me/plum", "--test_uploaded_model"]
    code, told = ckpt("convert", path, tmp_path / "out", *more)
    assert code == 3, told
    assert "model.safetensors" in told["error"]["message"]


def test_options_for_the_hub_need_a_folder_and_a_repository(saved, ckpt, tmp_path):
    _, path = saved
    assert ckpt("convert", path, tmp_path / "out.pt", "--push-to-hub", "me/plum")[0] == 2
    code, told = ckpt("convert", path, tmp_path / "out", "--private")
    assert code == 2
    assert "--push-to-hub" in told["error"]["message"]
