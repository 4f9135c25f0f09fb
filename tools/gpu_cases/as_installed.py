"""A folder for the path that makes a checkout look installed, where nothing may be installed.

The packages find each other through their metadata: `composer-events` makes devices, precisions and algorithms of the
names that entry points announce. So the folder has the metadata of each package, from its `pyproject.toml`. And it has
a stand-in for each library that composer-checkpoint hashes with, where that is missing: the same calls, other hashes.
"""

import importlib.util
import shutil
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
STAND_INS = Path(__file__).resolve().parent / "stand_ins"


def source_folders() -> list[Path]:
    """Return what has to be on the path for all packages to be imported."""
    return sorted([*ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src")])


def write_metadata(folder: Path) -> None:
    """Write each package's name, version and entry points as an installer does."""
    for source in source_folders():
        project = tomllib.loads((source.parent / "pyproject.toml").read_text())["project"]
        name, version = project["name"], project["version"]
        written = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        written.mkdir()
        (written / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
        (written / "entry_points.txt").write_text(_entry_points(project))


def add_stand_ins(folder: Path) -> list[str]:
    """Copy a stand-in for each library that is missing, and return the names of these."""
    missing = [path for path in sorted(STAND_INS.glob("*.py")) if importlib.util.find_spec(path.stem) is None]
    for path in missing:
        shutil.copy2(path, folder)
    return [path.stem for path in missing]


def _entry_points(project: dict[str, Any]) -> str:
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = (
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), "")
    )
    return "\n".join(lines)
