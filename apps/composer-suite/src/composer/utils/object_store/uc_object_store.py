"""Volumes of Databricks' Unity Catalog."""

from composer_checkpoint.stores.unity_catalog import UCObjectStore

__all__ = ["UCObjectStore"]
