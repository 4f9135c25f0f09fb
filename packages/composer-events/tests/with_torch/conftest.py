"""What needs torch, which this package does not ask for, is collected only where torch is."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["*"]
