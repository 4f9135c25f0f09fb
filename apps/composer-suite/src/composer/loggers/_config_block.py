"""The settings of a run, as text for its console."""

import json
from collections.abc import Mapping
from typing import Any

from composer_events.hparams import convert_flat_dict_to_nested_dict

__all__ = ["format_config"]

_RULE = "*" * 30


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
    lines = _to_yaml(convert_flat_dict_to_nested_dict(hyperparameters))
    return "\n".join([_RULE, "Config:", *lines, _RULE])


def _to_yaml(values: Mapping[str, Any], indent: str = "") -> list[str]:
    """Return nested settings as lines of YAML: every scalar and list of JSON is one of YAML."""
    lines: list[str] = []
    for name, value in sorted(values.items()):
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{name}:", *_to_yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {value if isinstance(value, str) else json.dumps(value, default=str)}")
    return lines
