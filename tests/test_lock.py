import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

FULL = """version = 1
revision = 5
requires-python = ">=3.11"
resolution-markers = [
    "extra == 'group-9-composer-x-new'",
    "python_full_version < '3.12'",
]
conflicts = [[
    { package = "composer-x", group = "new" },
    { package = "composer-x", group = "old" },
]]

[manifest]
members = [
    "composer-x",
]

[manifest.dependency-groups]
dev = [{ name = "idna", specifier = ">=3" }]

[[package]]
name = "idna"
version = "3.20"
source = { registry = "https://mirror.example/simple" }
resolution-markers = [
    "python_full_version < '3.12'",
]
sdist = { url = "https://files.example/a/idna-3.20.tar.gz", hash = "sha256:aa", size = 12, upload-time = "2026-01-01T00:00:00Z" }
wheels = [
    { url = "https://files.example/b/idna-3.20-py3-none-any.whl", hash = "sha256:bb", size = 3, upload-time = "2026-01-01T00:00:00Z" },
    { url = "https://files.example/b/idna-3.20-cp311-win_amd64.whl", hash = "sha256:cc" },
]

[[package]]
name = "composer-x"
version = "0.1.0"
source = { editable = "packages/composer-x" }
dependencies = [
    { name = "idna", marker = "sys_platform == 'linux'" },
]
"""  # noqa: E501 - the lines of a real lock are as long


@pytest.fixture(scope="module")
def lock(tool):
    return tool("lock")


def test_committed_lock_holds_no_address(root, lock):
    assert lock.addresses((root / "uv.lock").read_text()) == []


def test_strip_removes_every_address_and_keeps_all_else(lock):
    before, after = tomllib.loads(FULL), tomllib.loads(lock.strip(FULL))
    assert "://" not in lock.strip(FULL)
    assert after["conflicts"] == before["conflicts"]
    assert after["resolution-markers"] == before["resolution-markers"]
    assert after["manifest"]["members"] == before["manifest"]["members"]
    assert after["package"][1] == before["package"][1]
    idna = after["package"][0]
    assert idna["resolution-markers"] == before["package"][0]["resolution-markers"]
    assert idna["sdist"] == {"filename": "idna-3.20.tar.gz", "hash": "sha256:aa"}
    assert [wheel["hash"] for wheel in idna["wheels"]] == ["sha256:bb", "sha256:cc"]


def test_strip_twice_is_strip_once(lock):
    assert lock.strip(lock.strip(FULL)) == lock.strip(FULL)


@pytest.mark.parametrize(
    ("before", "constraints"),
    [
        (FULL, ["addresses-removed"]),
        (FULL.replace("[manifest]\n", '[manifest]\nconstraints = [{ name = "a" }]\n'), ["a", "addresses-removed"]),
        (FULL.replace("[manifest]\n", "[manifest]\nconstraints = []\n"), ["addresses-removed"]),
        (
            FULL.replace("[manifest]\n", '[manifest]\nconstraints = [\n    { name = "a" },\n]\n'),
            ["a", "addresses-removed"],
        ),
        ('version = 1\n\n[[package]]\nname = "a"\nversion = "1"\n', ["addresses-removed"]),
    ],
    ids=["no list", "a list", "an empty list", "a list over lines", "no table"],
)
def test_strip_leaves_the_mark_that_makes_uv_fill_the_addresses_in(lock, before, constraints):
    after = tomllib.loads(lock.strip(before))
    assert [entry["name"] for entry in after["manifest"]["constraints"]] == constraints


@pytest.mark.parametrize("tail", ["?sig=a/b", "#sha256=aa", "?sig=a/b#sha256=aa/b"])
def test_a_filename_ends_before_query_and_fragment(lock, tail):
    assert lock.strip(FULL.replace("idna-3.20.tar.gz", f"idna-3.20.tar.gz{tail}")) == lock.strip(FULL)


def test_a_filename_is_written_as_the_file_is_called(lock):
    stripped = tomllib.loads(lock.strip(FULL.replace("idna-3.20.tar.gz", "idna-3.20%2Bcpu.tar.gz")))
    assert stripped["package"][0]["sdist"]["filename"] == "idna-3.20+cpu.tar.gz"


def test_strip_writes_the_same_for_lines_that_end_as_on_windows(lock):
    assert lock.strip(FULL.replace("\n", "\r\n")) == lock.strip(FULL)


