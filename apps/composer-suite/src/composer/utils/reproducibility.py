"""Seeds and random states: another name for the module `composer_dist.reproducibility` itself."""

from typing import TYPE_CHECKING

from composer._lazy import replace_module

if TYPE_CHECKING:
    from composer_dist.reproducibility import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]  # it is that module

replace_module(__name__, "composer_dist.reproducibility")
