"""Recipes: files that describe a training run, for `composer -n 2 recipe.yaml`."""

from composer.recipe._plan import Plan, load_recipe
from composer.recipe._read import RecipeError

__all__ = ["Plan", "RecipeError", "load_recipe"]
