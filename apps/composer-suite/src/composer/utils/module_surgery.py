"""Replacing modules in a model: another name for the module `composer_algorithms.module_surgery` itself."""

from typing import TYPE_CHECKING

from composer._lazy import replace_module

if TYPE_CHECKING:
    from composer_algorithms.module_surgery import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]  # it is that module

replace_module(__name__, "composer_algorithms.module_surgery")
