"""Artifacts of MLflow on Databricks."""

from composer_checkpoint.stores.mlflow import MLFlowObjectStore

__all__ = ["MLFlowObjectStore"]
