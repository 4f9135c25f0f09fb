"""What the tests that cross packages share."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

collect_ignore_glob = ["alone/*"]  # programs, which a search for docstring examples would run

# Launchers of one test would clean up what another one, in another worker, has killed on purpose.
os.environ["COMPOSER_KEEP_SHARED_MEMORY"] = "1"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tool():
    """Load one of the programs in tools/, which are no package."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load
