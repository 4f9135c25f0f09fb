import datetime
import tomllib

import pytest

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
        ("low", "0.0.9", "0.0.9 is not newer than 0.1.0"),
        ("low", "0.1.0", "0.1.0 is not newer than 0.1.0"),
    ],
)
def test_what_cannot_be_released_is_refused(release, workspace, name, version, said):
    with pytest.raises(release.Refused, match=said):
        release.edits(workspace, name, version, DAY)


def test_a_changelog_that_has_nothing_to_tell_is_refused(release, workspace):
    (workspace / "packages" / "low" / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2029-01-01)\n")
    with pytest.raises(release.Refused, match="nothing to release"):
        release.edits(workspace, "low", "0.2.0", DAY)


def test_every_package_of_this_workspace_could_be_released(release, root):
    for name, table in release.members(root).items():
        assert release.edits(root, name, table["version"], DAY)
