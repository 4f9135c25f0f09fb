"""What a rank's interpreter runs before the script: it installs the hook that writes the rank's error file.

The launcher puts this folder on the rank's `PYTHONPATH`, so that an exception is recorded also if it comes before
the script could have installed anything, as from an import. The folder is taken out again at once: the rank and what
it starts see the path that the user gave them. Another `sitecustomize` that this one hides is run as well.

Every rank waits for what is done here, so next to nothing is: `error_file` is loaded when there is an error.
"""

import os
import sys
from types import TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Recorder:
    """Records the exception that ends the process, and shows it as it would have been shown."""

    records_for_launcher = True  # `error_file.install` looks for this

    def __init__(self) -> None:
        self._following = sys.excepthook
        self._pid = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            # What a forked child raises is not the rank's end, and an interrupt is what somebody asked for.
            if os.getpid() == self._pid and not issubclass(kind, KeyboardInterrupt):
                _record(error.with_traceback(trace))
        finally:
            self._following(kind, error, trace)  # whatever becomes of the record


def _record(error: BaseException) -> None:
    """Write the error file with a module that the rank's interpreter need not have installed."""
    import importlib.util  # nobody else needs it here

    path = os.path.join(_HERE, os.pardir, os.pardir, "error_file.py")
    spec = importlib.util.spec_from_file_location("_composer_error_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.record_exception(error)


def _leave_the_path() -> None:
    """Take this folder out of the module search path, here and for processes that the rank starts."""
    sys.path[:] = [folder for folder in sys.path if folder != _HERE]
    left = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder != _HERE]
    if any(left):
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    else:
        os.environ.pop("PYTHONPATH", None)


def _run_hidden() -> None:
    """Import the `sitecustomize` that would have been imported without this one."""
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401  # pyright: ignore
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":  # and not where a tool only looks at this file
    _leave_the_path()
    if os.environ.get("COMPOSER_ERROR_FILE"):
        sys.excepthook = _Recorder()
    _run_hidden()
