"""The command `composer schema`: print the JSON Schema of recipes, for completion and checks in editors."""

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the schema, and return the exit status."""
    parser = argparse.ArgumentParser(prog="composer schema", description="Print the JSON Schema of recipes.")
    parser.parse_args(arguments)
    from composer.recipe._schema import make_schema  # loads torch

    sys.stdout.write(json.dumps(make_schema(), indent=1) + "\n")
    return 0
