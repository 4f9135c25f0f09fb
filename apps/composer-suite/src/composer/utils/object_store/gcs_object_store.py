"""Google Cloud Storage."""

from composer_checkpoint.stores.gcs import GCSObjectStore

__all__ = ["GCSObjectStore"]
