"""The command `composer_collect_env`: print a description of the environment for bug reports."""

import sys

from composer.utils.collect_env import describe_environment, main

__all__ = ["describe_environment", "main"]

if __name__ == "__main__":
    sys.exit(main())
