"""The `composer_collect_env` command: what a report of a fault should say about the machine and its versions."""

import sys

from composer.utils.collect_env import describe_environment, main

__all__ = ["describe_environment", "main"]

if __name__ == "__main__":
    sys.exit(main())
