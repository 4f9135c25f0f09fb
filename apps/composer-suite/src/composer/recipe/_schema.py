"""The JSON Schema of recipes."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from pydantic import PydanticInvalidForJsonSchema

from composer.recipe._components import SECTIONS, TARGET, Section, adapter_of, short_names, signature
from composer.recipe._plan import GIVEN, OWN
from composer.recipe._read import RENAMED
from composer.trainer import Trainer
from composer_events.evaluator import Evaluator
from composer_time import StringEnum

_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}


def make_schema() -> dict[str, Any]:
    """Return the JSON Schema, made from the signatures of the Trainer and of all components."""
    sections = {name: _section(name, section) for name, section in SECTIONS.items()}
    properties = {name: _type(each.annotation) for name, each in signature(Trainer).items() if _is_named(each)}
    properties |= {name: {"$ref": f"#/$defs/{name}"} for name in sections}
    properties |= {old: properties[new] for old, new in RENAMED.items()}
    properties |= {name: properties.get(name, {}) for name in OWN} | {"include": {}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A training run of composer",
        "type": "object",
        "properties": properties,
        "$defs": sections,
    }


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _section(name: str, section: Section) -> dict[str, Any]:
    single: list[Any] = []
    named: dict[str, Any] = {}
    further: Any = _arguments(Evaluator, ())["properties"] if name == "eval_dataloader" else {}
    for short, path in short_names(section).items():
        module, _, attribute = path.rpartition(".")
        arguments = _arguments(getattr(import_module(module), attribute), GIVEN.get(name, ()))
        # The name of the class, and the spellings of the short name, as `mixup` and `mix_up`.
        named[f"^({'[_-]?'.join(short.split('_'))}|{attribute})$"] = {"anyOf": [arguments, {"type": "null"}]}
        with_name: Mapping[str, Any] = {**further, **arguments["properties"], "name": {"const": short}}
        single.append({**arguments, "properties": with_name, "required": ["name", *arguments["required"]]})
    path: Any = {"type": "object", "properties": {TARGET: {"type": "string"}}, "required": [TARGET]}
    one: list[Any] = [{"type": "string"}, path]
    one += single
    if section.is_named:
        by_path = {r"\.": {"type": ["object", "null"]}}
        one.append({"type": "object", "patternProperties": named | by_path, "additionalProperties": False})
    return {"anyOf": [*one, {"type": "array", "items": {"anyOf": one}}, {"type": "null"}]}


def _arguments(target: Callable[..., Any], given: Sequence[str]) -> dict[str, Any]:
    parameters = {name: each for name, each in signature(target).items() if _is_named(each)}
    needed = [name for name, each in parameters.items() if each.default is each.empty and name not in given]
    return {
        "type": "object",
        "description": (inspect.getdoc(target) or "").partition("\n")[0],
        "properties": {name: _type(each.annotation) for name, each in parameters.items()},
        "required": needed,
        "additionalProperties": len(parameters) < len(signature(target)),
    }


def _type(annotation: Any) -> dict[str, Any]:
    """Return the schema of a type; `{}` where it has values that JSON has not, which a recipe builds by name."""
    options = typing.get_args(annotation) or (annotation,)
    enums = [each for each in options if inspect.isclass(each) and issubclass(each, StringEnum)]
    if enums:
        names = [member.value for each in enums for member in each]
        return {"anyOf": [{"enum": [*names, *([None] if types.NoneType in options else [])]}, _REFERENCE]}
    try:
        adapter = adapter_of(annotation)
        schema = {} if adapter is None else adapter.json_schema()
    except (PydanticInvalidForJsonSchema, TypeError):
        return {}
    return {"anyOf": [schema, _REFERENCE]} if schema and "$defs" not in schema else {}
