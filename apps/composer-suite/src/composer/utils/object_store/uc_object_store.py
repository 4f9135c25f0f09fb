"""Volumes of Databricks' Unity Catalog."""

from composer_checkpoint.stores.databricks import UCObjectStore

__all__ = ["UCObjectStore"]
