"""Startup hook of a rank's interpreter that records uncaught exceptions, and stacks on request, for the launcher.

The launcher puts this folder on the rank's `PYTHONPATH`, so that an exception is recorded even if it precedes any code
of the script, as in an import. The folder is removed again at once: the rank and its children see the user's path.
Another `sitecustomize` that this one hides is run as well.

Every rank pays for this at startup, so `error_file` is loaded only after an error.
"""

import contextlib
import os
import sys
from types import TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Recorder:
    """An exception hook that writes the error file before the previous hook runs."""

    records_for_launcher = True  # read by `error_file.install`

    def __init__(self) -> None:
        self._following = sys.excepthook
        self._pid = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            # An exception of a forked child is not the end of the rank, and an interrupt is intended.
            if os.getpid() == self._pid and not issubclass(kind, KeyboardInterrupt):
                _record(error.with_traceback(trace))
        finally:
            self._following(kind, error, trace)  # even if recording fails


def _record(error: BaseException) -> None:
    """Write the error file with a module that the rank's interpreter need not have installed."""
    import importlib.util  # not at the top: only an error needs it

    path = os.path.join(_HERE, os.pardir, os.pardir, "error_file.py")
    spec = importlib.util.spec_from_file_location("_composer_error_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.record_exception(error)


def _write_stacks_on_request(path: str) -> None:
    """Make the launcher get the stacks of all threads, at a signal or a crash, unless the user has those of a crash."""
    import faulthandler  # built into Python
    import signal

    with contextlib.suppress(OSError, AttributeError, RuntimeError):  # such as on systems without the signal
        file = open(path, "ab")  # noqa: SIM115  # open as long as the process
        faulthandler.register(signal.SIGRTMIN + 8, file=file, all_threads=True)  # that of `launch/stacks.py`
        if not faulthandler.is_enabled():
            faulthandler.enable(file=file)


def _leave_the_path() -> None:
    """Remove this folder from the module search path, here and for child processes."""
    sys.path[:] = [folder for folder in sys.path if folder != _HERE]
    left = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder != _HERE]
    if any(left):
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    else:
        os.environ.pop("PYTHONPATH", None)


def _run_hidden() -> None:
    """Import the `sitecustomize` that this one hides."""
    own = sys.modules.pop("sitecustomize")  # otherwise the import would return this module
    try:
        import sitecustomize  # noqa: F401  # pyright: ignore
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":  # not when a tool imports this file under another name
    _leave_the_path()
    if os.environ.get("COMPOSER_ERROR_FILE"):
        sys.excepthook = _Recorder()
    if os.environ.get("COMPOSER_STACK_FILE"):
        _write_stacks_on_request(os.environ["COMPOSER_STACK_FILE"])
    _run_hidden()
