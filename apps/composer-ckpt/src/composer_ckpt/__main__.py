"""Entry point of `python -m composer_ckpt`, for environments without the command on the path."""

import sys

from composer_ckpt.cli import main

sys.exit(main())
