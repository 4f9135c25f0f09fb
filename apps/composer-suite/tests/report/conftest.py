"""A real browser for the tests of the page: Chromium without a window, spoken to through its DevTools."""

import json
import os
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

BOUND_S = 120


class Browser:
    """One page of a Chromium, by the DevTools protocol over a pair of pipes."""

    def __init__(self, folder):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        command = [CHROMIUM, *flags, f"--user-data-dir={folder}", "--window-size=1400,1000", "about:blank"]

        def pass_pipes():  # Chromium reads from descriptor 3 and writes to 4
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=pass_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Do something and return its result; what happens meanwhile goes to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def look(self, *, width=1400, scheme="light"):
        """Set the width of the window, and whether the user prefers a light or a dark page."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path):
        """Open a file and wait until the page says that it is ready."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait_until("document.body?.dataset.ready")

    def run(self, script):
        """Return the value of a script, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, condition):
        """Wait for what the page does in its own time, however slow the machine is; not for ever."""
        is_so = self.run(
            f"new Promise(done => {{ const end = Date.now() + {1000 * BOUND_S}; const look = () =>"
            f"  {condition} ? done(true) : Date.now() > end ? done(false) : setTimeout(look, 20); look(); }})"
        )
        assert is_so, condition

    def complaints(self):
        """Return what went wrong in the page, and the addresses that it asked for beyond its own file."""
        bad = [
            event
            for event in self.events
            if event.get("method") == "Runtime.exceptionThrown"
            or (event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"))
            or (event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error")
        ]
        asked = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return bad, [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]

    def close(self):
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _next(self):
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt install chromium)")
    page = Browser(tmp_path / "browser")
    yield page
    page.close()
