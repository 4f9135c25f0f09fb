import contextlib
import datetime
import re
import sys
import tomllib
from graphlib import TopologicalSorter

import pytest
from packaging.requirements import Requirement

DAY = datetime.date(2030, 1, 2)


@pytest.fixture
def release(tool, monkeypatch, root):
    monkeypatch.syspath_prepend(str(root / "tools"))
    return tool("release")


@pytest.fixture
def workspace(tmp_path):
    """A workspace of two packages, of which the second asks for the first."""
    write(tmp_path / "packages" / "low", "low", [])
    write(tmp_path / "apps" / "high", "high", ["low[fast]>=0.1,<0.2", "lowest>=1"])
    return tmp_path


def write(folder, name, requirements):
    folder.mkdir(parents=True)
    asked = ", ".join(f'"{one}"' for one in requirements)
    table = f'[project]\nname = "{name}"\nversion = "0.1.0"\ndependencies = [{asked}]\n'
    (folder / "pyproject.toml").write_text(table)
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0 (unreleased)\n\n- It is faster.\n")


def project(text):
    return tomllib.loads(text)["project"]


def test_a_breaking_release_moves_the_ranges_of_those_that_ask_for_it(release, workspace):
    changed = release.edits(workspace, "low", "0.2.0", DAY)
    low, high = workspace / "packages" / "low", workspace / "apps" / "high"
    assert set(changed) == {low / "CHANGELOG.md", low / "pyproject.toml", high / "pyproject.toml"}
    assert project(changed[low / "pyproject.toml"])["version"] == "0.2.0"
    assert changed[low / "CHANGELOG.md"] == "# Changelog\n\n## 0.2.0 (2030-01-02)\n\n- It is faster.\n"
    assert project(changed[high / "pyproject.toml"])["dependencies"] == ["low[fast]>=0.2,<0.3", "lowest>=1"]


def test_a_release_that_breaks_nothing_leaves_the_ranges(release, workspace):
    changed = release.edits(workspace, "low", "0.1.1", DAY)
    assert workspace / "apps" / "high" / "pyproject.toml" not in changed


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("lo", "0.2.0", "'lo' is no package of this workspace"),
        ("low", "new", "'new' is no version"),
        ("low", "9.0.0rc1", "'9.0.0rc1' is no version of a release"),
        ("low", "v9.0.0", "'v9.0.0' is no version of a release"),
        ("low", "0.0.9", "0.0.9 is not newer than 0.1.0"),
        ("low", "0.1.0", "0.1.0 is not newer than 0.1.0"),
    ],
)
def test_what_cannot_be_released_is_refused(release, workspace, name, version, said):
    with pytest.raises(release.Refused, match=said):
        release.edits(workspace, name, version, DAY)


def test_the_command_says_in_a_sentence_what_it_refuses(release, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["release.py", "composer-time", "new"])
    assert release.main() == 1
    assert "'new' is no version" in capsys.readouterr().err


def test_the_tag_comes_last_when_the_wheels_are_known_to_be_fit(release, workspace, root, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", workspace)
    monkeypatch.setattr("sys.argv", ["release.py", "low", "0.2.0"])
    assert release.main() == 0
    told = capsys.readouterr().out
    assert "are to be released too: high." in told
    for steps in (told, (root / "CONTRIBUTING.md").read_text()):
        assert 0 < steps.index("git commit") < steps.index("make dist") < steps.index("git tag")


def test_a_package_asks_for_the_sibling_that_it_was_tested_with(release, workspace):
    """It asked for 0.1.0, and failed there with an ImportError."""
    low, high = workspace / "packages" / "low", workspace / "apps" / "high"
    with pytest.raises(release.Refused, match=r"high was tested with low 0\.1\.0, which is not released\. Release low"):
        release.edits(workspace, "high", "0.2.0", DAY)
    for path, text in release.edits(workspace, "low", "0.1.1", DAY).items():
        path.write_text(text)
    changed = release.edits(workspace, "high", "0.2.0", DAY)
    assert project(changed[high / "pyproject.toml"])["dependencies"] == ["low[fast]>=0.1.1,<0.2", "lowest>=1"]
    assert low / "pyproject.toml" not in changed


def test_what_is_built_between_releases_has_no_number_of_a_release(release, workspace):
    """Two wheels of different code were called 0.1.1."""
    low, ranges = workspace / "packages" / "low", sys.modules["ranges"]
    for text in ("0.1.1", "dev"):
        for path, written in release.edits(workspace, "low", text, DAY).items():
            path.write_text(written)
    projects = release.members(workspace)
    assert projects["low"]["version"] == "0.1.1+dev"
    assert list(ranges.misfits(projects)) == list(ranges.stale(workspace, projects)) == []
    log = low / "CHANGELOG.md"
    log.write_text(log.read_text().replace("## 0.1.1", "## 0.1.2 (unreleased)\n\n- More.\n\n## 0.1.1"))
    assert list(ranges.stale(workspace, projects)) == []
    assert set(release.edits(workspace, "low", "0.1.2", DAY)) == {log, low / "pyproject.toml"}

    (low / "pyproject.toml").write_text((low / "pyproject.toml").read_text().replace("+dev", ""))
    (sentence,) = ranges.stale(workspace, release.members(workspace))
    assert "low 0.1.1 is released" in sentence
    assert "tools/release.py low dev" in sentence


def test_a_changelog_that_has_nothing_to_tell_is_refused(release, workspace):
    (workspace / "packages" / "low" / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2029-01-01)\n")
    with pytest.raises(release.Refused, match="nothing to release"):
        release.edits(workspace, "low", "0.2.0", DAY)


def test_every_changelog_of_this_workspace_begins_with_what_is_to_be_released_or_with_the_present_version(
    release, root
):
    for name, table in release.members(root).items():
        log = next(root.glob(f"*/{name}/CHANGELOG.md")).read_text()
        version, state = re.search(r"^## (\S+) \((.*)\)$", log, re.MULTILINE).groups()
        if state == "unreleased":
            with contextlib.suppress(release.Refused):  # where siblings are to be released before it
                release.edits(root, name, version, DAY)
            assert release.Version(version) >= release.Version(release.Version(table["version"]).public)
        else:
            assert version == table["version"]


def test_all_packages_of_this_workspace_can_be_released_from_the_bottom_up(release, root, tmp_path):
    for file in [*root.glob("*/*/pyproject.toml"), *root.glob("*/*/CHANGELOG.md")]:
        (tmp_path / file.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.relative_to(root)).write_text(unreleased(file.read_text()))
    for name in bottom_up(release.members(tmp_path)):
        for path, text in release.edits(tmp_path, name, "7.0.0", DAY).items():
            path.write_text(text)
    projects = release.members(tmp_path)
    assert {table["version"] for table in projects.values()} == {"7.0.0"}
    asked = {str(one.specifier) for table in projects.values() for one in release.siblings(table, projects)}
    assert asked == {"<8.0,>=7.0.0"}  # each from the version on with which it was tested


def unreleased(text):
    """A changelog as it is before a release; other texts as they are."""
    return re.sub(r"^(# Changelog\n\n## \S+) .*$", r"\1 (unreleased)", text, flags=re.MULTILINE)


def bottom_up(projects):
    """The names of packages, each behind those that it asks for."""
    asks = {name: {Requirement(one).name for one in table["dependencies"]} for name, table in projects.items()}
    return TopologicalSorter({name: needed & projects.keys() for name, needed in asks.items()}).static_order()
