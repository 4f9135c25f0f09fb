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

# The placeholders are formatted by these names.
MLFLOW_EXPERIMENT_ID_FORMAT_KEY = MLFLOW_EXPERIMENT_ID_PLACEHOLDER.strip("{}")
MLFLOW_RUN_ID_FORMAT_KEY = MLFLOW_RUN_ID_PLACEHOLDER.strip("{}")
