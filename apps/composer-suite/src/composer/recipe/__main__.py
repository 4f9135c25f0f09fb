"""Train as a recipe says: `composer -n 2 recipe.yaml lr=3e-4`, or in one process `python -m composer.recipe`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from composer.recipe import Plan, RecipeError, load_recipe
from composer.trainer import Trainer
from composer_dist import dist


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit status."""
    try:
        plan, dry_run = parse(arguments)
    except RecipeError as error:
        sys.stderr.write(f"composer: error: {error}\n")
        return 2
    if dry_run:
        if dist.get_global_rank() == 0:
            sys.stdout.write(plan.text)
        return 0
    with plan.build() as trainer:
        keep(plan, trainer)
        if plan.eval_first:
            trainer.eval()
        trainer.fit()
    return 0


def parse(arguments: Sequence[str] | None = None) -> tuple[Plan, bool]:
    """Return the recipe of a command line, and whether to print it only.

    Raises:
        RecipeError: If the recipe is not valid.
    """
    parser = argparse.ArgumentParser(prog="composer recipe.yaml", description="Train as a recipe says.")
    parser.add_argument("recipe", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes, such as optimizers.lr=3e-4")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe and print it with all values resolved")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="PACKAGE", help="let the recipe name what is in this package"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let a model of the Hub run its own code")
    options = parser.parse_intermixed_args(arguments)
    # The recipe's folder, as Python does for a script; the current one, as `python -m` does, so that the recipe in a
    # run folder finds what the original did.
    for folder in (str(Path.cwd()), str(Path(options.recipe).parent.resolve())) if options.allow else ():
        if folder not in sys.path:
            sys.path.insert(0, folder)
    plan = load_recipe(
        options.recipe, options.overrides, allow=options.allow, trust_remote_code=options.trust_remote_code
    )
    return plan, options.dry_run


def keep(plan: Plan, trainer: Trainer) -> None:
    """Write the recipe with all values into the folders of the run."""
    from composer.report import RunRecorder

    if dist.get_global_rank() == 0:
        for recorder in trainer.logger.destinations:
            if isinstance(recorder, RunRecorder) and recorder.has_folder:
                Path(recorder.folder, "recipe.yaml").write_text(plan.text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
