"""The last collectives of this rank, and the thread that writes them when the launcher asks.

torch's flight recorder keeps the collectives of every process group, those of DDP and FSDP too, with their sequence
number and shapes. `TORCH_FR_BUFFER_SIZE` sets how many; the launcher sets it.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from composer_dist.progress import Recorder

__all__ = ["HANG_TIMEOUT", "last_collectives", "start"]

HANG_TIMEOUT: Final = "COMPOSER_HANG_TIMEOUT"
"""Seconds without progress after which a rank prints its own stack and phase, for runs without the launcher."""
FILE: Final = "collectives.json"
_MOST: Final = 50
_INTERVAL_S: Final = 0.5


def last_collectives(most: int = _MOST) -> list[dict[str, Any]]:
    """Return the last collectives of this process, the oldest first.

    Each has `name`, such as `'gloo:all_reduce'`, `group`, `sequence` (the number in its group), `shapes`, `dtypes`,
    `is_done`, and `time_ns` since 1970. Empty before torch is loaded and where it records none.

    Args:
        most: The number of collectives.
    """
    # Private: torch has no public way to read its recorder in Python. Not imported, as a rank may not use torch.
    native = sys.modules.get("torch._C._distributed_c10d")
    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):  # of any kind: the names and arguments depend on the version
            dump = getattr(native, name)
            entries = json.loads(dump(includeCollectives=True)).get("entries", ())
            found += [_plain(entry) for entry in entries if not entry["is_p2p"]]  # pairs of ranks count separately
    found.sort(key=lambda entry: entry["time_ns"])
    return found[-most:]


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": entry["profiling_name"],
        "group": list(entry["process_group"]),
        "sequence": entry["collective_seq_id"],
        "shapes": entry["input_sizes"],
        "dtypes": entry["input_dtypes"],
        "is_done": bool(entry.get("retired")) or entry.get("state") == "completed",
        "time_ns": entry["time_created_ns"],
    }


def start(recorder: "Recorder", folder: Path | None) -> None:
    """Start the thread that writes `collectives.json` into a folder on request, and watches the rank if asked to."""
    timeout_s = _timeout_s()
    if folder is None and not timeout_s > 0:
        return
    threading.Thread(
        target=_serve, args=(recorder, folder, timeout_s), name="composer-flight-recorder", daemon=True
    ).start()


def _timeout_s() -> float:
    """Return the seconds that the user asked for, 0 for none. A malformed variable must not end the training."""
    given = os.environ.get(HANG_TIMEOUT) or "0"
    with contextlib.suppress(ValueError):
        if (timeout_s := float(given)) >= 0:
            return timeout_s
    warnings.warn(
        f"{HANG_TIMEOUT}={given!r} must be a number of seconds, 0 or more, such as 300. Ranks without progress are not "
        "reported.",
        stacklevel=2,
    )
    return 0.0


def _serve(recorder: "Recorder", folder: Path | None, timeout_s: float) -> None:
    served, told = 0, -1
    while True:
        time.sleep(_INTERVAL_S)
        if folder is not None and (asked := recorder.asked) != served:
            served = asked
            with contextlib.suppress(OSError):
                draft = folder / f".{FILE}"
                draft.write_text(json.dumps({"asked": asked, "collectives": last_collectives()}))
                draft.replace(folder / FILE)
        counter, event, phase, time_s = recorder.position
        idle_s = time.monotonic() - time_s
        if timeout_s > 0 and told != counter and phase not in ("start", "between") and idle_s > timeout_s:
            told = counter
            _tell(f"after the event {event} ({phase}) for {idle_s:.0f} s")


def _tell(where: str) -> None:
    """Write this rank's stacks and its last collective to stderr."""
    rank, last = os.environ.get("RANK", "0"), last_collectives(1)
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.write(f"composer: rank {rank} has made no progress {where}. {HANG_TIMEOUT} asked for its stacks.\n")
        for entry in last:
            state = "done" if entry["is_done"] else "not done"
            sys.stderr.write(
                f"composer: its last collective is {entry['name']} number {entry['sequence']} of shapes "
                f"{entry['shapes']}, {state}.\n"
            )
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
