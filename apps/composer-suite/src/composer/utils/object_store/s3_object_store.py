"""S3, and servers that speak its protocol."""

from composer_checkpoint.stores.cloud import S3ObjectStore

__all__ = ["S3ObjectStore"]
