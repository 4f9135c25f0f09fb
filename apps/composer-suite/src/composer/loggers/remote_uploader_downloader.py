"""Files of a run in a store: the very module of composer-checkpoint, so that it can be patched here."""

from composer._lazy import replace_module

replace_module(__name__, "composer_checkpoint.remote.logger")
