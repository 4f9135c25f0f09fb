"""The command `composer-optim coord-check`: measure how the activations of a model grow with its width."""

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_algorithms.mup import CoordCheck

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables with and without muP, and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        checks = _checks(options)
        for name, check in checks.items():
            sys.stdout.write(f"{name}\n{check}\n\n")
        if options.plot is not None:
            _plot(checks, options.plot)
    except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
        sys.stderr.write(f"composer-optim: error: {error}\n")
        return 2
    return 0


def _checks(options: argparse.Namespace) -> "dict[str, CoordCheck]":
    # Imported after the arguments are parsed, so that `--help` and usage errors are fast.
    import torch

    from composer_algorithms.mup import coord_check
    from composer_fsdp.model_source import load_named
    from composer_optim import Muon

    if options.plot is not None:
        _figure()  # before the models are trained
    made = partial(load_named(options.model, "MODEL"))
    batch = None if options.batch is None else load_named(options.batch, "--batch")()
    if batch is None:
        model: Any = made(options.widths[0])
        # The embedding of tokens comes before those of positions and segments.
        table = next((each for each in model.modules() if isinstance(each, torch.nn.Embedding)), None)
        if table is None:
            raise ValueError("the model has no embedding, so it needs a batch. Give --batch file.py:function.")
        tokens = torch.randint(table.num_embeddings, (4, 16), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": tokens, "labels": tokens}
    make_optimizer = {
        "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=options.lr),
        "muon": lambda model: Muon(model, lr=options.lr),
    }[options.optimizer]
    check = partial(
        coord_check, made, batch, options.widths, make_optimizer=make_optimizer, num_steps=options.num_steps
    )
    base = min(options.widths) if options.base_width is None else options.base_width
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a narrow model need not be a good one
        return {f"MuP(base_width={base})": check(base_width=base), "without muP": check()}


def _figure() -> Any:
    try:
        return import_module("matplotlib.figure").Figure(figsize=(11, 4.5), layout="constrained")
    except ImportError as error:
        raise ImportError("--plot needs matplotlib. Run `pip install matplotlib`.") from error


def _plot(checks: "Mapping[str, CoordCheck]", path: str) -> None:
    figure = _figure()
    panels = figure.subplots(1, len(checks), sharey=True)
    for panel, (name, check) in zip(panels, checks.items(), strict=True):
        for layer, scales in check.scales.items():
            panel.plot(check.widths, scales, marker=".", label=layer)
        panel.set(title=name, xlabel="width", xscale="log", yscale="log", xticks=check.widths)
        panel.set_xticks(check.widths, labels=map(str, check.widths), minor=False)
        panel.minorticks_off()
    panels[0].set_ylabel("mean absolute output")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path)


def _widths(text: str) -> tuple[int, ...]:
    return tuple(int(width) for width in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("composer-optim", description="Check how an optimizer and a model fit together.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser(
        "coord-check", help="print how the activations of a model grow with its width, with muP and without"
    ).add_argument
    add("model", metavar="MODEL", help="file.py:function or module:function that makes the model of a width")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="default: adamw")
    add("--lr", type=float, default=0.01, help="learning rate (default: 0.01)")
    add("--widths", type=_widths, default=(64, 128, 256, 512, 1024), help="default: 64,128,256,512,1024")
    add("--base-width", type=int, help="width at which the hyperparameters were tuned (default: the smallest width)")
    add("--num-steps", type=int, default=4, help="steps of training before the measurement (default: 4)")
    add("--batch", metavar="FUNCTION", help="file.py:function that makes a batch (default: random tokens)")
    add("--plot", metavar="FILE", help="file of a plot, such as growth.svg; needs matplotlib")
    return parser


if __name__ == "__main__":
    sys.exit(main())
