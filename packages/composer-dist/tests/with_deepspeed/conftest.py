"""What needs DeepSpeed, which only the extra brings, is collected only where DeepSpeed is."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("deepspeed") else ["*"]
