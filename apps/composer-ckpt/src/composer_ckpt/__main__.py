"""`python -m composer_ckpt`, where the command is not on the path."""

import sys

from composer_ckpt.cli import main

sys.exit(main())
