"""The `composer` command, which is defined in composer-dist."""

import sys

from composer_dist.launch.main import main as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
