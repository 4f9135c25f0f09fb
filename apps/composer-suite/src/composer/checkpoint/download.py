"""A checkpoint of one file, from a store."""

from composer_checkpoint.remote.fetch import download_monolithic_checkpoint

__all__ = ["download_monolithic_checkpoint"]
