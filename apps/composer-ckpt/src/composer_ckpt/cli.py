"""The command `composer-ckpt`: inspect, verify and convert checkpoints.

Torch and its dependents are imported only after the arguments are parsed, so that help is printed at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import version
from typing import Any

from composer_ckpt.output import ExitCode, Result, parse_size, printable

__all__ = ["make_parser", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, an `ExitCode`."""
    options = make_parser().parse_args(arguments)
    try:
        with redirect_stdout(sys.stderr):  # libraries that print on import would corrupt the JSON
            run = getattr(import_module(options.module), options.function)
            result: Result = run(options)
    except KeyboardInterrupt:
        sys.stderr.write("composer-ckpt: interrupted; nothing was left under the final name\n")
        return 130  # as a shell reports a process that SIGINT killed
    except Exception as error:
        code = _code_of(error)
        if code is None:
            raise
        # `str` of a KeyError is the repr of its message.
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
    encoding = sys.stdout.encoding or "utf-8"  # characters that the terminal lacks are escaped
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # from `| head`; the interpreter would fail again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _code_of(error: Exception) -> int | None:
    """Return the exit code for an expected error, `None` for a bug, which gets a traceback."""
    from composer_checkpoint import CheckpointError, UnsafeCheckpointError
    from composer_ckpt.output import MismatchError, UsageError

    # Specific errors first: the last case matches their base classes.
    match error:
        case UnsafeCheckpointError():
            return ExitCode.UNSAFE
        case MismatchError():
            return ExitCode.MISMATCH
        case UsageError() | NotImplementedError():  # the latter for addresses of stores that do not exist
            return ExitCode.USAGE
        case CheckpointError() | OSError() | ValueError() | TypeError() | ImportError():
            return ExitCode.FAILURE
        case _:
            return None


