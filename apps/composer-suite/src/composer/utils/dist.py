"""Ranks, collectives and samplers: another name for the module `composer_dist.dist` itself."""

from typing import TYPE_CHECKING

from composer._lazy import replace_module

if TYPE_CHECKING:
    from composer_dist.dist import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]  # it is that module

replace_module(__name__, "composer_dist.dist")
