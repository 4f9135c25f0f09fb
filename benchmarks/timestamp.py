"""Measure what keeping the time costs a training step, and fail if a budgeted operation is over its budget.

    timestamp.py [--repeats N]

Processor time, the best of several repeats: whatever else runs on the machine can only make it longer.
"""

import argparse
import sys
import time
import timeit
from datetime import timedelta

from rows import Row, add_option, write

from composer_time import Time, Timestamp, TimeUnit

NAMES = {
    "Time": Time,
    "TimeUnit": TimeUnit,
    "timestamp": Timestamp(epoch=3, batch=1000, sample=32_000),
    "max_duration": Time(10, "ep"),
    "half": Time(5, "ep"),
    "took": timedelta(milliseconds=120),
}
# What a training loop does at every step, with its budget in microseconds where there is one.
OPERATIONS: dict[str, float | None] = {
    "timestamp.to_next_batch(32, 4096, took)": 2.0,
    "timestamp < max_duration": 1.0,
    "timestamp < '10ep'": None,
    "timestamp.batch": None,
    "timestamp.batch % 10 == 0": None,
    "timestamp.get(TimeUnit.BATCH)": None,
    "timestamp.to_next_epoch()": None,
    "half < max_duration": None,
    "half / max_duration": None,
    "Time.from_timestring('10ep')": None,
    "TimeUnit('epoch')": None,
    "hash(TimeUnit.EPOCH)": None,
}
NUMBER = 20_000


def main() -> int:
    """Print the table and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the operations of Timestamp and Time.")
    parser.add_argument("--repeats", type=int, default=9, help="timings per operation")
    add_option(parser)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    kept = True
    rows: list[Row] = []
    print(f"{'operation':42} {'us':>6} {'budget':>7}")
    for operation, budget in OPERATIONS.items():
        timings = timeit.repeat(operation, globals=NAMES, number=NUMBER, repeat=repeats, timer=time.process_time)
        best = min(timings) / NUMBER * 1e6
        is_met = None if budget is None else best <= budget
        kept = kept and is_met is not False
        asked = "" if budget is None else f"{budget:.1f} us"
        rows.append(Row(what=operation, ours=best, unit="us", budget=asked, is_met=is_met))
        print(f"{operation:42} {best:6.2f} {'' if budget is None else f'{budget:7.1f}'}")
    write(arguments.json, rows)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
