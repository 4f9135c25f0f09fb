"""What the tests that cross packages share."""

import asyncio
import http.client
import importlib.util
import os
import shutil
import socket
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent

collect_ignore_glob = ["alone/*", "hangs/*_script.py"]  # programs, which a search for docstring examples would run

# Launchers of one test would clean up what another one, in another worker, has killed on purpose.
os.environ["COMPOSER_KEEP_SHARED_MEMORY"] = "1"
# Runs of the launcher leave a folder where they are started, which here is the repository.
os.environ["COMPOSER_RUNS"] = ""


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tool():
    """Load one of the programs in tools/, which are no package."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def s3_server():
    """Return where a server listens that speaks S3."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield SimpleNamespace(url=f"http://{host}:{port}", host=host, port=port)
    moto.stop()


@pytest.fixture
def s3_bucket(s3_server, monkeypatch):
    """Return the name of a new bucket of the server, which this process is told to use."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "S3_ENDPOINT_URL": s3_server.url,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("S3_CANNED_ACL", raising=False)
    name = f"bucket-{uuid.uuid4().hex}"
    connection = http.client.HTTPConnection(s3_server.host, s3_server.port, timeout=30)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()
    return name


class Gateway:
    """Forwards requests to the server, unless its `fault` says otherwise for a method and a path.

    A fault is a status to answer; `'reset'`, to hang up in the middle of the request; `'late'`, to hang up after the
    server has done what was asked; `'cut'`, to hang up in the middle of the answer.
    """

    def __init__(self, server):
        self.server, self.fault, self.seen = server, lambda method, path: None, []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                path = self.path.partition("?")[0]
                gateway.seen.append((self.command, path.rpartition("/")[2]))
                fault = gateway.fault(self.command, path)
                if fault == "reset":
                    self.rfile.read(min(1000, int(self.headers.get("Content-Length", 0))))
                    self.hang_up()
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if isinstance(fault, int):
                    self.answer(fault, b"<Error><Code>Fault</Code><Message>bad day</Message></Error>", {})
                    return
                connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                reply = connection.getresponse()
                content = reply.read()
                connection.close()
                if fault == "late":
                    self.hang_up()
                elif fault == "cut":
                    self.answer(reply.status, content[: len(content) // 2], dict(reply.getheaders()))
                    self.hang_up()
                else:
                    self.answer(reply.status, content, dict(reply.getheaders()))

            def answer(self, status, content, headers):
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date", "content-length"):
                        self.send_header(name, value)
                if not any(name.lower() == "content-length" for name in headers):
                    headers = {"Content-Length": str(len(content))}
                self.send_header("Content-Length", next(v for k, v in headers.items() if k.lower() == "content-length"))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def hang_up(self):
                self.close_connection = True
                # No lingering: the client sees a reset and not an end.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                self.connection.close()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                pass  # a connection that was hung up on

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def gateway(s3_server):
    """Return a server in front of the one that speaks S3, which fails as it is told."""
    made = Gateway(s3_server)
    yield made
    made.close()


class SFTPServer:
    """An SFTP server over a folder, in a thread of its own."""

    def __init__(self, folder):
        import asyncssh  # slow to load, as are the other servers

        self.folder = folder / "remote"
        self.folder.mkdir()
        self.user_key = asyncssh.generate_private_key("ssh-ed25519")
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.key_file, self.known_hosts = folder / "key", folder / "known_hosts"
        self.user_key.write_private_key(self.key_file)
        self.connections = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.acceptor = self.run(self._listen())
        self.port = self.acceptor.get_port()
        public = self.host_key.export_public_key().decode().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public[0]} {public[1]}\n")

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=60)

    async def _listen(self):
        import asyncssh

        server = self

        class Login(asyncssh.SSHServer):
            def connection_made(self, connection):
                server.connections.append(connection)

            def begin_auth(self, username):
                return True

            def password_auth_supported(self):
                return True

            def validate_password(self, username, password):
                return (username, password) == ("me", "se:cret/")

            def public_key_auth_supported(self):
                return True

            def validate_public_key(self, username, key):
                return username == "me" and key == server.user_key.convert_to_public()

        root = str(self.folder).encode()
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Login,
            server_host_keys=[self.host_key],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=root),
        )

    def hang_up(self):
        """Break all connections, as a network does."""
        self.loop.call_soon_threadsafe(lambda: [connection.abort() for connection in self.connections])

    def close(self):
        async def stop():
            self.acceptor.close()
            await self.acceptor.wait_closed()
            for connection in self.connections:
                connection.abort()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="session")
def sftp_machine(tmp_path_factory):
    """Return a machine that is reached over SFTP."""
    made = SFTPServer(tmp_path_factory.mktemp("sftp"))
    yield made
    made.close()


@pytest.fixture
def sftp_server(sftp_machine, monkeypatch):
    """Return that machine with an empty folder, trusted by this process."""
    for path in sftp_machine.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setenv("COMPOSER_SFTP_KNOWN_HOSTS_FILE", str(sftp_machine.known_hosts))
    monkeypatch.setenv("COMPOSER_SFTP_KEY_FILE", str(sftp_machine.key_file))
    return sftp_machine
