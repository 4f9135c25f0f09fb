"""A file of a checkpoint, to a store."""

from composer_checkpoint.remote.fetch import upload_file

__all__ = ["upload_file"]
