"""Registration of a Hugging Face folder as a model version in MLflow."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch

from composer_dist import dist
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import find_class

if TYPE_CHECKING:
    from composer_events import Logger

_TASK: Final = "llm/v1/completions"
_CHAT: Final = "llm/v1/chat"
_QUESTION: Final = "What is machine learning?"
_ARTIFACT_PATH: Final = "final_model_checkpoint"
_PAUSE_S: Final = 1.0


class ModelRegistry(Protocol):
    """The part of a logger destination that registers models, as `MLFlowLogger` has it."""

    run_id: str | None

    @property
    def client(self) -> Any:
        """The `MlflowClient`."""
        ...

    def save_model(self, flavor: str, **kwargs: Any) -> None:
        """Save a model in MLflow's format."""
        ...

    def register_model_with_run_id(self, model_uri: str, name: str, await_creation_for: int = ...) -> Any:
        """Register the run's artifacts at a URI."""
        ...


def find_registry(logger: "Logger") -> ModelRegistry | None:
    """Return the first of the logger's destinations that registers models, or `None`."""
    # By a method of the class: `hasattr` on the instance would evaluate properties such as `client`.
    found = (own for own in logger.destinations if hasattr(type(own), "register_model_with_run_id"))
    return cast("ModelRegistry | None", next(found, None))


def register_folder(
    registry: ModelRegistry,
    folder: Path,
    name: str,
    metadata: HuggingFaceMetadata,
    config: Mapping[str, Any],
    *,
    edit: Callable[[Path], None],
    timeout_s: float,
) -> None:
    """Upload a folder to the run's artifacts in MLflow's format, and register it.

    An adapter is registered as the files that peft loads: without its base model, MLflow has no format for it.
    """
    if registry.run_id is None:
        raise RuntimeError(
            f"{type(registry).__name__} has no run of MLflow, so the model is not registered as {name!r}. Find out why "
            f"the run was not started; the folder can be registered later with mlflow.transformers.log_model."
        )
    with tempfile.TemporaryDirectory(prefix="composer-hf-") as place:
        saved = folder
        if metadata.peft_config is None:
            saved = Path(place, "model")
            registry.save_model("transformers", path=os.fspath(saved), **_arguments(folder, metadata, config))
            edit(saved)
        registry.client.log_artifacts(registry.run_id, os.fspath(saved), _ARTIFACT_PATH)
    root = registry.client.get_run(registry.run_id).info.artifact_uri
    # MLflow counts whole seconds, and takes 0 for not waiting.
    registry.register_model_with_run_id(f"{root}/{_ARTIFACT_PATH}", name, await_creation_for=max(1, int(timeout_s)))


def in_background(work: Callable[[], None]) -> "Future[None]":
    """Run a function in a daemon thread, which does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the waiting ranks would hang without it
            future.set_exception(error)

    threading.Thread(target=run, name="register-model", daemon=True).start()
    return future


def wait_on_all_ranks(future: "Future[None] | None", timeout_s: float) -> None:
    """Wait for a future of rank 0, and raise its error on all ranks. Every rank must call this.

    The ranks synchronize every second, so that no collective exceeds its own timeout.

    Raises:
        TimeoutError: If the future takes longer.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        told: list[Any] = [None]
        if future is not None:
            left_s = deadline - time.monotonic()
            is_done = bool(wait_for([future], timeout=max(0.0, min(_PAUSE_S, left_s))).done)
            is_late = not is_done and time.monotonic() >= deadline
            told = [(is_done, is_late, future.exception() if is_done else None)]
        # Only rank 0 reads the clock, so all ranks leave the loop in the same iteration.
        dist.broadcast_object_list(told, src=0)
        is_done, is_late, error = told[0]
        if error is not None:
            raise error
        if is_done:
            return
        if is_late:
            raise TimeoutError(
                f"the model was not registered within register_wait_seconds={timeout_s!r}. Check the MLflow server, or "
                f"allow more time."
            )


def _arguments(folder: Path, metadata: HuggingFaceMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    import transformers

    arguments = {"task": _TASK, **config}
    if str(arguments["task"]).startswith("llm/"):
        chat, prompt = {"messages": [{"role": "user", "content": _QUESTION}]}, {"prompt": _QUESTION}
        arguments.setdefault("input_example", chat if arguments["task"] == _CHAT else prompt)
    arguments["metadata"] = {"task": arguments["task"], **(config.get("metadata") or {})}
    # Without requirements, MLflow infers them by running the model in subprocesses.
    versions = (("torch", torch.__version__.partition("+")[0]), ("transformers", transformers.__version__))
    arguments.setdefault("pip_requirements", [f"{package}=={version}" for package, version in versions])
    arguments["transformers_model"] = os.fspath(folder)
    if int(transformers.__version__.partition(".")[0]) >= 5:
        # MLflow 3.17 cannot load a path with transformers 5, so the loaded model is passed.
        model_class: Any = find_class(metadata.model_class, trust_remote_code=True)  # the class that was trained
        arguments["transformers_model"] = {
            "model": model_class.from_pretrained(folder, dtype="auto"),
            "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
        }
    return arguments
