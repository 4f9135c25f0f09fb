"""Give a package a new version: its number, the heading of its changelog, and the ranges between it and its siblings.

    release.py NAME VERSION
    release.py NAME dev      after the tag: what is built from now on is no release

The package asks for its siblings from the versions on with which it was tested, and those that ask for it get another
range where the new version breaks theirs. Nothing is written before everything has been checked.
"""

import argparse
import datetime
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version
from ranges import ROOT, is_released, members, next_breaking, siblings


class Refused(Exception):
    """Says why a package does not get the version."""


def edits(root: Path, name: str, text: str, today: datetime.date) -> dict[Path, str]:
    """Return what each file becomes when a package gets a version.

    Args:
        root: The folder with the workspace.
        name: The distribution.
        text: Its new version, or `dev`.
        today: The date of the release.

    Raises:
        Refused: If there is no such package, the version is not newer, the changelog has nothing to tell, or a sibling
            that it needs has changes that are not released.
    """
    projects = members(root)
    if name not in projects:
        raise Refused(f"{name!r} is no package of this workspace: it has {', '.join(projects)}.")
    folder = next(file.parent for file in root.glob(f"*/{name}/pyproject.toml"))
    toml, log = (folder / "pyproject.toml").read_text(), (folder / "CHANGELOG.md").read_text()
    old = Version(projects[name]["version"])
    if text == "dev":
        return {folder / "pyproject.toml": _with_version(toml, Version(f"{old.public}+dev"))}
    new = _version(text)
    heading = re.compile(r"^## \S+ \(unreleased\)$", re.MULTILINE)
    if len(heading.findall(log)) != 1:
        raise Refused(
            f"{folder.name}/CHANGELOG.md has no heading '## ... (unreleased)', so nothing to release. Write one at its "
            f"top, such as '## {new} (unreleased)', with a line for what is different."
        )
    if new < old or (new == old and f"## {old} (unreleased)" not in log):
        raise Refused(f"{text} is not newer than {old}, the present version of {name}.")
    for below in sorted({requirement.name for requirement in siblings(projects[name], projects)}):
        there = next(file.parent for file in root.glob(f"*/{below}/pyproject.toml"))
        version = projects[below]["version"]
        if not is_released(version, (there / "CHANGELOG.md").read_text()):
            raise Refused(f"{name} was tested with {below} {version}, which is not released. Release {below} first.")
        toml = re.sub(rf'"({below}(?:\[[^\]]*\])?)>=[^,"]*', rf'"\g<1>>={version}', toml)
    changed = {
        folder / "CHANGELOG.md": heading.sub(f"## {new} ({today})", log),
        folder / "pyproject.toml": _with_version(toml, new),
    }
    for dependent in dependents(projects, name, new):
        path = next(root.glob(f"*/{dependent}/pyproject.toml"))
        range_ = f">={new.major}.{new.minor},<{next_breaking(new)}"
        changed[path] = re.sub(rf'"({name}(?:\[[^\]]*\])?)[<>=~!][^"]*"', rf'"\g<1>{range_}"', path.read_text())
    return changed


def dependents(projects: Mapping[str, dict], name: str, version: Version) -> Iterator[str]:
    """Yield the packages whose ranges do not hold that version of another."""
    for other, project in projects.items():
        asked = [one.specifier for one in siblings(project, projects) if one.name == name]
        if not all(version in specifier for specifier in asked):
            yield other


def _version(text: str) -> Version:
    # Ranges of dependents are made of the first two numbers, and would not hold what comes before a release.
    if re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", text) is None:
        raise Refused(f"{text!r} is no version of a release: give three numbers, such as 0.2.0.")
    return Version(text)


def _with_version(toml: str, version: Version) -> str:
    return re.sub(r'^version = "[^"]*"$', f'version = "{version}"', toml, count=1, flags=re.MULTILINE)


def main() -> int:
    """Write the files, say what is left to do, and return the exit status."""
    parser = argparse.ArgumentParser(description="Give a package a new version.")
    parser.add_argument("name", help="a distribution, such as composer-time")
    parser.add_argument("version", help="its new version, such as 0.2.0, or dev")
    asked = parser.parse_args()
    try:
        changed = edits(ROOT, asked.name, asked.version, datetime.datetime.now(datetime.UTC).date())
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    is_dev = asked.version == "dev"
    moved = [] if is_dev else list(dependents(members(ROOT), asked.name, Version(asked.version)))
    for path, text in changed.items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    if moved:
        print(f"These ask for another range now and are to be released too: {', '.join(moved)}.")
    if is_dev:
        print("Next: make lock; git commit")
    else:
        tag, script = f"{asked.name}-v{asked.version}", f"tools/release.py {asked.name} dev"
        print(f"Next: make lock lint test; git commit; make dist; git tag {tag}; {script}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
