"""Generate the pages of the API reference: one for each public module, with the docstrings of its names.

The sources are read where that is possible: imports are slow, and imported values do not know where they are defined.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# The public modules of each distribution, which have a page each.
MODULES = {
    "composer-suite": [
        "composer",
        "composer.algorithms",
        "composer.callbacks",
        "composer.checkpoint",
        "composer.core",
        "composer.devices",
        "composer.distributed",
        "composer.functional",
        "composer.loggers",
        "composer.loss",
        "composer.metrics",
        "composer.models",
        "composer.optim",
        "composer.profiler",
        "composer.report",
        "composer.trainer.divergence",
        "composer.utils",
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
    "composer-dist": ["composer_dist", "composer_dist.dist", "composer_dist.reproducibility", "composer_dist.testing"],
    "composer-time": ["composer_time"],
}


def index_page() -> str:
    """Return the page that lists all modules."""
    lines = [
        "# API reference",
        "",
        "Scripts import from `composer`. The packages below it can be used without it; see the page of each package.",
        "Modules that are not listed here are private and may change in any release.",
        "",
    ]
    for distribution, modules in MODULES.items():
        folder = "apps" if modules[0] in ("composer", "composer_ckpt") else "packages"
        lines += [f"## {distribution}", "", f"[About this package](../{folder}/{distribution}/README.md)", ""]
        lines += ["| Module | Description |", "|---|---|"]
        lines += [
            f"| [`{module}`]({module}.md) | {_summary(ast.get_docstring(_source(module)))} |" for module in modules
        ]
        lines.append("")
    return "\n".join(lines)


def module_page(module: str) -> str:
    """Return the page of a module."""
    lines = [f"# {module}", "", ast.get_docstring(_source(module)) or "", "", *_overview(module), *_entries(module)]
    return "\n".join(lines)


def _overview(module: str) -> Iterator[str]:
    """Yield a table of the public names of a module, each with the first line of its docstring."""
    names = [name for name in _public_names(module) if name != "__version__"]
    if not names:
        return
    yield from ["| Name | Description |", "|---|---|"]
    for name in names:
        if source := _third_party(module, name):
            yield f"| `{name}` | From `{source}`. |"
        else:
            yield f"| [`{name}`]{_target(module, name)} | {_first_line(_owner(module, name), name)} |"
    yield ""


def _third_party(module: str, name: str) -> str | None:
    """Return the module of another library from which a name is imported, if it is."""
    owner = _owner(module, name)
    return None if any(_definitions(owner, name)) else _imports(owner).get(name)


def _target(module: str, name: str) -> str:
    """Return the target of a link to a name: a page, or a place in one."""
    address = f"{_owner(module, name)}.{name}"
    is_page = any(address in modules for modules in MODULES.values())
    return f"({address}.md)" if is_page else f"[{_address(module, name)}]"


def _summary(docstring: str | None) -> str:
    """Return the first paragraph of a docstring as a table cell."""
    return " ".join((docstring or "").partition("\n\n")[0].split()).replace("|", "\\|")


def _first_line(owner: str, name: str) -> str:
    """Return the first line of the docstring of what a module defines, or is."""
    if _file(f"{owner}.{name}").exists():
        docstring = ast.get_docstring(_source(f"{owner}.{name}"))
    else:
        docstring = next(filter(None, map(_docstring, _definitions(owner, name))), None)
    return _summary(docstring)


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
    is_below = _family(owner) != _family(module)
    hidden = _file(f"{module}.{name}").exists()  # by the module of that name, which would be shown
    return f"{owner if is_below or hidden else module}.{name}"


def _entries(module: str) -> Iterator[str]:
    """Yield a place for the docstring of each name that no page of a package below describes."""
    for name in _public_names(module):
        if name == "__version__":
            yield from ["`__version__` is the version of the installed package.", ""]
        elif _is_described_by(module, name) and not _third_party(module, name):
            yield from [f"::: {_address(module, name)}", "    options: {heading_level: 2}", ""]


def _is_described_by(module: str, name: str) -> bool:
    owner = _owner(module, name)
    return _family(owner) == _family(module) or f"{owner}.{name}" not in _described_below(_family(owner))


@cache
def _described_below(family: str) -> set[str]:
    """Return the names that the pages of one package describe, and the modules that have a page."""
    modules = [module for modules in MODULES.values() for module in modules if _family(module) == family]
    names = {f"{_owner(module, name)}.{name}" for module in modules for name in _public_names(module)}
    return names.union(modules)


def _family(module: str) -> str:
    return module.partition(".")[0]


@cache
def _public_names(module: str) -> list[str]:
    lists = [one.value for one in _source(module).body if isinstance(one, ast.Assign) and _is_public_list(one)]
    try:
        return ast.literal_eval(lists[0]) if lists else []
    except ValueError:  # it is computed
        return list(import_module(module).__all__)


def _is_public_list(statement: ast.Assign) -> bool:
    return ast.unparse(statement.targets[0]) == "__all__"


def _owner(module: str, name: str) -> str:
    """Return the module that defines a name."""
    imports = _imports(module)
    home = imports.get(name, imports.get("*"))
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
    package = place / "__init__.py"
    return package if package.exists() else place.with_suffix(".py")
