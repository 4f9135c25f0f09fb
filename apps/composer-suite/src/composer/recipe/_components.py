"""The parts of a recipe: which class or function a name stands for, and whether its arguments fit."""

import inspect
import re
import sys
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, cast

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from composer.recipe._read import Key, Recipe, RecipeError, nearest, spell
from composer_time import StringEnum, Time

_OWN_PARTS = (
    "algorithms",
    "callbacks",
    "core",
    "datasets",
    "loggers",
    "loss",
    "metrics",
    "models",
    "optim",
    "recipe.data",
)
ALLOWED = (
    *(f"composer.{name}" for name in _OWN_PARTS),
    *(f"composer_{name}" for name in ("algorithms", "events", "hf", "models", "optim")),
    *("torch.nn", "torch.optim", "torch.utils.data", "torchmetrics", "torchvision", "transformers", "streaming"),
)
"""Packages that every recipe may name: the functions and classes of Composer's, and classes of `_HARMLESS` in others.

Libraries have functions that run programs and download code.
"""

_HARMLESS = (
    *("torch.nn:Module", "torch.optim:Optimizer", "torch.utils.data:Dataset", "torch.utils.data:DataLoader"),
    *("torch.utils.data:Sampler", "transformers:PretrainedConfig"),
)
_FUNCTIONS = ("torchvision.models.",)  # which make a network
RUN_CODE = ("trust_remote_code", "load_trusted", "cache_clear_cmd")
"""Names of arguments that make a model, a checkpoint or a callback run code."""

TARGET = "_target_"


@dataclass(frozen=True, eq=False)
class Section:
    """A kind of component.

    Attributes:
        homes: Modules whose classes are known by short names.
        base: The class that they have in common, as module and name.
        aliases: Further short names, with import paths.
        is_named: Whether a mapping without a name is one from names to arguments.
    """

    homes: tuple[str, ...] = ()
    base: str = "builtins:object"
    aliases: Mapping[str, str] = field(default_factory=dict)
    is_named: bool = False


_DATA = Section(aliases={name: f"composer.recipe.data.{name}" for name in ("dataloader", "text")})
_OWN = re.compile(r"composer(_[a-z]+)?\.")

SECTIONS: Mapping[str, Section] = {
    "model": Section(
        homes=("composer.models",),
        base="composer.models:ComposerModel",
        aliases={"hf_causal_lm": "composer_hf.ComposerHFCausalLM", "gpt": "composer.models.ComposerGPT"},
    ),
    "optimizers": Section(homes=("torch.optim", "composer.optim"), base="torch.optim:Optimizer"),
    "schedulers": Section(
        homes=("composer.optim",),
        base="composer.optim:ComposerScheduler",
        aliases={
            "linear_decay_with_warmup": "composer.optim.LinearWithWarmupScheduler",
            "inv_sqrt_with_warmup": "composer.optim.InversePowerWithWarmupScheduler",
        },
    ),
    "algorithms": Section(homes=("composer.algorithms",), base="composer.core:Algorithm", is_named=True),
    "callbacks": Section(
        homes=("composer.callbacks",),
        base="composer.core:Callback",
        aliases={"hf_checkpointer": "composer.callbacks.HuggingFaceCheckpointer"},
        is_named=True,
    ),
    "loggers": Section(homes=("composer.loggers",), base="composer.loggers:LoggerDestination", is_named=True),
    "train_dataloader": _DATA,
    "eval_dataloader": _DATA,
    "tokenizer": Section(),
}

_WORD = re.compile("(?<=[a-zA-Z0-9])(?=[A-Z][a-z])")  # the start of a word in the name of a class
_LEFT_OUT = ("callback", "logger", "scheduler", "annealing")  # in short names


