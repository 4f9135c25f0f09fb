"""Installation from a clone: every `pip install` line of the documentation, and the environment of `make train`."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("apps/*/*.md")]
BLOCK = re.compile(r"^```.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REQUIREMENT = re.compile(r"(?P<name>[a-z./*-]+)(\[(?P<extras>[a-z0-9,_-]+)\])?")


def commands(page):
    """Yield the arguments of each `pip install` in a code block or in inline code."""
    lines = [line.partition(" # ")[0] for block in BLOCK.findall(page) for line in block.splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", page))]
    for line in [*lines, *spans]:
        if re.match(r"((uv|python3? -m) )?pip install ", line):
            yield shlex.split(line.partition("pip install ")[2])


INSTALLS = sorted(
    {
        shlex.join(arguments)
        for page in PAGES
        for arguments in commands(page.read_text())
        if any(re.match(r"composer-|\./", argument) for argument in arguments) and "..." not in " ".join(arguments)
    }
)


@pytest.fixture(scope="session")
def uv():
    """Return the uv that made the environment."""
    found = os.environ.get("UV") or shutil.which("uv", path=f"{ROOT}/.tools/bin{os.pathsep}{os.environ['PATH']}")
    assert found, "there is no uv: run `make test`, or set UV to its path"
    return found


@pytest.fixture(scope="session")
def clone(tool, uv, tmp_path_factory):
    """Return a folder that has the wheels where `make dist` puts them."""
    folder = tmp_path_factory.mktemp("clone")
    tool("dist").build(uv, folder / "dist")
    return folder


@pytest.fixture(scope="session")
def pip(uv, tmp_path_factory):
    """Return a function that runs pip for an empty environment, without a registry."""
    python = tmp_path_factory.mktemp("environment") / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(python.parent.parent)], check=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    variables |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(*arguments, cwd):
        command = [sys._base_executable, "-m", "pip", "--python", str(python), *arguments]
        return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=300)

    run.python = python
    return run


def test_lines_are_found():
    assert "--find-links dist composer-suite" in INSTALLS
    assert len(INSTALLS) > 12


@pytest.mark.parametrize("line", [line for line in INSTALLS if "./" not in line])
def test_a_line_finds_its_packages_and_extras_among_the_wheels(pip, clone, line):
    # Packages of others come from a registry, as do the dependencies.
    ours = [argument for argument in shlex.split(line) if argument.startswith(("-", "dist", "composer-"))]
    found = pip("install", "-q", "--dry-run", "--report", "-", "--no-deps", *ours, cwd=clone)
    assert found.returncode == 0, found.stderr
    packages = json.loads(found.stdout)["install"]
    assert packages
    for package in packages:
        assert set(package.get("requested_extras", ())) <= set(package["metadata"].get("provides_extra", ()))


@pytest.mark.parametrize("line", [line for line in INSTALLS if "./" in line])
def test_a_line_of_folders_names_all_packages_that_they_need_and_extras_that_exist(line):
    given, needed = {}, set()
    for argument in shlex.split(line):
        asked = REQUIREMENT.fullmatch(argument)
        for folder in ROOT.glob(asked["name"]):
            project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
            given[project["name"]] = project
            optional = project.get("optional-dependencies", {})
            extras = asked["extras"].split(",") if asked["extras"] else []
            needed |= {*project["dependencies"], *(line for extra in extras for line in optional[extra])}
    names = {re.match(r"[\w-]+", one)[0] for one in needed}
    assert "composer-suite" in given
    assert {name for name in names if name.startswith("composer-")} <= given.keys()


def test_a_wheel_without_dependencies_is_installed_and_works(pip, clone):
    installed = pip("install", "--find-links", "dist", "composer-time", cwd=clone)
    assert installed.returncode == 0, installed.stderr
    program = "from composer_time import Time; print(Time.from_timestring('3ba'))"
    ran = subprocess.run([pip.python, "-c", program], cwd=clone, capture_output=True, text=True, timeout=60)
    assert "3" in ran.stdout, ran.stderr


def test_make_train_installs_what_the_example_imports_and_no_tools(uv):
    rehearsed = ["make", "-n", "-B", ".venv/.train", f"UV={uv}"]
    planned = subprocess.run(rehearsed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [export] = [line for line in planned.splitlines() if " export " in line]
    listed = subprocess.run(
        shlex.split(export.partition(" -o ")[0]), cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = set(re.findall(r"^([a-z0-9-]+)==", listed.stdout, re.MULTILINE))
    assert names >= {"torch", "torchvision", "torchmetrics", "scikit-learn"}
    assert not names & {"pytest", "ruff", "transformers", "mlflow", "mosaicml-streaming"}
    assert "composer-hf" not in planned


PYLOCK = """#!/bin/sh
cat <<END
[[packages]]
name = "plum"
version = "1"
wheels = [{ url = "plum.whl", size = 2_900_000_000 }]
[[packages]]
name = "pear"
version = "1"
sdist = { url = "pear.tar.gz", size = 100_000_000 }
[[packages]]
name = "fig"
version = "1"
wheels = [{ url = "fig.whl" }]
[[packages]]
name = "pytest"
version = "%s"
wheels = [{ url = "pytest.whl", size = 5_000_000_000 }]
END
"""


def test_the_size_of_the_packages_that_are_missing_is_printed(tool, tmp_path, monkeypatch, capsys):
    fake = tmp_path / "uv"
    fake.write_text(PYLOCK % pytest.__version__)
    fake.chmod(0o755)
    monkeypatch.setattr("sys.argv", ["download_size.py", "--uv", str(fake), "lock.txt"])
    tool("download_size").main()
    printed = capsys.readouterr().out
    assert printed.startswith("Installing 3 packages: up to 3.0 GB to download")
    assert "about 4 min at" in printed
