"""The settings of a run, as text for its console."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from composer.loggers._plain_values import to_plain
from composer_events.hparams import convert_flat_dict_to_nested_dict

__all__ = ["format_config"]

_RULE = "*" * 30
# A text that YAML reads as it stands: it begins like a word or a path, and no comment and no key begins in it.
_PLAIN = re.compile(r"[A-Za-z_/](?:[\w./()=,+<>*-]| (?! |#|$)|:(?! |$))*")
_OF_OTHER_KINDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def format_config(hyperparameters: Mapping[str, Any]) -> str:
    """Return hyperparameters as YAML between two rules.

    Example:
        >>> print(format_config({"optimizer/lr": 0.1, "seed": 17}))
        ******************************
        Config:
        optimizer:
          lr: 0.1
        seed: 17
        ******************************
    """
    named = {str(name): value for name, value in hyperparameters.items()}
    with suppress(ValueError):  # of a name that is also the beginning of others: then they are shown as they are
        named = convert_flat_dict_to_nested_dict(named)
    lines = _to_yaml(to_plain(named))
    return "\n".join([_RULE, "Config:", *lines, _RULE])


def _to_yaml(values: Mapping[str, Any], indent: str = "") -> list[str]:
    """Return nested settings as lines of YAML."""
    lines: list[str] = []
    for name, value in sorted(values.items()):
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{_scalar(name)}:", *_to_yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{_scalar(name)}: {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    """Return a value as YAML reads it back: the texts, numbers and lists of JSON are YAML, too."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OF_OTHER_KINDS:
        return value
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_quoted(name)}: {_quoted(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, float):
        return _float(value)
    # Escaped where a reader of YAML, or the console, takes no such character.
    return json.dumps(value, ensure_ascii=not (isinstance(value, str) and value.isprintable()))


def _quoted(item: Any) -> str:
    """Return an item of a list or of a mapping on one line, where a comma ends a text that stands as it is."""
    return json.dumps(item, ensure_ascii=not item.isprintable()) if isinstance(item, str) else _scalar(item)


def _float(value: float) -> str:
    if math.isfinite(value):
        text = repr(float(value))
        return text if "." in text or "e" not in text else text.replace("e", ".0e")  # a text to YAML 1.1 without a dot
    return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
