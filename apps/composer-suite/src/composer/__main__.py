"""`python -m composer` is the `composer` command."""

import sys

from composer_dist.launch.main import main

sys.exit(main())
