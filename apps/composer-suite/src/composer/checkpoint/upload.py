"""A file of a checkpoint, to a store."""

from composer_checkpoint.transfer import upload_file

__all__ = ["upload_file"]
