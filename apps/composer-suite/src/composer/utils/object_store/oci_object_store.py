"""Oracle's object storage."""

from composer_checkpoint.stores.oci import OCIObjectStore

__all__ = ["OCIObjectStore"]
