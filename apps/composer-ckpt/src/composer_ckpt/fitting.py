"""Which options of `convert` fit what is read and what is written: the others would change nothing, and are refused."""

import argparse
from collections.abc import Iterable

from composer_ckpt.outcomes import UsageError

__all__ = ["refuse_for_source", "refuse_for_target"]

_RUN_WHERE_TRUSTED = ("composer", "pt")
_WEIGHTS_ALONE = ("safetensors", "hf", "modular")  # of the folder of `composer.checkpoint`, the model's part is read


def refuse_for_target(options: argparse.Namespace, target: str) -> None:
    """Refuse options that say what Hugging Face folders have, where something else is written.

    Args:
        options: Of `convert` or `merge`.
        target: The format that is written.

    Raises:
        UsageError: If there are such options.
    """
    if target == "hf":
        return
    only_hf = {
        "--peft": options.peft != "auto",
        "--base-model": options.base_model is not None,
        "--format": options.format != "safetensors",
        "--max-shard-size": options.max_shard_size is not None,
        "--config": options.config is not None,
        "--config-override": options.config_override is not None,
        "--tokenizer": options.tokenizer is not None,
    }
    if given := [name for name, is_given in only_hf.items() if is_given]:
        raise _unfitting(given, "of Hugging Face folders", f"this writes {target}")


def refuse_for_source(options: argparse.Namespace, kind: str, target: str) -> None:
    """Refuse options that say how other kinds of checkpoints are read.

    Args:
        options: Of `convert` or `merge`.
        kind: What is read.
        target: The format that is written.

    Raises:
        UsageError: If there are such options.
    """
    found = f"SRC={options.source!r} is {kind}"
    if options.trust and kind not in _RUN_WHERE_TRUSTED:
        raise _unfitting(["--trust"], "of .pt files", found)
    if options.deepspeed_weights != "fp32" and kind != "deepspeed":
        raise _unfitting(["--deepspeed-weights"], "of DeepSpeed's folders", found)
    if options.trust_remote_code and "hf" not in (kind, target):
        raise _unfitting(["--trust-remote-code"], "of Hugging Face folders", f"{found}, and this writes {target}")
    state = {"--optimizer": options.optimizer, "--resumption": options.resumption}
    if kind in _WEIGHTS_ALONE and (given := [name for name, is_given in state.items() if is_given]):
        raise _unfitting(given, "of what resumes a run", f"{found}, of which weights alone are read")


def _unfitting(names: Iterable[str], whose: str, found: str) -> UsageError:
    names = [*names]
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return UsageError(f"{', '.join(names)} {verb} {whose}, and {found}. Leave {them} out.")
