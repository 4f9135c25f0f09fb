"""Stores under the names that libcloud has for them."""

from composer_checkpoint.stores.libcloud import LibcloudObjectStore

__all__ = ["LibcloudObjectStore"]
