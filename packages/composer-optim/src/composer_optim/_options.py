"""What the options of the optimizers may be, checked before anything is trained with them.

PyTorch compares options with 0, which NaN and infinity pass, and looks at those of the constructor only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from composer_optim._numbers import as_finite, check_flag

__all__ = ["check_group"]

Check = Callable[[str, Any], None]


def check_group(options: Mapping[str, Any]) -> None:
    """Check the options of one group of parameters.

    Args:
        options: By name. Those that are not known here are the optimizer's own affair.

    Raises:
        TypeError: If an option is of the wrong kind.
        ValueError: If a number is NaN, infinite, or out of its range.
    """
    for name, check in _CHECKS.items():
        if name in options:
            check(name, options[name])
    if options.get("nesterov") and (options.get("momentum", 0) <= 0 or options.get("dampening", 0) != 0):
        raise ValueError(
            f"nesterov=True looks ahead along the momentum, and momentum={options.get('momentum', 0)!r}, "
            f"dampening={options.get('dampening', 0)!r}. Use a momentum above 0, and no dampening."
        )


def _check_not_negative(name: str, value: object) -> None:
    if not isinstance(value, Tensor):  # which is on a device, perhaps, and nobody waits for it
        as_finite(name, value, least=0.0)


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        as_finite(name, value)


def _check_betas(name: str, value: object) -> None:
    if isinstance(value, str | Tensor) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be two numbers, such as (0.9, 0.95).")
    for index, beta in enumerate(value):
        if not isinstance(beta, Tensor) and not 0 <= as_finite(f"{name}[{index}]", beta) < 1:
            raise ValueError(f"{name}[{index}]={beta!r} must be 0 or more and less than 1.")


def _check_flag_or_none(name: str, value: object) -> None:
    if value is not None:
        check_flag(name, value)


_CHECKS: Mapping[str, Check] = {
    "lr": _check_not_negative,
    "momentum": _check_not_negative,
    "dampening": _check_number,
    "weight_decay": _check_not_negative,
    "eps": _check_not_negative,
    "betas": _check_betas,
    "nesterov": check_flag,
    "amsgrad": check_flag,
    "maximize": check_flag,
    "capturable": check_flag,
    "foreach": _check_flag_or_none,
    "fused": _check_flag_or_none,
}