class Components:
    """Finds, checks and builds the components of one recipe.

    Args:
        recipe: The recipe.
        allow: Packages that import paths may name, in addition to `ALLOWED`.
        trust_remote_code: Whether arguments `trust_remote_code` may be true.
    """

    def __init__(self, recipe: Recipe, allow: Sequence[str] = (), *, trust_remote_code: bool = False) -> None:
        self._recipe = recipe
        self._allowed = (*ALLOWED, *allow)
        self._further = tuple(allow)
        self._trusts = trust_remote_code

    def check(self, value: Any, key: Key, section: Section, given: Sequence[str] = ()) -> Any:
        """Return the plan to build the components of a section: a `Component`, or a list of them.

        Args:
            value: What the recipe has for the section.
            key: Its place in the recipe.
            section: The section.
            given: Names of parameters that the caller gives to those components that have them.

        Raises:
            RecipeError: If a name is not known, or arguments do not fit it.
        """
        if value is None:
            return None
        if isinstance(value, str):
            return self._component(value, {}, key, section, given)
        if isinstance(value, list):
            plans: list[Any] = []
            for index, member in enumerate(cast("list[Any]", value)):
                plan = self.check(member, (*key, index), section, given)
                plans += cast("list[Any]", plan if isinstance(plan, list) else [plan])
            return plans
        if not isinstance(value, dict):
            raise self._recipe.error(key, f"{value!r} must be a name, or a mapping with a name and arguments.")
        arguments = cast("dict[str, Any]", value)
        for spelling in (TARGET, "name"):
            if spelling in arguments:
                name = arguments[spelling]
                others = {each: argument for each, argument in arguments.items() if each != spelling}
                return self._component(name, others, key, section, given)
        if section.is_named:
            spellings: dict[str, str] = {}
            for name in arguments:
                if (other := spellings.setdefault(_plain(str(name)), name)) != name:
                    problem = f"is another spelling of {other!r}, which the recipe has as well. Use one of them."
                    raise self._recipe.error((*key, name), problem)
            return [self._named(name, argument, (*key, name), section, given) for name, argument in arguments.items()]
        raise self._recipe.error(key, f"has no name. Give `name: ...`. {nearest('', short_names(section))}")

    def _named(self, name: str, arguments: Any, key: Key, section: Section, given: Sequence[str]) -> "Component":
        if not isinstance(arguments, dict | None):
            raise self._recipe.error(key, f"{arguments!r} must be a mapping of arguments, or nothing.")
        return self._component(name, cast("dict[str, Any]", arguments or {}), key, section, given)

    def _component(
        self, name: Any, arguments: Mapping[str, Any], key: Key, section: Section, given: Sequence[str]
    ) -> "Component":
        if not isinstance(name, str):
            raise self._recipe.error(key, f"the name {name!r} must be text.")
        target = self._find(name, key, section)
        return Component(target, self._arguments(name, target, arguments, key, given), key, self._recipe)

    def _find(self, name: str, key: Key, section: Section) -> Callable[..., Any]:
        if "." in name:
            return self._import(name, key)
        # Only what is named is imported.
        for short, path in _paths(section).items():
            if _plain(short) == _plain(name) and (found := load(path, section)) is not None:
                return found
        known = short_names(section)
        raise self._recipe.error(self._recipe.named(key), f"the name {name!r} is not known. {nearest(name, known)}")

    def _import(self, path: str, key: Key) -> Callable[..., Any]:
        """Return the class or function of an import path, if it is defined in an allowed package."""
        key = self._recipe.named(key)
        # Before anything is imported: an import runs code.
        if not self._is_allowed(path) or any(not part.isidentifier() or part[0] == "_" for part in path.split(".")):
            raise self._recipe.error(
                key,
                f"{path!r} is not in a package that recipes may name: {', '.join(self._allowed)}. Pass --allow "
                f"{path.split('.')[0]} if you trust the recipe and the package.",
            )
        module, _, attribute = path.rpartition(".")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise self._recipe.error(key, f"{path!r} cannot be imported: {error}.") from None
        home = f"{getattr(found, '__module__', '')}."
        # What a module of an allowed package merely imports is not allowed.
        if not callable(found) or not (self._is_allowed(home) or _OWN.match(home)):
            raise self._recipe.error(key, f"{path!r} must be a class or function that is defined in that package.")
        is_trusted = _OWN.match(path) or any(path.startswith(f"{package}.") for package in self._further)
        if not is_trusted and not path.startswith(_FUNCTIONS) and not _is_harmless(found):
            raise self._recipe.error(
                key,
                f"{path!r} must be a module, optimizer, dataloader, sampler, metric or configuration, or a dataset of "
                f"another package than transformers. Pass --allow {path.split('.')[0]} to name everything in that "
                f"package.",
            )
        return found

    def _is_allowed(self, path: str) -> bool:
        return any(path.startswith(f"{package}.") for package in self._allowed)

    def _arguments(
        self, name: str, target: Callable[..., Any], arguments: Mapping[str, Any], key: Key, given: Sequence[str]
    ) -> dict[str, Any]:
        parameters = signature(target)
        checked = {each: self.argument(parameters, each, value, (*key, each)) for each, value in arguments.items()}
        for each, parameter in parameters.items():
            is_needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
            if is_needed and each not in checked and each not in given:
                raise self._recipe.error(key, f"{name} needs the argument {each!r}.")
        return checked

    def argument(self, parameters: Mapping[str, inspect.Parameter], name: Any, value: Any, key: Key) -> Any:
        """Return an argument for a function of these parameters, with plans in place of components."""
        parameter = parameters.get(name)
        if parameter is None and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            raise self._recipe.error(key, f"{name!r} is not an argument. {nearest(name, parameters)}")
        self._check_code(name, value, key)
        planned = self._nested(value, key)
        if parameter is not None and not has_component(planned):
            return self._fitting(planned, parameter.annotation, key)
        return planned

    def _check_code(self, name: Any, value: Any, key: Key) -> None:
        if name in RUN_CODE and value and not self._trusts:
            raise self._recipe.error(key, "runs code that comes with the recipe or a model. Pass --trust-remote-code.")

    def _nested(self, value: Any, key: Key) -> Any:
        if isinstance(value, dict):
            members = cast("dict[Any, Any]", value)
            if TARGET in members:
                return self.check(members, key, Section())
            for name, member in members.items():
                self._check_code(name, member, (*key, name))
            return {name: self._nested(member, (*key, name)) for name, member in members.items()}
        if isinstance(value, list):
            return [self._nested(member, (*key, at)) for at, member in enumerate(cast("list[Any]", value))]
        return value

    def _fitting(self, value: Any, annotation: Any, key: Key) -> Any:
        options = typing.get_args(annotation) or (annotation,)
        try:
            if isinstance(value, str):
                _check_text(value, options)
            adapter = adapter_of(annotation)
            fitting = value if adapter is None else adapter.validate_python(value)
        except ValidationError as error:
            told = error.errors(include_url=False, include_context=False)
            # Objects of classes are built by `_target_`, which is not what was meant here.
            told = [each for each in told if each["type"] != "is_instance_of"] or told
            problems = list(dict.fromkeys(each["msg"] for each in told))[:3]
            if any(map(_is_time, options)):
                problems = ["it must be a time with a unit, such as '10ep' or '20ba'"]
            raise self._recipe.error(key, f"{value!r} does not fit: {'; or '.join(problems)}.") from None
        except (TypeError, ValueError) as error:
            raise self._recipe.error(key, str(error)) from None
        if (
            isinstance(value, bool | str)
            and isinstance(fitting, bool | int | float)
            and type(fitting) is not type(value)
        ):
            raise self._recipe.error(key, f"{value!r} does not fit: it must be of type {type(fitting).__name__}.")
        return fitting


