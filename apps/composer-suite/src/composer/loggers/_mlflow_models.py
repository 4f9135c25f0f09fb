"""Models in MLflow: saved, logged and registered."""

from typing import Any

__all__ = ["MLFlowModels"]

_UNITY_CATALOG = "databricks-uc"


class MLFlowModels:
    """What an MLFlowLogger does with models.

    Args:
        mlflow: The module.
        model_registry_prefix: Comes before the names of registered models, with a dot.
        model_registry_uri: Where the registry is.

    Raises:
        ValueError: If the registry is Unity Catalog, and the prefix is no `catalog.schema`.
    """

    def __init__(self, mlflow: Any, model_registry_prefix: str, model_registry_uri: str | None) -> None:
        if model_registry_uri == _UNITY_CATALOG and len(model_registry_prefix.split(".")) != 2:
            raise ValueError(
                f"When registering to Unity Catalog, model_registry_prefix must be in the form catalog.schema, such as "
                f"'main.plums', and it is {model_registry_prefix!r}."
            )
        self._mlflow = mlflow
        self.model_registry_prefix, self.model_registry_uri = model_registry_prefix, model_registry_uri
        self._client: Any = None
        if model_registry_uri is not None:
            mlflow.set_registry_uri(model_registry_uri)

    @property
    def client(self) -> Any:
        """The client of MLflow, an `MlflowClient`, made when it is first needed."""
        if self._client is None:
            self._client = self._mlflow.MlflowClient(self._mlflow.get_tracking_uri(), self.model_registry_uri)
        return self._client

    def register_model(
        self, model_uri: str, name: str, await_registration_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a model that was logged, and return its version.

        Args:
            model_uri: Where it is, such as what `log_model` returned.
            name: What it is called, after the prefix.
            await_registration_for: How many seconds to wait until it is ready.
            tags: Tags of the version.
        """
        return self._mlflow.register_model(
            model_uri=model_uri,
            name=self._registered_name(name),
            await_registration_for=await_registration_for,
            tags=tags,
        )

    def register_model_with_run_id(
        self, model_uri: str, name: str, await_creation_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a model as one of this run, and return its version.

        Args:
            model_uri: Where its files are.
            name: What it is called, after the prefix.
            await_creation_for: How many seconds to wait until it is ready.
            tags: Tags of the version.
        """
        from mlflow.exceptions import MlflowException  # loaded already
        from mlflow.protos.databricks_pb2 import ALREADY_EXISTS, RESOURCE_ALREADY_EXISTS, ErrorCode

        full_name = self._registered_name(name)
        try:
            self.client.create_registered_model(full_name)
        except MlflowException as error:
            if error.error_code not in {ErrorCode.Name(ALREADY_EXISTS), ErrorCode.Name(RESOURCE_ALREADY_EXISTS)}:
                raise
        return self.client.create_model_version(
            name=full_name,
            source=model_uri,
            run_id=getattr(self, "run_id", None),
            await_creation_for=await_creation_for,
            tags=tags,
        )

    def save_model(self, flavor: str, **kwargs: Any) -> None:
        """Save a model in MLflow's form.

        Args:
            flavor: `'transformers'`.
            **kwargs: The arguments of `mlflow.transformers.save_model`.

        Raises:
            NotImplementedError: If it is another flavor.
        """
        self._flavor(flavor).save_model(**kwargs)

    def log_model(self, flavor: str, **kwargs: Any) -> Any:
        """Log a model with the run, and return what MLflow knows of it, such as its `model_uri`.

        Args:
            flavor: `'transformers'`.
            **kwargs: The arguments of `mlflow.transformers.log_model`.

        Raises:
            NotImplementedError: If it is another flavor.
        """
        return self._flavor(flavor).log_model(**kwargs)

    def _flavor(self, flavor: str) -> Any:
        if flavor != "transformers":
            raise NotImplementedError(f"flavor={flavor!r} is none of those that can be saved: 'transformers'.")
        return self._mlflow.transformers

    def _registered_name(self, name: str) -> str:
        return f"{self.model_registry_prefix}.{name}" if self.model_registry_prefix else name
