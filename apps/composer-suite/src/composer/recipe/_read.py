"""Reading of recipe files: YAML without code, with the place of each value for messages."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.constructor import ConstructorError, SafeConstructor

Key = tuple[str | int, ...]

_MOST_BYTES = 1_000_000
_MOST_VALUES = 100_000  # after the expansion of aliases
_DEEPEST = 50
_INCLUDE = "include"
_CORE = "tag:yaml.org,2002:"
OVERRIDE = "the command line"
"""The place of values that were given on the command line."""

# Names in other configuration files of language models, with ours.
RENAMED = {
    "optimizer": "optimizers",
    "scheduler": "schedulers",
    "train_loader": "train_dataloader",
    "eval_loader": "eval_dataloader",
    "eval_loaders": "eval_dataloader",
    "evaluators": "eval_dataloader",
}

# YAML 1.1 takes 3e-4 for text. Dates are left as text.
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


class RecipeError(ValueError):
    """A recipe that is not valid. The message begins with file and line."""


class Recipe:
    """The values of a recipe, and where each of them was written.

    Attributes:
        values: Mappings, sequences, text, numbers, booleans and `None`, after includes, overrides and references.
        variables: Names of top-level values that others refer to.
    """

    def __init__(self, values: dict[str, Any], places: Mapping[Key, str], variables: Iterable[str] = ()) -> None:
        self.values = values
        self.variables = frozenset(variables)
        self._places = places

    def place(self, key: Key) -> str:
        """Return file and line of a value, or of the nearest one that contains it."""
        while key not in self._places and key:
            key = key[:-1]
        return self._places.get(key, "the recipe")

    def named(self, key: Key) -> Key:
        """Return the key of a component's name, if it is not the key of the component itself."""
        return next((each for each in ((*key, "_target_"), (*key, "name")) if each in self._places), key)

    def error(self, key: Key, problem: str) -> RecipeError:
        """Return an error about a value."""
        return RecipeError(f"{self.place(key)}: {spell(key)}{': ' if key else ''}{problem}".rstrip())


def read(path: str | Path, overrides: Sequence[str] = (), names: Collection[str] = ()) -> Recipe:
    """Read a recipe file.

    Args:
        path: The file.
        overrides: Changes such as `'optimizers.lr=3e-4'`, whose values are YAML. A name without a dot that is not among
            `names` may also be the end of the only key that ends with it: `'lr=3e-4'`.
        names: Names that every recipe may have at the top level.

    Raises:
        RecipeError: If the file is not valid.
    """
    places: dict[Key, str] = {}
    values = _read_file(Path(path), places, ())
    found = _REFERENCE.findall(repr(values))
    for override in overrides:
        _override(values, places, override, names)
    found += _REFERENCE.findall(repr(values))
    for key, value in _leaves(values, ()):
        if isinstance(value, str) and _calls_resolver(value):
            raise Recipe(values, places).error(key, f"{value!r} is not a reference to a value of the recipe.")
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(values), resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        where = getattr(error, "full_key", None) or ""
        parts = tuple(int(part) if part.isdecimal() else part for part in re.split(r"[.\[\]]+", where) if part)
        raise Recipe(values, places).error(parts, str(error).partition("\n")[0] + ".") from None
    return Recipe(resolved, places, (reference.split(".")[0] for reference in found))


def _calls_resolver(text: str) -> bool:
    """Return whether text calls a function of OmegaConf, such as `${oc.env:HOME}` for an environment variable."""
    depth = 0
    for token in re.findall(r"\$\{|[{}:]", text):
        if token == ":" and depth:
            return True
        depth += token == "${" or (token == "{" and depth > 0)
        depth -= token == "}" and depth > 0
    return False


class _Dumper(yaml.SafeDumper):
    """Writes text so that `read` takes it for the same text."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _FLOAT.fullmatch(text) else None
    return dumper.represent_scalar(f"{_CORE}str", text.replace("${", "\\${"), style=style)


_Dumper.add_representer(str, _represent)


def dump(values: Mapping[str, Any]) -> str:
    """Return values as YAML, such that `read` returns the same."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def spell(key: Key) -> str:
    """Return a key as it is written on the command line."""
    return ".".join(map(str, key))


