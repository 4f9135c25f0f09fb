"""From a recipe to a Trainer."""

import typing
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from composer.recipe._components import SECTIONS, TARGET, Component, Components, Section, build, signature, takes
from composer.recipe._read import OVERRIDE, RENAMED, Key, Recipe, dump, nearest, read
from composer.trainer import Trainer
from composer_dist import dist, reproducibility
from composer_dist.initialize import DEFAULT_TIMEOUT_S
from composer_events.evaluator import Evaluator

_BATCH, _EVAL_BATCH, _LENGTH = "global_train_batch_size", "device_eval_batch_size", "max_seq_len"
OWN = ("variables", "tokenizer", _BATCH, _EVAL_BATCH, _LENGTH, "fsdp_config", "eval_first", "log_config")
_SEED = 17  # of recipes without one, so that the recipe in the folder of a run repeats it
_BOOLEANS = ("eval_first", "log_config")
_SIZES = (_BATCH, _EVAL_BATCH, _LENGTH)
GIVEN: Mapping[str, Sequence[str]] = {
    "model": ("tokenizer",),
    "optimizers": ("params", "model"),
    "train_dataloader": ("batch_size", "seed", _LENGTH),
    "eval_dataloader": ("batch_size", "seed", _LENGTH),
}


class Plan:
    """A checked recipe, from which a Trainer can be built.

    Attributes:
        values: The recipe after includes, overrides and references: mappings, sequences and scalars.
        eval_first: Whether to evaluate before training.
    """

    def __init__(self, recipe: Recipe, components: Components) -> None:
        self.values = {**recipe.values, "seed": recipe.values.get("seed", _SEED)}
        self._recipe = recipe
        self._components = components
        self._plans: dict[str, Any] = {}
        self._evaluators: list[tuple[dict[str, Any], Any]] = []
        values, parameters = self._named(), signature(Trainer)
        self._own = {name: values.pop(name) for name in OWN if name in values}
        self.eval_first = bool(self._own.get("eval_first"))
        self._check_own()
        for name, value in values.items():
            key = self._key(name)
            if name == "eval_dataloader":
                members = cast("list[Any]", value if isinstance(value, list) else [value])
                for index, member in enumerate(members):
                    self._evaluators.append(self._evaluator(member, (*key, index) if isinstance(value, list) else key))
            elif name in SECTIONS:
                self._plans[name] = components.check(value, key, SECTIONS[name], GIVEN.get(name, ()))
            elif name in parameters:
                self._plans[name] = components.argument(parameters, name, value, key)
            elif name not in recipe.variables:
                hint = nearest(name, [*parameters, *OWN])
                raise recipe.error(key, f"is no argument of the Trainer, and nothing refers to it. {hint}")
        if self._plans.get("model") is None:
            raise recipe.error(("model",), "a recipe needs a model.")
        self._check_sizes()

    @property
    def text(self) -> str:
        """The recipe as YAML, after includes, overrides and references. It describes the same run."""
        parameters = signature(Trainer)
        known = {name for name in self.values if name in OWN or RENAMED.get(name, name) in parameters}
        others = {name: value for name, value in self.values.items() if name not in known}
        values = {name: value for name, value in self.values.items() if name in known}
        if others:  # nothing refers to them any more
            values["variables"] = {**(values.get("variables") or {}), **others}
        return dump(values)

    def build(self) -> Trainer:
        """Return the Trainer.

        Raises:
            ValueError, TypeError: If an argument is invalid; a note gives file and line.
        """
        plans, seed = dict(self._plans), self._plans.get("seed")
        # Models and datasets may call collectives; the Trainer would start them only later.
        if dist.get_world_size() > 1:
            dist.initialize_dist(plans.get("device"), plans.get("dist_timeout", DEFAULT_TIMEOUT_S))
        if seed is not None:
            reproducibility.seed_all(seed)  # for the weights of the model
        tokenizer = self._own.get("tokenizer")
        model = build(plans.pop("model"), {} if tokenizer is None else {"tokenizer": build(tokenizer)})
        given: dict[str, Any] = {"seed": seed, **({_LENGTH: self._own[_LENGTH]} if _LENGTH in self._own else {})}
        arguments: dict[str, Any] = {}
        if "optimizers" in plans:
            arguments["optimizers"] = _optimizers(plans.pop("optimizers"), model)
        if "train_dataloader" in plans:
            batch = {"batch_size": self._own[_BATCH]} if _BATCH in self._own else {}
            arguments["train_dataloader"] = build(plans.pop("train_dataloader"), {**given, **batch})
        if self._evaluators:
            arguments["eval_dataloader"] = self._build_evaluators(given)
        arguments |= {name: build(plan) for name, plan in plans.items()}
        trainer = Trainer(model, **arguments)
        if self._own.get("log_config"):
            trainer.logger.log_hyperparameters({"recipe": self.values})
        return trainer

    def _build_evaluators(self, given: Mapping[str, Any]) -> Any:
        size = self._own.get(_EVAL_BATCH)
        batch = {} if size is None else {"batch_size": size * dist.get_world_size()}
        made = [(settings, build(plan, {**given, **batch})) for settings, plan in self._evaluators]
        loaders = [Evaluator(dataloader=loader, **settings) if settings else loader for settings, loader in made]
        return loaders if len(loaders) > 1 else loaders[0]

    def _key(self, name: str) -> Key:
        other = next((old for old, new in RENAMED.items() if new == name and old in self.values), name)
        return (name if name in self.values else other,)

    def _named(self) -> dict[str, Any]:
        """Return the values under the names of the Trainer's arguments."""
        values: dict[str, Any] = {}
        for name, value in self.values.items():
            new = RENAMED.get(name, name)
            if new in values:
                raise self._recipe.error((name,), f"is another name of {new!r}, which the recipe has as well.")
            values[new] = value
        if "fsdp_config" in values:
            if "parallelism_config" in values:
                raise self._recipe.error(
                    ("fsdp_config",), "cannot be combined with parallelism_config. Move its settings there."
                )
            if not isinstance(values["fsdp_config"], dict | None):
                raise self._recipe.error(("fsdp_config",), f"{values['fsdp_config']!r} must be a mapping.")
            if values["fsdp_config"]:
                settings: Any = dict(values["fsdp_config"])
                if isinstance(values.get("model"), dict) and values["model"].get("init_device") == "mixed":
                    settings.setdefault("sync_module_states", True)  # only rank 0 has the weights
                values["parallelism_config"] = {"fsdp": settings}
        return values

    def _check_own(self) -> None:
        for name in _SIZES:
            size = self._own.get(name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise self._recipe.error((name,), f"{size!r} must be a whole number from 1.")
        for name in _BOOLEANS:
            if not isinstance(self._own.get(name, False), bool):
                raise self._recipe.error((name,), f"{self._own[name]!r} must be true or false.")
        if self._own.get("tokenizer") is not None:
            self._own["tokenizer"] = self._tokenizer(self._own["tokenizer"])

    def _check_sizes(self) -> None:
        """Raise if a size on the command line has no effect, and warn if one in a file has none."""
        train, evaluation = [self._plans.get("train_dataloader")], [plan for _, plan in self._evaluators]
        for name, argument, plans in (
            (_BATCH, "batch_size", train),
            (_EVAL_BATCH, "batch_size", evaluation),
            (_LENGTH, _LENGTH, [*train, *evaluation]),
        ):
            if self._own.get(name) is None or name in self._recipe.variables or takes(plans, argument):
                continue
            error = self._recipe.error(
                (name,),
                f"has no effect: it is the default of the argument {argument!r} of dataloaders, and each dataloader "
                "here sets that argument or does not have it. Change the dataloader's own value, or remove this one.",
            )
            if self._recipe.place((name,)) == OVERRIDE:
                raise error
            warnings.warn(str(error), stacklevel=3)

    def _tokenizer(self, value: Any) -> Component:
        """Return a plan for the tokenizer: `{name: PATH_OR_NAME, kwargs: {...}}`, or a component."""
        key: Key = ("tokenizer",)
        if isinstance(value, dict) and TARGET in value:
            return self._components.check(value, key, Section())
        settings: Any = {"name": value} if isinstance(value, str) else value
        unknown = not isinstance(settings, dict) or "name" not in settings or bool(set(settings) - {"name", "kwargs"})
        if unknown or not isinstance(settings["name"], str) or not isinstance(settings.get("kwargs", {}), dict | None):
            raise self._recipe.error(key, f"{value!r} must be the name or path of a tokenizer, or name and kwargs.")
        kwargs = cast("dict[str, Any]", settings.get("kwargs") or {})
        load = _load_tokenizer
        arguments = {
            each: self._components.argument(signature(load), each, argument, (*key, "kwargs", each))
            for each, argument in kwargs.items()
        }
        return Component(load, {"path": settings["name"], **arguments}, key, self._recipe)

    def _evaluator(self, value: Any, key: Key) -> tuple[dict[str, Any], Any]:
        """Return the settings of an `Evaluator`, if any, and the plan of its dataloader."""
        section, given = SECTIONS["eval_dataloader"], GIVEN["eval_dataloader"]
        if not isinstance(value, dict) or "label" not in value:
            return {}, self._components.check(value, key, section, given)
        parameters = dict(signature(Evaluator))
        del parameters["dataloader"], parameters["metrics"]
        rest = dict(cast("dict[str, Any]", value))
        settings = {
            name: self._components.argument(parameters, name, rest.pop(name), (*key, name))
            for name in [*rest]
            if name in parameters
        }
        loader = rest.pop("dataloader", None)
        if loader is not None and rest:
            raise self._recipe.error((*key, next(iter(rest))), "is not an argument of an evaluator.")
        where = key if loader is None else (*key, "dataloader")
        return settings, self._components.check(rest if loader is None else loader, where, section, given)


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, allow: Sequence[str] = (), trust_remote_code: bool = False
) -> Plan:
    """Read and check a recipe. Nothing is built, and nothing outside the allowed packages is imported.

    Args:
        path: A YAML file.
        overrides: Changes such as `'optimizers.lr=3e-4'`.
        allow: Further packages whose classes and functions the recipe may name.
        trust_remote_code: Whether the recipe may run code that comes with a model of the Hugging Face Hub.

    Raises:
        RecipeError: If the recipe is not valid. The message begins with file and line.
    """
    recipe = read(path, overrides, signature(Trainer).keys())
    return Plan(recipe, Components(recipe, allow, trust_remote_code=trust_remote_code))


def _optimizers(plan: Any, model: Any) -> Any:
    if isinstance(plan, list):
        return [_optimizers(each, model) for each in cast("list[Any]", plan)]
    params = signature(plan.target).get("params")
    # Muon takes the model, which tells what its matrices are for.
    takes_model = params is not None and torch.nn.Module in typing.get_args(params.annotation)
    return build(plan, {"model": model, "params": model if takes_model else model.parameters()})


def _load_tokenizer(path: str, **kwargs: Any) -> Any:
    return import_module("transformers").AutoTokenizer.from_pretrained(path, **kwargs)  # an optional package
