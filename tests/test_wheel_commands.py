"""The commands that build wheels say at once, in a line, which of their arguments is wrong."""

import sys

import pytest


@pytest.fixture
def run(tool, monkeypatch, root, capsys):
    """Run a program of tools/ on its arguments, and return its exit status and its errors."""
    monkeypatch.syspath_prepend(str(root / "tools"))

    def call(name, *arguments):
        monkeypatch.setattr("sys.argv", [f"{name}.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            tool(name).main()
        return stopped.value.code, capsys.readouterr().err

    return call


@pytest.mark.parametrize("name", ["alone", "dist"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--uv", "nowhere/uv"], "'nowhere/uv' is no program that can be run."),
        ([], "'uv' is no program on the PATH that can be run."),
    ],
)
def test_a_uv_that_is_not_there_is_told_before_anything_is_built(name, arguments, words, run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, errors = run(name, *arguments)
    assert code == 2
    assert f"{name}.py: error: argument --uv: {words}" in errors
    assert "`make alone` or `make dist`" in errors
    assert "--uv PATH" in errors


def test_a_package_that_is_not_there_is_told_with_those_that_are(run):
    code, errors = run("alone", "--uv", sys.executable, "composer-time", "foo")
    assert code == 2
    assert "'foo' is no package of this workspace. Name some of " in errors
    assert "composer-time" in errors.partition("Name some of")[2]
    assert "composer-ckpt" in errors
