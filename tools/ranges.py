"""Check that what the packages of this workspace ask of each other fits what they are, and that no release changes.

uv takes a sibling from the workspace whatever its version, so a range that no longer fits shows only when the wheels
are installed. Each requirement on a sibling must contain the sibling's version and end before its next breaking one.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def members(root: Path = ROOT) -> dict[str, dict]:
    """Return the `[project]` table of each package of the workspace, by distribution name."""
    files = sorted([*root.glob("packages/*/pyproject.toml"), *root.glob("apps/*/pyproject.toml")])
    tables = (tomllib.loads(file.read_text())["project"] for file in files)
    return {table["name"]: table for table in tables}


def siblings(project: Mapping, names: Mapping) -> Iterator[Requirement]:
    """Yield the requirements of one package, extras included, that name another package of the workspace."""
    optional = project.get("optional-dependencies", {}).values()
    for line in [*project.get("dependencies", []), *(line for group in optional for line in group)]:
        requirement = Requirement(line)
        if requirement.name in names and requirement.name != project["name"]:
            yield requirement


def misfits(projects: Mapping[str, dict]) -> Iterator[str]:
    """Yield a sentence for each requirement that does not fit."""
    for project in projects.values():
        for requirement in siblings(project, projects):
            version = Version(projects[requirement.name]["version"])
            breaking = next_breaking(version)
            where = f"{project['name']} asks for {requirement}"
            if version not in requirement.specifier:
                yield f"{where}, but {requirement.name} is {version}. Move the range to that version."
            elif breaking in requirement.specifier:
                yield f"{where}, which admits the breaking release {breaking}. End the range before it: <{breaking}."


def is_released(version: str, changelog: str) -> bool:
    """Return whether a package's present code is a release: its version has a date, and nothing came after it."""
    return f"## {version} (" in changelog and "(unreleased)" not in changelog


def stale(root: Path, projects: Mapping[str, dict]) -> Iterator[str]:
    """Yield a sentence for each package whose number is that of a release, and whose code is newer."""
    for name, project in projects.items():
        log = next(root.glob(f"*/{name}/CHANGELOG.md")).read_text()
        version = project["version"]
        if "(unreleased)" in log and f"## {version} (" in log.replace(f"## {version} (unreleased)", ""):
            yield f"{name} {version} is released, and its changelog has newer changes: run tools/release.py {name} dev."


def next_breaking(version: Version) -> Version:
    """Return the version that may break what works with this one."""
    return Version(f"0.{version.minor + 1}") if version.major == 0 else Version(f"{version.major + 1}.0")


def main() -> int:
    """Print what does not fit and return the exit status."""
    problems = [*misfits(members()), *stale(ROOT, members())]
    print("\n".join(problems) or f"The ranges between {len(members())} packages fit.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
