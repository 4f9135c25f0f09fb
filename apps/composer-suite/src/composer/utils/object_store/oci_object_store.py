"""Oracle's object storage."""

from composer_checkpoint.stores.cloud import OCIObjectStore

__all__ = ["OCIObjectStore"]
