"""Artifacts of MLflow on Databricks."""

from composer_checkpoint.stores.databricks import EXPERIMENT_PLACEHOLDER as MLFLOW_EXPERIMENT_ID_PLACEHOLDER
from composer_checkpoint.stores.databricks import MLFLOW_PREFIX as MLFLOW_DBFS_PATH_PREFIX
from composer_checkpoint.stores.databricks import RUN_PLACEHOLDER as MLFLOW_RUN_ID_PLACEHOLDER
from composer_checkpoint.stores.databricks import MLFlowObjectStore

__all__ = [
    "MLFLOW_DBFS_PATH_PREFIX",
    "MLFLOW_EXPERIMENT_ID_FORMAT_KEY",
    "MLFLOW_EXPERIMENT_ID_PLACEHOLDER",
    "MLFLOW_RUN_ID_FORMAT_KEY",
    "MLFLOW_RUN_ID_PLACEHOLDER",
    "MLFlowObjectStore",
]

MLFLOW_EXPERIMENT_ID_FORMAT_KEY = MLFLOW_EXPERIMENT_ID_PLACEHOLDER.strip("{}")
"""Name of the placeholder for the experiment, for `str.format`."""

MLFLOW_RUN_ID_FORMAT_KEY = MLFLOW_RUN_ID_PLACEHOLDER.strip("{}")
"""Name of the placeholder for the run, for `str.format`."""
