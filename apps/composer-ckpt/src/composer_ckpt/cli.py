"""The command `composer-ckpt`: what is in a checkpoint, whether it is whole, and turning it into another one.

Torch, and what needs it, is imported once the arguments are known to be right, so that help is there at once.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

from composer_ckpt.arguments import make_parser
from composer_ckpt.outcomes import ExitCode, Result
from composer_ckpt.printable import printable

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, an `ExitCode`."""
    options = make_parser().parse_args(arguments)
    try:
        with redirect_stdout(sys.stderr):  # libraries that print as they load would spoil the JSON
            run = getattr(import_module(options.module), options.function)
            result: Result = run(options)
    except KeyboardInterrupt:
        sys.stderr.write("composer-ckpt: interrupted; nothing was left under the final name\n")
        return 130
    except Exception as error:
        code = _code_of(error)
        if code is None:
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        sys.stderr.write(f"composer-ckpt: {printable(str(text))}\n")
        if getattr(options, "json", False):
            _print_json({"schema": 1, "error": {"kind": type(error).__name__, "message": str(text)}, "exit_code": code})
        return code
    if options.json:
        _print_json({"schema": 1, **result.data})
    else:
        _print(printable(result.text))
    return result.code


def _print_json(value: Any) -> None:
    _print(json.dumps(value, indent=2, default=str))


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # what a terminal cannot show is shown by its number
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough, and the interpreter shall not flush once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _code_of(error: Exception) -> int | None:
    """Return the exit code for an error that is told in its own words, `None` for one that is a fault of ours."""
    from composer_checkpoint import CheckpointError, UnsafeCheckpointError
    from composer_ckpt.outcomes import MismatchError, UsageError

    match error:
        case UnsafeCheckpointError():
            return ExitCode.UNSAFE
        case MismatchError():
            return ExitCode.MISMATCH
        case UsageError():
            return ExitCode.USAGE
        case CheckpointError() | OSError() | ValueError() | TypeError() | ImportError():
            return ExitCode.FAILURE
        case _:
            return None
