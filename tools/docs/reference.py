"""Write the pages of the reference: for each public name of a package or module, the place where its docstring goes.

Names come from `__all__`. Where each is defined is read in the sources, since imported objects do not know it.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# By distribution: its import name, then the modules that have a page of their own.
MODULES = {
    "composer-suite": [
        "composer",
        "composer.callbacks",
        "composer.loggers",
        "composer.profiler",
        "composer.report",
        "composer.trainer.divergence",
    ],
    "composer-ckpt": ["composer_ckpt", "composer_ckpt.cli"],
    "composer-hf": ["composer_hf"],
    "composer-checkpoint": [
        "composer_checkpoint",
        "composer_checkpoint.bridges.hugging_face",
        "composer_checkpoint.bridges.lightning",
        "composer_checkpoint.modular",
        "composer_checkpoint.remote_uploader_downloader",
        "composer_checkpoint.sharded",
        "composer_checkpoint.stores",
        "composer_checkpoint.tensors",
        "composer_checkpoint.transfer",
        "composer_checkpoint.uris",
    ],
    "composer-algorithms": [
        "composer_algorithms",
        "composer_algorithms.bridges.accelerate",
        "composer_algorithms.bridges.hf",
        "composer_algorithms.bridges.lightning",
        "composer_algorithms.bridges.loop",
        "composer_algorithms.functional",
        "composer_algorithms.module_surgery",
    ],
    "composer-fsdp": ["composer_fsdp", "composer_fsdp.fsdp1_settings", "composer_fsdp.meta_apply"],
    "composer-optim": ["composer_optim"],
    "composer-models": ["composer_models"],
    "composer-events": [
        "composer_events",
        "composer_events.data_position",
        "composer_events.arguments",
        "composer_events.passes",
        "composer_events.value_copies",
    ],
    "composer-dist": ["composer_dist", "composer_dist.dist", "composer_dist.testing"],
    "composer-time": ["composer_time"],
}


def reference(distribution: str) -> str:
    """Return the part of a package's page that its docstrings fill: all public names in a line each, then its own."""
    package, *modules = MODULES[distribution]
    lines = ["## Public names", "", f"From `{package}`:", "", *_overview(package)]
    for module in modules:
        lines += [f"From [`{module}`]({module}.md):", "", *_overview(module)]
    return "\n".join([*lines, f"## Reference of `{package}`", "", *_entries(package, level=3)])


def module_page(module: str) -> str:
    """Return the page of a module."""
    title = module.partition(".")[2]  # short, for the navigation
    introduction = [f"# {title}", "", f"`{module}`", "", ast.get_docstring(_source(module)) or "", ""]
    return "\n".join([*introduction, *_entries(module, level=2)])


def _overview(module: str) -> Iterator[str]:
    """Yield a table of a module's public names, each with the first line of its docstring."""
    names = [name for name in _public_names(module) if name != "__version__"]
    if not names:
        return
    yield from ["| name | |", "|---|---|"]
    for name in names:
        said = _first_line(_owner(module, name), name).replace("|", "\\|")
        yield f"| [`{name}`][{_address(module, name)}] | {said} |"
    yield ""


def _first_line(owner: str, name: str) -> str:
    """Return the first line of the docstring of what a module defines, or is."""
    if _file(f"{owner}.{name}").exists():
        docstring = ast.get_docstring(_source(f"{owner}.{name}"))
    else:
        docstring = next(filter(None, map(_docstring, _definitions(owner, name))), None)
    return (docstring or "").partition("\n")[0]


def _definitions(owner: str, name: str) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    """Yield the statements that define a name, each with the one behind it, in which a docstring may stand."""
    body = _source(owner).body
    for statement, behind in zip(body, [*body[1:], None], strict=True):
        defined = [getattr(statement, "name", None)]
        for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
            defined.append(getattr(target, "id", None))
        if name in defined:
            yield statement, behind


def _docstring(definition: tuple[ast.stmt, ast.stmt | None]) -> str | None:
    statement, behind = definition
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ast.get_docstring(statement)
    if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant) and isinstance(behind.value.value, str):
        return behind.value.value
    return None


def _address(module: str, name: str) -> str:
    """Return under which name the reference shows what a module offers."""
    owner = _owner(module, name)
    is_below = owner.partition(".")[0] != module.partition(".")[0]
    hidden = _file(f"{module}.{name}").exists()  # by the module of that name, which would be shown
    return f"{owner if is_below or hidden else module}.{name}"


def _entries(module: str, level: int) -> Iterator[str]:
    """Yield a place for the docstring of each name that the module's package owns, then where the others are."""
    family = module.partition(".")[0]
    others = []
    for name in _public_names(module):
        owner = _owner(module, name)
        if name == "__version__":
            yield from ["`__version__` is the version of the package that is installed.", ""]
        elif owner.partition(".")[0] == family:
            yield from [f"::: {_address(module, name)}", f"    options: {{heading_level: {level}}}", ""]
        else:
            others.append(f"- `{name}`: [`{owner}.{name}`][{owner}.{name}]")
    if others:
        yield from [f"{'#' * level} Names of packages below", "", *others, ""]


def _public_names(module: str) -> list[str]:
    return list(getattr(import_module(module), "__all__", ()))


def _owner(module: str, name: str) -> str:
    """Return the module that defines a name."""
    home = _imports(module).get(name)
    return _owner(home, name) if home is not None and home.startswith("composer") else module


@cache
def _imports(module: str) -> dict[str, str]:
    """Return from where a module imports each name, the imports for type checkers included."""
    statements = [one for one in ast.walk(_source(module)) if isinstance(one, ast.ImportFrom)]
    return {alias.asname or alias.name: one.module for one in statements for alias in one.names if one.module}


@cache
def _source(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text())


def _file(module: str) -> Path:
    package, *inner = module.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin).parent.joinpath(*inner)
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
