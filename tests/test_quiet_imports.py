"""No module of ours does more at import than define names, and the program that checks it hears one that does."""

import subprocess
import sys

import pytest

LOUD = {
    "socket": "import socket\nsocket.socket().close()\n",
    "process": "import subprocess\nsubprocess.run(['true'])\n",
    "thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "environment": "import os\nos.environ['PLUM'] = '1'\n",
    "signal": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
    "logging": "import logging\nlogging.basicConfig()\n",
    "function": "import os\ndef set_plum():\n    os.environ['PLUM'] = '1'\nset_plum()\n",
}


@pytest.fixture
def import_quietly(root, tmp_path):
    """Return a function that imports packages, those in `tmp_path` among them, and returns the status and the text."""

    def run(*names):
        program = [sys.executable, str(root / "tests/alone/quiet_imports.py"), *names]
        done = subprocess.run(program, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_importing_every_module_does_nothing_but_define_names(import_quietly, root):
    packages = sorted(folder.parent.name for folder in root.glob("*/*/src/*/__init__.py"))
    assert len(packages) == 11
    status, said = import_quietly(*packages)
    assert status == 0, said


@pytest.mark.parametrize("body", LOUD.values(), ids=LOUD)
def test_a_module_that_does_more_is_heard(import_quietly, tmp_path, body):
    write(tmp_path, "plum", {"__init__": "", "loud": body})
    status, said = import_quietly("plum")
    assert status == 1, said


def test_what_a_library_does_is_its_own_affair(import_quietly, tmp_path):
    write(tmp_path, "library", {"__init__": LOUD["process"]})
    write(tmp_path, "plum", {"__init__": "", "quiet": "import library\n"})
    assert import_quietly("plum") == (0, "2 modules were imported quietly.\n")


def test_a_module_whose_extra_is_missing_says_what_to_install(import_quietly, tmp_path):
    write(tmp_path, "plum", {"__init__": "", "says": "raise ImportError(\"run `pip install 'plum[pit]'`\")\n"})
    assert import_quietly("plum") == (0, "1 modules were imported quietly.\n")
    write(tmp_path, "pear", {"__init__": "", "silent": "import plum.pit\n"})
    status, said = import_quietly("pear")
    assert status == 1
    assert "No module named 'plum.pit'" in said


def test_a_private_module_may_leave_that_to_who_imports_it(import_quietly, tmp_path):
    write(tmp_path, "plum", {"__init__": "", "_with_pit": "import pit\n"})
    assert import_quietly("plum") == (0, "1 modules were imported quietly.\n")


def write(folder, package, modules):
    (folder / package).mkdir()
    for name, body in modules.items():
        (folder / package / f"{name}.py").write_text(body)
