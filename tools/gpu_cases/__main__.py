"""Run one case in this process and write down how it went.

    python -m gpu_cases MODULE.FUNCTION DEVICE RESULT

What the case prints goes where this process's output goes; RESULT gets `{"outcome": ..., "figure": ...}`.
"""

import json
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path

from gpu_cases import Skip


def main(name: str, device: str, result: str) -> int:
    """Run the case and return the exit status."""
    module, _, function = name.rpartition(".")
    warnings.filterwarnings("ignore", ".*is experimental|.*will be decreased|.*is deprecated")
    try:
        outcome, figure = "passed", getattr(import_module(module), function)(device)
    except Skip as reason:
        outcome, figure = "skipped", str(reason)
    except Exception as error:
        traceback.print_exc()
        outcome, figure = "failed", f"{type(error).__name__}: {error}".strip()
    Path(result).write_text(json.dumps({"outcome": outcome, "figure": figure}))
    return int(outcome == "failed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