def nearest(name: object, names: Iterable[str]) -> str:
    """Return a hint to the name that was probably meant, or to all of them if they are few."""
    known = sorted(names)
    if found := difflib.get_close_matches(str(name), known, 1):
        return f"Did you mean {found[0]!r}?"
    return f"Known are {', '.join(known)}." if len(known) <= 40 else ""


def _read_file(path: Path, places: dict[Key, str], including: tuple[Path, ...]) -> dict[str, Any]:
    by = f"{including[-1]}: {_INCLUDE}: " if including else ""
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"{by}{str(path)!r} must be a file with the ending .yaml or .yml.")
    if path.resolve() in [each.resolve() for each in including]:
        raise RecipeError(f"{by}{path} includes itself, by {' and '.join(map(str, including))}.")
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{by}{path} cannot be read: {error.strerror}.") from None
    if len(content) > _MOST_BYTES:
        raise RecipeError(f"{path} is larger than {_MOST_BYTES:,} bytes, which is too large for a recipe.")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}:{line}: is not text in UTF-8.") from None
    own_places: dict[Key, str] = {}
    own = _parse(text, str(path), own_places)
    if own is None:
        own = {}
    if not isinstance(own, dict):
        raise RecipeError(f"{path}:1: must be a mapping from names to values; got a {_kind(own)}.")
    own = cast("dict[str, Any]", own)
    values: dict[str, Any] = {}
    included: Any = own.pop(_INCLUDE, None) or []
    paths = cast("list[Any]", included if isinstance(included, list) else [included])
    if not all(isinstance(name, str) for name in paths):
        raise Recipe(own, own_places).error((_INCLUDE,), f"must be a path or a list of paths; got {included!r}.")
    for name in paths:
        _merge(values, _read_file(path.parent / name, places, (*including, path)))
    _merge(values, own)
    places |= own_places
    return values


def _parse(text: str, source: str, places: dict[Key, str], *, first: Key = ()) -> Any:
    """Return the value of a YAML document, and store the place of each part."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if node is None else _Reader(source, places).value(node, first, ())
    except yaml.MarkedYAMLError as error:
        # The start of what does not end, such as a quote.
        mark = error.context_mark if str(error.context).startswith("while scanning") else None
        mark = mark or error.problem_mark
        hint = " Indent with spaces." if "'\\t'" in str(error.problem) else ""
        raise RecipeError(f"{_at(source, 1 if mark is None else mark.line + 1)}: {error.problem}.{hint}") from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise RecipeError(f"{source}: {str(error).splitlines()[0]}.") from None
    except RecursionError:
        raise RecipeError(f"{source}: is nested too deeply.") from None


def _at(source: str, line: int) -> str:
    return source if source == OVERRIDE else f"{source}:{line}"


class _Reader(SafeConstructor):
    """Construct plain values only, and store their places."""

    def __init__(self, source: str, places: dict[Key, str]) -> None:
        super().__init__()
        self._source = source
        self._places = places
        self._count = 0

    def value(self, node: yaml.Node, key: Key, parents: tuple[int, ...]) -> Any:
        """Return the value of a node."""
        self._places[key] = _at(self._source, node.start_mark.line + 1)
        self._count += 1
        if id(node) in parents:
            self._fail(node, "the value contains itself")
        if self._count > _MOST_VALUES or len(parents) > _DEEPEST:
            self._fail(node, f"more than {_MOST_VALUES:,} values or {_DEEPEST} levels are too many for a recipe")
        parents = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            self.flatten_mapping(node)  # the merges `<<: *base`, which come first
            return {
                name: self.value(child, (*key, name), parents)
                for name, child in ((self._name(name), child) for name, child in node.value)
            }
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq")
            return [self.value(child, (*key, index), parents) for index, child in enumerate(node.value)]
        return self._scalar(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        self._check_tag(node, "map")
        seen: set[Any] = set()
        for key, _ in node.value:
            name = None if key.tag.endswith(":merge") else self._name(key)
            if name is not None and name in seen:
                self._fail(key, f"{name!r} is given twice in one mapping")
            seen.add(name)

    def _name(self, node: yaml.Node) -> str | int:
        name = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(name, bool) or not isinstance(name, str | int):
            self._fail(node, "a name in a mapping must be text or a whole number")
        return cast("str | int", name)

    def _scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(_CORE)
        if kind == "str" and _FLOAT.fullmatch(node.value) and getattr(node, "style", None) is None:
            return float(node.value.replace("_", ""))
        # Dates, and what YAML 1.1 takes for numbers to the base of 60 or 8.
        if kind == "timestamp" or (kind in ("int", "float") and ":" in node.value):
            return node.value
        if kind == "int" and re.fullmatch("[-+]?0[0-9_]+", node.value):
            return int(node.value)
        self._check_tag(node, "str", "int", "float", "bool", "null")
        try:
            return self.construct_object(node)
        except ValueError as error:
            return self._fail(node, str(error))

    def _check_tag(self, node: yaml.Node, *kinds: str) -> None:
        if node.tag.removeprefix(_CORE) not in kinds:
            self._fail(node, f"the tag {node.tag!r} is not allowed")

    def _fail(self, node: yaml.Node, problem: str) -> Any:
        raise ConstructorError(None, None, problem, node.start_mark)


def _merge(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Update a tree: mappings are merged, everything else is replaced."""
    for name, value in others.items():
        own = values.get(name)
        if isinstance(own, dict) and isinstance(value, dict):
            _merge(cast("dict[str, Any]", own), cast("dict[str, Any]", value))
        else:
            values[name] = value


