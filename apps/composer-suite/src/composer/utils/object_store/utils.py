"""The store of a name: the very module of composer-checkpoint, so that its classes can be patched here."""

from composer._lazy import replace_module

replace_module(__name__, "composer_checkpoint.stores.opening")
