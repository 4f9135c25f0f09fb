"""Streaming datasets have Composer's address, and say what brings them where they are not installed."""

import subprocess
import sys

HIDDEN = """
import sys
sys.modules["streaming"] = None
import composer.datasets
for take in ("from composer.datasets import StreamingDataset", "composer.datasets.streaming.StreamingDataset"):
    try:
        exec(take)
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_a_package_that_is_missing_is_named_with_what_brings_it():
    result = subprocess.run([sys.executable, "-c", HIDDEN], check=True, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("MissingConditionalImportError mosaicml-streaming is not installed")
        assert "'composer-suite[streaming]'" in line