REFUSED = {
    "a merge conflict": f"<<<<<<< ours\n{FULL}=======\n>>>>>>> theirs\n",
    "a file without hash": FULL.replace(', hash = "sha256:cc"', ""),
    "a git source": FULL.replace(
        '{ registry = "https://mirror.example/simple" }', '{ git = "https://git.example/idna#00" }'
    ),
    "a direct URL": FULL.replace(
        '{ registry = "https://mirror.example/simple" }', '{ url = "https://x.example/idna.whl" }'
    ),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_strip_and_clean_refuse_and_write_nothing(lock, text, tmp_path, monkeypatch, capsys):
    (tmp_path / "uv.lock").write_text(text)
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    for command in ("strip", "clean"):
        monkeypatch.setattr("sys.argv", ["lock.py", command])
        assert lock.main() == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "type `" in printed.err
    assert (tmp_path / "uv.lock").read_text() == text


def test_an_address_is_found_with_its_line(lock):
    assert lock.addresses("a\nb = 'https://x'\n") == ["line 2: b = 'https://x'"]


def test_equal_locks_do_not_differ(lock):
    assert lock.differences(lock.strip(FULL), FULL) == []


MEMBER = """
[[package]]
name = "composer-x"
version = "0.1.0"
source = { editable = "packages/composer-x" }
"""
FILES = FULL[FULL.index("sdist = ") : FULL.index('[[package]]\nname = "composer-x"')]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("3.20", "3.201"), "idna 3.201"),
        (("sha256:bb", "sha256:00"), "is locked with sha256:00, the registry says sha256:bb"),
        (("idna-3.20-py3", "idna-3.19-py3"), "is gone from the registry"),
        (("sys_platform == 'linux'", "sys_platform == 'win32'"), "composer-x 0.1.0: dependencies is"),
        (('registry = "index"', 'registry = "evil"'), "source is {'registry': 'evil'}, fresh {'registry': 'index'}"),
        (("editable =", "virtual ="), "source is {'virtual'"),
        (('requires-python = ">=3.11"', 'requires-python = ">=3.12"'), "requires-python is >=3.12, fresh >=3.11"),
        (('group = "new"', 'group = "newer"'), "the lock: conflicts is"),
        (("extra == 'group-9-composer-x-new'", "extra == 'x'"), "the lock: resolution-markers is"),
        (('members = [\n    "composer-x",\n]', "members = []"), "the manifest: members is []"),
        (('specifier = ">=3"', 'specifier = ">=2"'), "the manifest: dependency-groups is"),
        ((MEMBER, MEMBER + MEMBER), "composer-x 0.1.0 is listed 2 times"),
    ],
)
def test_a_tampered_lock_differs_from_a_fresh_one(lock, change, said):
    committed = lock.strip(FULL)
    assert change[0] in committed
    assert any(said in line for line in lock.differences(committed.replace(*change), FULL))


def test_a_lock_without_the_files_of_a_package_differs_from_a_fresh_one(lock):
    [line] = lock.differences(lock.strip(FULL.replace(FILES, "")), FULL)
    assert "none of its files is locked, the registry has 3" in line


def test_a_second_entry_for_a_file_cannot_hide_its_hash(lock):
    wheel = '    { filename = "idna-3.20-py3-none-any.whl", hash = "sha256:bb" },\n'
    committed = lock.strip(FULL)
    assert wheel in committed
    [line] = lock.differences(committed.replace(wheel, wheel.replace("bb", "00") + wheel), FULL)
    assert "is locked with sha256:00" in line


def test_files_that_only_the_registry_has_are_no_difference(lock):
    added = FULL.replace(
        "wheels = [\n", 'wheels = [\n    { url = "https://x/idna-3.20-cp315.whl", hash = "sha256:dd" },\n'
    )
    assert lock.differences(lock.strip(FULL), added) == []


@pytest.fixture
def copy(root, tmp_path, monkeypatch):
    """Copy the program and the lock into a folder that is no clone, nor inside one."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # git sets them for hooks
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "outer" / "a project"
    (folder / "tools").mkdir(parents=True)
    for name in ("tools/lock.py", "uv.lock", "pyproject.toml"):
        shutil.copy(root / name, folder / name)
    return folder


def run(folder, *arguments, **environment):
    command = [sys.executable, folder / "tools" / "lock.py", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["check", "--uv", "nonexist"], {}, "nonexist cannot be run"),
        (["check", "--uv", "nonexist"], {"PATH": "/nonexistent"}, "nonexist cannot be run"),
        (["setup"], {"PATH": "/nonexistent"}, "git cannot be run"),
        pytest.param(["setup"], {}, "in a clone", marks=pytest.mark.skipif(not shutil.which("git"), reason="no git")),
    ],
    ids=["no uv", "neither git nor uv", "no git", "no clone"],
)
def test_what_is_missing_is_said_in_one_line(copy, arguments, environment, said):
    ended = run(copy, *arguments, **environment)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["strip", "check"])
def test_a_missing_lock_is_said_in_one_line(copy, command):
    (copy / "uv.lock").unlink()
    ended = run(copy, command)
    assert ended.returncode == 1
    assert ended.stderr.startswith("tools/lock.py: there is no uv.lock in")
    assert len(ended.stderr.splitlines()) == 1


def test_check_refuses_a_lock_without_the_mark(copy, lock):
    stripped = lock.strip(FULL)
    (copy / "uv.lock").write_text(stripped.replace(f"constraints = [{lock.MARK}]\n", ""))
    ended = run(copy, "check", "--uv", "nonexist")
    assert ended.returncode == 1
    assert "type `make lock`" in ended.stdout


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_after_setup_git_strips_the_lock_also_in_a_subfolder_of_a_clone(copy, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # the filter calls python3
    subprocess.run(["git", "init", "-q", copy.parent], check=True)
    (copy / ".gitattributes").write_text("uv.lock filter=uvlock\n")
    (copy / "uv.lock").write_text(FULL)
    assert run(copy, "setup").returncode == 0
    subprocess.run(["git", "-C", copy, "add", "uv.lock"], check=True)
    (copy / "uv.lock").unlink()  # check reads what is staged
    assert "nonexist cannot be run" in run(copy, "check", "--uv", "nonexist").stderr


def test_image_resolves_the_lock_with_the_uv_of_the_makefile(root):
    (version,) = re.findall(r"^UV_VERSION := (\S+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert f"uv=={version}\n" in (root / "Containerfile").read_text()
