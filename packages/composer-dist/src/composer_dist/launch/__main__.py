"""`python -m composer_dist.launch` is the `composer` command."""

import sys

from composer_dist.launch.main import main

sys.exit(main())