_PRECISIONS = ("keep", "fp32", "fp16", "bf16")
_KINDS = ("auto", "composer", "pt", "safetensors", "dcp", "local", "deepspeed", "hf", "modular")
_EPILOG = """\
exit codes:
  0  all is well; for diff, the two are equal
  1  a failure, a damaged checkpoint, or differences
  2  the arguments are wrong
  3  the written checkpoint differs from the source, and was deleted
  4  the checkpoint contains more than data; none of its code was run
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; its result names the `module` and the `function` that run the command."""
    parser = argparse.ArgumentParser(
        prog="composer-ckpt",
        description="Inspect, verify and convert checkpoints. Files are opened without running any code in them, and "
        "read tensor by tensor, of any size.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"composer-ckpt {version('composer-ckpt')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)
    converting = (_add_convert, _add_merge, _add_reshard, _add_extract)
    for add in (_add_inspect, _add_verify, _add_diff, *converting, _add_latest_and_repair):
        add(commands)
    return parser


class _Command(argparse.ArgumentParser):
    """Parser that accepts options anywhere, also between paths, which argparse rejects by default."""

    _is_mixing = False

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # its overloads say the same
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        if self._is_mixing:  # before Python 3.13, `parse_known_intermixed_args` calls this method again
            return super().parse_known_args(args, namespace)
        self._is_mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_mixing = False


def _command(
    commands: Any, name: str, module: str, function: str, text: str, aliases: Sequence[str] = ()
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, aliases=aliases, help=text, description=text[0].upper() + text[1:] + ".", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.set_defaults(module=f"composer_ckpt.{module}", function=function)
    command.add_argument("--json", action="store_true", help="print JSON, of the schema that the README describes")
    return command


def _add_inspect(commands: Any) -> None:
    command = _command(commands, "inspect", "inspect", "inspect", "show the content of a checkpoint as a tree")
    _add_source(command)
    command.add_argument("--keys", metavar="GLOB", action="append", help="only tensors of such names; repeatable")
    command.add_argument("--tree", action="store_true", help="show all tensors, however many there are")
    command.add_argument("--stats", action="store_true", help="read the tensors: min, max, mean and NaN of each")


def _add_verify(commands: Any) -> None:
    command = _command(commands, "verify", "inspect", "verify", "check whether a checkpoint is complete and undamaged")
    _add_source(command)
    command.add_argument("--hash", action="store_true", help="print a hash of each tensor, the same for all formats")


def _add_diff(commands: Any) -> None:
    command = _command(commands, "diff", "inspect", "diff", "compare two checkpoints, of any formats")
    command.add_argument("a", metavar="A", help="one checkpoint")
    command.add_argument("b", metavar="B", help="the other")
    command.add_argument("--rtol", type=float, default=0.0, help="allowed difference of values, relative to B's")
    command.add_argument("--atol", type=float, default=0.0, help="allowed absolute difference of values")
    command.add_argument("--keys", metavar="GLOB", action="append", help="only tensors of such names; repeatable")
    command.add_argument("--all", action="store_true", help="compare all tensors, not only the model's weights")
    command.add_argument("--most", type=int, default=10, help="number of differences to print (default: 10)")
    _add_stores(command)


def _add_convert(commands: Any) -> None:
    command = _command(commands, "convert", "convert", "convert", "convert a checkpoint to another format")
    command.add_argument("source", metavar="SRC", nargs="?", help="a checkpoint of any format")
    command.add_argument("target", metavar="DST", nargs="?", help="the folder or file to write")
    _add_kind(command)
    add = command.add_argument
    add("--composer_path", "--composer-path", dest="old_source", help=argparse.SUPPRESS)
    add("--hf_output_path", "--hf-output-path", dest="old_target", help=argparse.SUPPRESS)
    add("--local_checkpoint_save_location", "--local-checkpoint-save-location", help=argparse.SUPPRESS)
    add("--hf_repo_for_upload", "--hf-repo-for-upload", dest="push_to_hub", help=argparse.SUPPRESS)
    _add_conversion(command)
    add(
        "--peft", choices=("auto", "adapter", "merge"), default="auto", help="write LoRA alone, or merged into its base"
    )
    add("--base-model", metavar="PATH", help="the base model of a LoRA, if the checkpoint does not have it")
    add("--optimizer", action="store_true", help="keep the optimizers' state (pt, dcp, local)")
    add("--resumption", action="store_true", help="keep timestamp, schedulers, RNG and so on (pt, dcp, local)")
    add("--deepspeed-weights", choices=("fp32", "16bit"), default="fp32", help="which of DeepSpeed's weights to read")
    add("--trust", action="store_true", help="load a .pt that contains more than data, which runs its code")
    add("--push-to-hub", metavar="REPO", help="publish the Hugging Face folder, too; --overwrite: also where REPO is")
    add("--private", action="store_true", help="make the repository private")
    add("--test-uploaded-model", action="store_true", help="download it again and compare")
    add("--test_uploaded_model", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    _add_writing(command)


def _add_conversion(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    formats = ("hf", "pt", "dcp", "local", "safetensors")
    add("--to", choices=formats, help="the format (default: from DST's name, else hf)")
    add("--world-size", type=_count, metavar="N", help="number of ranks (local, dcp)")
    add("--output-precision", choices=_PRECISIONS, default="keep", help="dtype of floating point tensors")
    add("--output_precision", choices=_PRECISIONS, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--max-shard-size", type=parse_size, metavar="SIZE", help="of a file in a hf folder, as 1GB (default: 5GB)")
    weights = ("safetensors", "bin")
    add("--format", choices=weights, default="safetensors", help="of the weight files in a Hugging Face folder")
    _add_selection(command)
    add("--rename", metavar="OLD=NEW", action="append", help="a regular expression and its replacement; repeatable")
    add("--strip-prefix", metavar="PREFIX", action="append", help="of names; repeatable (default: of known wrappers)")
    add("--config", metavar="PATH", help="a config.json, or a folder with one, in place of the checkpoint's")
    add("--tokenizer", metavar="PATH", help="a folder with a tokenizer's files, in place of the checkpoint's")
    add("--config-override", metavar="KEY=VALUE", action="append", help="a value of the config, as JSON; repeatable")
    add("--trust-remote-code", action="store_true", help="run and keep code of the checkpoint")
    add("--trust_remote_code", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--no-verify", action="store_true", help="neither compare SRC with its hashes nor read back the output")


def _add_merge(commands: Any) -> None:
    text = "average the weights of several checkpoints of one model"
    command = _command(commands, "merge", "convert", "merge", text, aliases=["average"])
    add = command.add_argument
    add("sources", metavar="SRC", nargs="+", help="checkpoints of one model; the first one describes it")
    add("target", metavar="DST", help="the folder or file to write")
    add("--weights", type=_shares, metavar="A,B,...", help="weight of each checkpoint (default: equal)")
    _add_kind(command)
    _add_conversion(command)
    _add_writing(command)


def _add_reshard(commands: Any) -> None:
    command = _command(commands, "reshard", "extract", "reshard", "split a checkpoint into other files of its format")
    add = command.add_argument
    add("source", metavar="SRC", help="the checkpoint")
    add("target", metavar="DST", help="the folder to write, or per-rank files with {rank} in the name")
    _add_kind(command)
    add("--world-size", type=_count, metavar="N", help="number of ranks (dcp, local)")
    add("--max-shard-size", type=parse_size, metavar="SIZE", help="of a file, such as 1GB (hf, safetensors)")
    _add_writing(command)


def _add_extract(commands: Any) -> None:
    command = _command(commands, "extract", "extract", "extract", "copy some tensors to a file of their own")
    command.add_argument("source", metavar="SRC", help="the checkpoint")
    command.add_argument("target", metavar="DST", help="a .safetensors or .pt file, or a .json with all but tensors")
    _add_kind(command)
    _add_selection(command)
    _add_writing(command)


def _add_latest_and_repair(commands: Any) -> None:
    """Add the commands for the folder that a run saves to."""
    command = _command(commands, "latest", "places", "latest", "print the newest complete checkpoint of a folder")
    command.add_argument("folder", metavar="FOLDER", help="where a run saves checkpoints")
    command.add_argument("--no-verify", action="store_true", help="neither read it nor compare it with its hashes")
    command = _command(commands, "repair", "extract", "repair", "repair links, and list or delete unfinished files")
    add = command.add_argument
    add("folder", metavar="FOLDER", help="where a run saves checkpoints; no run may be active")
    add("--link", metavar="NAME", help="point this link to the newest complete checkpoint")
    add("--delete", action="store_true", help="delete unfinished files of killed writers")
    add("--dry-run", action="store_true", help="print what would be done, and do nothing")


def _add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="SRC", help="a file, a folder, a link, or per-rank files with {rank} in it")
    _add_kind(command)
    _add_stores(command)


def _add_kind(command: argparse.ArgumentParser) -> None:
    command.add_argument("--from", dest="kind", choices=_KINDS, default="auto", help="kind of SRC (default: detect it)")


def _add_selection(command: argparse.ArgumentParser) -> None:
    command.add_argument("--include", metavar="GLOB", action="append", help="only tensors of such names; repeatable")
    command.add_argument("--exclude", metavar="GLOB", action="append", help="no tensors of such names; repeatable")


def _add_writing(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--overwrite", action="store_true", help="replace an existing target")
    add("--dry-run", action="store_true", help="print what would be written, and write nothing")
    add("--quiet", action="store_true", help="no progress bar")
    _add_stores(command)


def _add_stores(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tmp-dir", metavar="PATH", help="folder for temporary copies of files in a store")
    jobs = "files of a store moved at a time (default: 4)"
    command.add_argument("--jobs", type=_count, default=4, metavar="N", help=jobs)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: give 1 or more")
    return int(text)


def _shares(text: str) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    total = sum(weights)
    # `not all(... >= 0)` rejects NaN as well.
    if not all(weight >= 0 for weight in weights) or not 0 < total < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of 0 or more, as 3,1 or 0.5,0.25,0.25")
    return [weight / total for weight in weights]
