"""Collect the examples of the Markdown pages as tests, and keep one file's processes out of the next one's."""

import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
except ImportError:  # a package that is tested alone does not have it
    pass
else:
    _examples = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()],
        patterns=["README.md", "docs/*.md", "docs/*/*.md"],
    )
    pytest_collect_file = _examples.pytest()

try:
    from fcntl import LOCK_EX, flock
except ImportError:  # Windows, which has no shared memory that a killed run could leave behind
    flock = None

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
_BEFORE = {name: os.environ.get(name) for name in _VARIABLES}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let one test at a time clean `/dev/shm`: what one leaves there to be found, another would delete."""
    if flock is None or item.path.name not in ("stale_memory.py", "test_stale_shared_memory.py"):
        return (yield)
    with Path(tempfile.gettempdir(), f"composer-shared-memory-tests-{os.getuid()}").open("w") as lock:
        flock(lock, LOCK_EX)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Leave to the next file neither a process group nor the variables that tell of one.

    Whoever initializes a group leaves both, as in any script, and other libraries take their cue from them.
    """
    yield
    if nextitem is not None and nextitem.path == item.path:
        return
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
    for name, value in _BEFORE.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
