"""What a run says of its machine and versions, when it is asked to or when it ends in an exception."""

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

import composer.utils.collect_env as collect_env
from composer.utils import configure_excepthook, disable_env_report, enable_env_report, print_env

# The true description takes seconds.
QUICK = "import composer.utils.collect_env as env\nenv.describe_environment = lambda: 'THE MACHINE'\n"


def end_with(code):
    return subprocess.run([sys.executable, "-c", QUICK + code], capture_output=True, text=True)


def test_the_description_is_printed_where_one_wants_it(monkeypatch, capsys):
    monkeypatch.setattr(collect_env, "describe_environment", lambda: "THE MACHINE")
    file = io.StringIO()

    print_env(file)
    print_env()

    assert file.getvalue() == capsys.readouterr().out == "THE MACHINE\n"


def test_the_description_has_versions_processor_and_what_pytorch_says(monkeypatch):
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "PyTorch version: 2")

    described = collect_env.describe_environment()

    own, _, of_torch = described.partition("\n\n")
    assert own.startswith("Composer\ncomposer-")
    assert "\ncomposer-suite: " in own
    assert "\ncpu_model: " in own
    assert of_torch == "PyTorch\nPyTorch version: 2"


def test_an_exception_that_ends_the_process_is_followed_by_the_description():
    ended = end_with("env.configure_excepthook(); env.configure_excepthook()\nraise ValueError('It is late.')")

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("Traceback ")
    assert ended.stderr.endswith("ValueError: It is late.\nTHE MACHINE\n")
    assert ended.stderr.count("THE MACHINE") == 1


INSTALL = "import sys\nbefore = sys.excepthook\ndef hook(*raised):\n    print('HOOK', file=sys.stderr)\n"


def test_an_exception_is_reported_once_around_a_hook_that_somebody_else_installed_meanwhile():
    others = INSTALL + "sys.excepthook = hook\n"
    configure = "env.configure_excepthook()\n"

    ended = end_with(f"{configure}{others}{configure}raise ValueError('It is late.')")

    assert ended.stderr.startswith("HOOK\n")
    assert [ended.stderr.count(text) for text in ("HOOK", "THE MACHINE", "Traceback ")] == [1, 1, 0]


def test_a_hook_that_fails_itself_keeps_no_later_report_away(monkeypatch, capsys):
    def fails_once(kind, error, trace):
        monkeypatch.setattr(hook, "_before", lambda *raised: None)
        raise OSError("closed")

    monkeypatch.setattr(sys, "excepthook", fails_once)
    monkeypatch.setattr(collect_env, "describe_environment", lambda: "THE MACHINE")
    configure_excepthook()
    hook = sys.excepthook
    with pytest.raises(OSError, match="closed"):
        sys.excepthook(ValueError, ValueError(), None)
    sys.excepthook(ValueError, ValueError(), None)
    assert capsys.readouterr().err == "THE MACHINE\n"


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("raise ValueError", "ValueError\n"),
        ("env.configure_excepthook(); env.disable_env_report()\nraise ValueError", "ValueError\n"),
        ("env.configure_excepthook()\nraise KeyboardInterrupt", "KeyboardInterrupt\n"),
        ("env.configure_excepthook()\nraise SystemExit('done')", "done\n"),
    ],
    ids=["not asked for", "switched off", "Ctrl-C", "an exit"],
)
def test_other_ends_bring_no_description(code, last):
    ended = end_with(code)

    assert "THE MACHINE" not in ended.stderr
    assert ended.stderr.endswith(last)


def test_reports_are_switched_on_again(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *raised: shown.append(raised))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(collect_env, "describe_environment", lambda: "THE MACHINE")
    error = ValueError()
    configure_excepthook()

    disable_env_report()
    sys.excepthook(ValueError, error, None)
    without = sys.stderr.getvalue()
    enable_env_report()
    sys.excepthook(ValueError, error, None)

    assert shown == [(ValueError, error, None)] * 2
    assert without == ""
    assert sys.stderr.getvalue() == "THE MACHINE\n"


def test_in_ipython_each_exception_of_a_cell_is_followed_by_the_description(monkeypatch, capsys):
    class Shell:
        def set_custom_exc(self, kinds, handler):
            self.kinds, self.handler = kinds, handler

        def showtraceback(self, raised, tb_offset):
            sys.stderr.write(f"{raised[1]!r} {tb_offset}\n")

    shell, before = Shell(), sys.excepthook
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(collect_env, "describe_environment", lambda: "THE MACHINE")

    configure_excepthook()
    shell.handler(shell, ValueError, ValueError("late"), None, tb_offset=1)

    assert shell.kinds == (Exception,)
    assert capsys.readouterr().err == "ValueError('late') 1\nTHE MACHINE\n"
    assert sys.excepthook is before