@dataclass
class Component:
    """A class or function with checked arguments."""

    target: Callable[..., Any]
    arguments: dict[str, Any]
    key: Key
    recipe: Recipe

    def build(self, given: Mapping[str, Any] | None = None) -> Any:
        """Return the object, with further arguments for those parameters that exist and are not in the recipe."""
        parameters = signature(self.target)
        arguments = {name: value for name, value in (given or {}).items() if name in parameters}
        arguments |= {name: build(value) for name, value in self.arguments.items()}
        # `*params` and the like cannot be given by name; none of those that are allowed needs them.
        try:
            return self.target(**arguments)
        except Exception as error:
            if isinstance(error, RecipeError):
                raise
            error.add_note(f"{self.recipe.place(self.key)}: in {spell(self.key)}")
            raise


def build(plan: Any, given: Mapping[str, Any] | None = None) -> Any:
    """Return a value in which each component is built, inner ones first."""
    if isinstance(plan, Component):
        return plan.build(given)
    if isinstance(plan, dict):
        return {name: build(member, given) for name, member in cast("dict[Any, Any]", plan).items()}
    if isinstance(plan, list):
        return [build(member, given) for member in cast("list[Any]", plan)]
    return plan


def takes(plan: Any, name: str) -> bool:
    """Return whether a component of a plan gets an argument from the caller: it has it, and the recipe does not."""
    if isinstance(plan, list):
        return any(takes(member, name) for member in cast("list[Any]", plan))
    return isinstance(plan, Component) and name in signature(plan.target) and name not in plan.arguments


