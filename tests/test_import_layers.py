"""The import contracts between the packages hold, and notice when one is broken."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

BREAKS = {
    "composer_time/time.py": ("import torch\n", "composer_time.time -> torch"),
    "composer_events/event.py": (
        "import composer_algorithms\n",
        "composer_events is not allowed to import composer_algorithms",
    ),
    "composer_optim/decoupled.py": ("import composer_algorithms\n", "composer_optim is not allowed to import"),
    "composer_dist/env.py": (
        "def f():\n    from composer_events import Event\n    return Event\n",
        "composer_dist is not allowed to import",
    ),
}


@pytest.fixture
def lint_floors(root, tmp_path):
    """Return a function that checks the import floors of a copy of all packages."""
    for source in [*root.glob("packages/*/src/*"), *root.glob("apps/*/src/*")]:
        shutil.copytree(source, tmp_path / source.name)

    def lint():
        lint_imports = [f"{sys.prefix}/bin/lint-imports", "--no-cache", "--config", str(root / "pyproject.toml")]
        # The copies come first on the path, so they are what is read.
        run = subprocess.run(
            lint_imports, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
        )
        return run.returncode, run.stdout + run.stderr

    return lint


def test_each_package_imports_only_floors_below_its_own(lint_floors):
    status, said = lint_floors()
    assert status == 0, said


@pytest.mark.parametrize("file", BREAKS)
def test_an_import_through_a_wall_is_named(lint_floors, tmp_path, file):
    line, named = BREAKS[file]
    with (tmp_path / file).open("a") as source:
        source.write(line)
    status, said = lint_floors()
    assert status == 1
    assert named in " ".join(said.split())


@pytest.mark.parametrize("package", ["composer_time", "composer_events"])
def test_the_lowest_floors_load_neither_torch_nor_numpy(package):
    check = f"import sys, {package}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_undeclared_imports_are_named(root, tmp_path):
    package = tmp_path / "composer-time"
    shutil.copytree(root / "packages/composer-time", package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "src/composer_time/time.py").open("a") as source:
        source.write("import torch\n")
    run = subprocess.run([f"{sys.prefix}/bin/deptry", "src"], cwd=package, capture_output=True, text=True)
    assert run.returncode == 1
    assert "'torch' imported but" in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("composer_checkpoint.uris", "get_file"),
        ("composer_checkpoint.transfer", "upload_file"),
        ("composer_checkpoint.remote_uploader_downloader", "RemoteUploaderDownloader"),
        ("composer_fsdp.fsdp1_settings", "SHARDING_MAP"),
        ("composer_fsdp.meta_apply", "meta_safe_apply"),
        ("composer_events.value_copies", "detached_copy"),
    ],
)
def test_documented_modules_stay_importable(module, name):
    """`from composer_checkpoint.uris import get_file`, from the README, failed after modules had been merged."""
    assert name in importlib.import_module(module).__all__
    assert getattr(importlib.import_module(module), name)


def test_the_diagram_of_the_packages_shows_what_they_depend_on(root):
    """The diagram had an arrow to composer-checkpoint from a package that it does not import."""
    needs = {}
    for file in [*root.glob("packages/*/pyproject.toml"), *root.glob("apps/*/pyproject.toml")]:
        project = tomllib.loads(file.read_text())["project"]
        found = [re.match(r"composer-(\w+)", dependency) for dependency in project["dependencies"]]
        needs[project["name"].removeprefix("composer-")] = {match[1] for match in found if match}

    def below(name):
        return needs[name].union(*map(below, needs[name]))

    # What another dependency brings along has no arrow of its own.
    direct = {
        (lower, name)
        for name, lowers in needs.items()
        for lower in lowers
        if not any(lower in below(other) for other in lowers)
    }
    assert set(re.findall(r"^    (\w+) --> (\w+)$", (root / "README.md").read_text(), re.MULTILINE)) == direct
