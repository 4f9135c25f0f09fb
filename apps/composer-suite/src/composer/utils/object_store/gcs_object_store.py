"""Google Cloud Storage."""

from composer_checkpoint.stores.cloud import GCSObjectStore

__all__ = ["GCSObjectStore"]