def has_component(plan: Any) -> bool:
    """Return whether a value contains a component."""
    if isinstance(plan, dict):
        return any(map(has_component, cast("dict[Any, Any]", plan).values()))
    if isinstance(plan, list):
        return any(map(has_component, cast("list[Any]", plan)))
    return isinstance(plan, Component)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_harmless(found: Any) -> bool:
    """Return whether something is a class of those that cannot be used to run programs or code from elsewhere."""
    if not inspect.isclass(found):
        return False
    for path in _HARMLESS:
        module, _, name = path.partition(":")
        if name == "Dataset" and found.__module__.startswith("transformers."):
            continue  # TextDataset and others of transformers 4 unpickle files
        # If nothing has imported it, nothing derives from it.
        if module in sys.modules and issubclass(found, getattr(sys.modules[module], name)):
            return True
    return False


@cache
def signature(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function, with annotations that are types."""
    parameters = dict(inspect.signature(target).parameters)
    try:
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # names that exist for type checkers only
        hints = {}
    return {name: each.replace(annotation=hints.get(name, Any)) for name, each in parameters.items()}


@cache
def short_names(section: Section) -> Mapping[str, str]:
    """Return the short names of a section, such as `cosine_with_warmup`, with import paths."""
    return {short: path for short, path in _paths(section).items() if load(path, section) is not None}


def load(path: str, section: Section) -> Callable[..., Any] | None:
    """Return the class or function of a path, or `None` if it is not part of the section."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except ImportError:  # of an optional package
        return None
    if path in section.aliases.values():
        return found
    module, _, name = section.base.partition(":")
    base: type = getattr(import_module(module), name)
    fits = inspect.isclass(found) and issubclass(found, base) and found is not base and not inspect.isabstract(found)
    return found if fits else None


@cache
def _paths(section: Section) -> Mapping[str, str]:
    """Return import paths by short names, also of what is not part of the section."""
    paths = {
        "_".join(word for word in _WORD.sub("_", name).lower().split("_") if word not in _LEFT_OUT): f"{home}.{name}"
        for home in section.homes
        for name in import_module(home).__all__
    }
    return paths | dict(section.aliases)


def _plain(name: str) -> str:
    words = [word for word in re.split("[_-]", name.lower()) if word not in _LEFT_OUT]
    return "".join(words)


def _is_time(option: Any) -> bool:
    return option is Time or typing.get_origin(option) is Time


def _check_text(text: str, options: Sequence[Any]) -> None:
    """Raise a `ValueError` if text is not a time or a member, where the types are `str` and one of these."""
    for option in options:
        if _is_time(option):
            Time.from_timestring(text)
        elif inspect.isclass(option) and issubclass(option, StringEnum):
            with warnings.catch_warnings(action="ignore"):  # about older names, which the constructor repeats
                option(text)


def adapter_of(annotation: Any) -> "TypeAdapter[Any] | None":
    """Return what checks values of a type, or `None` if any value fits."""
    try:
        return _adapter(annotation)
    except TypeError:  # not hashable
        return None


@cache
def _adapter(annotation: Any) -> "TypeAdapter[Any] | None":
    if annotation is Any:
        return None
    # Some classes have their own configuration.
    for config in (ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False), None):
        try:
            return TypeAdapter(annotation, config=config)
        except PydanticUserError:
            continue
    return None
