"""Description of the environment for bug reports, on request or after an uncaught exception."""

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from types import TracebackType
from typing import Any, TextIO

from composer_events.arguments import loaded
from composer_events.hparams import get_composer_env_dict

__all__ = [
    "configure_excepthook",
    "describe_environment",
    "disable_env_report",
    "enable_env_report",
    "get_composer_env_dict",
    "main",
    "print_env",
]


def describe_environment() -> str:
    """Return the versions of the installed packages of this family, and PyTorch's description of the environment.

    It runs system tools (`nvidia-smi`, `lscpu`, `pip`), which takes a few seconds.
    """
    from torch.utils.collect_env import get_pretty_env_info  # imports torch, which installing the hook does not need

    installed = {distribution.name: distribution.version for distribution in distributions()}
    own = [f"{name}: {version}" for name, version in sorted(installed.items()) if name.startswith("composer-")]
    machine = [f"{name}: {value}" for name, value in get_composer_env_dict().items() if value is not None]
    return "\n".join(["Composer", *own, *machine, "", "PyTorch", str(get_pretty_env_info())])


def print_env(file: TextIO | None = None) -> None:
    """Write the description of the environment.

    Args:
        file: Text stream, such as `sys.stderr`. Default: standard output.
    """
    print(describe_environment(), file=file)


def configure_excepthook() -> None:
    """Print the environment to standard error after each exception that ends the process.

    The exception itself is shown as before. In IPython and notebooks, the report follows each exception of a cell.
    Ctrl-C causes no report. A second call has no effect, unless another hook was installed in the meantime.
    """
    shell = _ipython()
    if shell is not None:
        shell.set_custom_exc((Exception,), _show_in_ipython)
    elif not isinstance(sys.excepthook, _ReportingHook):
        sys.excepthook = _ReportingHook(sys.excepthook)


def enable_env_report() -> None:
    """Enable the report of `configure_excepthook`, which is the default."""
    _ReportingHook.is_reporting = True


def disable_env_report() -> None:
    """Disable the report of `configure_excepthook`; exceptions are still shown."""
    _ReportingHook.is_reporting = False


def main() -> int:
    """Print the description, and return 0."""
    argparse.ArgumentParser(description="Print the description of the environment for a bug report.").parse_args()
    print_env()
    return 0


class _ReportingHook:
    """Hook that shows an exception with the previous hook, and then the environment."""

    is_reporting = True

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if self.is_reporting and isinstance(error, Exception):
            print_env(sys.stderr)


def _ipython() -> Any:
    ipython = loaded("IPython")  # not imported, so not running
    return None if ipython is None else ipython.get_ipython()


def _show_in_ipython(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
) -> None:
    def show(*raised: object) -> None:
        shell.showtraceback(raised, tb_offset=tb_offset)

    _ReportingHook(show)(kind, error, trace)


if __name__ == "__main__":
    sys.exit(main())
