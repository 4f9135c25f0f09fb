"""Stores under the names that libcloud has for them."""

from composer_checkpoint.stores.cloud import LibcloudObjectStore

__all__ = ["LibcloudObjectStore"]