def _override(values: dict[str, Any], places: dict[Key, str], override: str, names: Collection[str]) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise RecipeError(f"{OVERRIDE}: {override!r} must be KEY=VALUE, such as optimizers.lr=3e-4.")
    key = _key_of(name, values, names)
    parent: Any = values
    for depth, part in enumerate(key):
        if not isinstance(parent, dict | list):
            raise RecipeError(f"{OVERRIDE}: {name!r}: {spell(key[:depth])} is a {_kind(parent)}, without members.")
        members = cast(Any, parent)
        if isinstance(parent, list) and not (isinstance(part, int) and part < len(members)):
            raise RecipeError(f"{OVERRIDE}: {name!r}: {spell(key[:depth])} has no item {part!r}.")
        if depth == len(key) - 1:
            members[part] = _parse(text, OVERRIDE, places, first=key)
        elif isinstance(parent, dict) and members.get(part) is None:
            members[part], places[key[: depth + 1]] = {}, OVERRIDE
        parent = members[part]


def _key_of(name: str, values: dict[str, Any], names: Collection[str]) -> Key:
    """Return the key that a name on the command line stands for."""
    key: Key = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
    if key[0] in values:
        return key
    meant = RENAMED.get(str(key[0]), key[0])
    key = (next((each for each in values if RENAMED.get(each, each) == meant), key[0]), *key[1:])
    if len(key) > 1 or key[0] in values or meant in names:
        return key
    ends = sorted({path for path, _ in _leaves(values, ()) if path[-1] == key[0]}, key=str)
    if len(ends) > 1:
        raise RecipeError(f"{OVERRIDE}: {name!r} may be {' or '.join(map(spell, ends))}. Give one of them.")
    return ends[0] if ends else key


def _leaves(value: Any, key: Key) -> Iterable[tuple[Key, Any]]:
    """Yield all values below a value, with their keys."""
    if key:
        yield key, value
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in cast("Iterable[tuple[str | int, Any]]", members):
        yield from _leaves(member, (*key, name))


def _kind(value: object) -> str:
    kinds = {dict: "mapping", list: "list", str: "text", bool: "boolean", type(None): "null"}
    return kinds.get(cast(Any, type(value)), "number")
