"""Each extra is explained where its package is, and whoever asks for one asks for one that exists."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {folder.name: folder for folder in [*ROOT.glob("packages/*"), *ROOT.glob("apps/*")]}
PROJECTS = {name: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for name, folder in FOLDERS.items()}
EXTRAS = {name: set(project.get("optional-dependencies", ())) for name, project in PROJECTS.items()}
IN_BRACKETS = re.compile(r"(composer-[a-z]+)\[([a-z0-9_,-]+)\]")


@pytest.mark.parametrize("name", [name for name, extras in EXTRAS.items() if extras])
def test_the_readme_of_a_package_names_each_of_its_extras(name):
    readme = (FOLDERS[name] / "README.md").read_text()
    named = {
        *re.findall(r"`([a-z0-9-]+)`", readme),
        *(extra for package, extras in IN_BRACKETS.findall(readme) if package == name for extra in extras.split(",")),
    }
    assert not EXTRAS[name] - named


def test_an_extra_in_brackets_is_one_of_its_package():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    texts = [*pages, *(file for folder in FOLDERS.values() for file in (folder / "README.md", *sources(folder)))]
    asked = {
        (str(file.relative_to(ROOT)), package, extra)
        for file in texts
        for package, extras in IN_BRACKETS.findall(file.read_text())
        for extra in extras.split(",")
    }
    assert len(asked) > 20
    assert not {one for one in asked if one[2] not in EXTRAS[one[1]]}


def test_an_error_about_a_missing_library_names_an_extra_that_exists():
    asked = {ask for folder in FOLDERS.values() for file in sources(folder) for ask in asked_extras(file)}
    assert len(asked) > 10
    assert not {(package, extra) for package, extra in asked if extra not in EXTRAS.get(package, {extra})}


@pytest.mark.parametrize("name", FOLDERS)
def test_an_error_about_a_missing_library_names_the_package_itself_or_one_that_it_needs(name):
    needed = {re.match(r"[\w-]+", one).group() for one in PROJECTS[name].get("dependencies", ())}
    asked = {package for file in sources(FOLDERS[name]) for package, _ in asked_extras(file)}
    assert asked <= {name, *needed}


def sources(folder):
    return (folder / "src").rglob("*.py")


def asked_extras(file):
    """Yield the distribution and the extra of each call that says what to install."""
    for call in ast.walk(ast.parse(file.read_text())):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if call.func.id == "MissingConditionalImportError" and isinstance(call.args[0], ast.Constant):
            distribution = named.get("distribution")
            yield "composer-suite" if distribution is None else distribution.value, call.args[0].value
        elif call.func.id == "require" and isinstance(named.get("extra"), ast.Constant):
            yield "composer-suite", named["extra"].value
