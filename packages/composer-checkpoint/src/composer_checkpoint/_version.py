"""The version of composer-checkpoint that is installed."""

from importlib.metadata import version

__version__ = version("composer-checkpoint")
