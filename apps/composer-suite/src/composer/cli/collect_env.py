"""Prints what a report of a fault should say about the machine and the versions installed on it."""

import argparse
import sys
from importlib.metadata import distributions

from torch.utils.collect_env import get_pretty_env_info

__all__ = ["describe_environment", "main"]


def describe_environment() -> str:
    """Return the versions of this family of packages and what PyTorch says about itself and the machine.

    It asks the tools of the system (`nvidia-smi`, `lscpu`, `pip`), which takes a few seconds.
    """
    installed = {distribution.name: distribution.version for distribution in distributions()}
    own = [f"{name}: {version}" for name, version in sorted(installed.items()) if name.startswith("composer-")]
    return "\n".join(["Composer", *own, "", "PyTorch", str(get_pretty_env_info())])


def main() -> int:
    """Print the description, and return 0."""
    argparse.ArgumentParser(description="Print what a report of a fault should say about this machine.").parse_args()
    sys.stdout.write(f"{describe_environment()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
