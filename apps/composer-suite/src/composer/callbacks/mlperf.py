"""Log of an MLPerf training run, in the format of the compliance checker."""

from __future__ import annotations

import json
import logging
import os
import platform
import posixpath
import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import IterableDataset

from composer.loggers._service_queue import require
from composer_dist import dist
from composer_events.arguments import check_counts, check_numbers
from composer_events.callback import Callback
from composer_events.hparams import get_composer_env_dict

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["MLPerfCallback", "get_system_description"]

_BENCHMARKS: Final = ("resnet", "bert")
_DIVISIONS: Final = ("open",)
_STATUSES: Final = ("onprem", "cloud", "preview")


class MLPerfCallback(Callback):
    """Write the log and the system description that MLPerf Training requires.

    They are `<root_folder>/results/<system_name>/<benchmark>/result_<index>.txt` and
    `<root_folder>/systems/<system_name>.json`. Loggers that keep files receive them under these names in the folder of
    the run. This callback needs the extra `mlperf`.

    Args:
        root_folder: Root folder of the submission.
        index: Index of the run within the submission.
        benchmark: `'resnet'` or `'bert'`.
        target: Value of the metric at which the run succeeds.
        division: `'open'`.
        metric_name: Name of the metric.
        metric_label: Label of the evaluator.
        submitter: Name of the submitter.
        system_name: Name of the system. Default: derived from the devices.
        status: `'onprem'`, `'cloud'` or `'preview'`.
        cache_clear_cmd: Command that clears the system's caches before training. It runs without a shell.
        host_processors_per_node: Number of CPUs of a node, for the system description.
        exit_at_target: Whether to stop training at the target.

    Attributes:
        success: Whether the target was reached.

    Raises:
        MissingConditionalImportError: If mlperf-logging is not installed.
        ValueError: If an argument has a value that is not listed above; at the start of training, if there are several
            evaluators.
        FileExistsError: At the start, if the result already exists.

    Reference:
        MLPerf Training rules and logging: https://github.com/mlcommons/training_policies, https://github.com/mlcommons/logging.
    """

    def __init__(
        self,
        root_folder: str,
        index: int,
        benchmark: str = "resnet",
        target: float = 0.759,
        division: str = "open",
        metric_name: str = "MulticlassAccuracy",
        metric_label: str = "eval",
        submitter: str = "MosaicML",
        system_name: str | None = None,
        status: str = "onprem",
        cache_clear_cmd: str | Sequence[str] | None = None,
        host_processors_per_node: int | None = None,
        exit_at_target: bool = False,
    ) -> None:
        given = {
            "benchmark": (benchmark, _BENCHMARKS),
            "division": (division, _DIVISIONS),
            "status": (status, _STATUSES),
        }
        for name, (value, accepted) in given.items():
            if value not in accepted:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, accepted))}.")
        check_counts(0, index=index)
        check_numbers(target=target)
        if host_processors_per_node is not None:
            check_counts(host_processors_per_node=host_processors_per_node)
        if cache_clear_cmd is not None and not cache_clear_cmd:
            raise ValueError(f"cache_clear_cmd={cache_clear_cmd!r} must be a command, or None.")
        self.mllogger: Any = require("mlperf_logging.mllog", extra="mlperf").get_mllogger()
        self._constants: Any = require("mlperf_logging.mllog.constants", extra="mlperf")
        self.root_folder = root_folder
        self.benchmark, self.target = benchmark, target
        self.metric_name, self.metric_label = metric_name, metric_label
        self.cache_clear_cmd = shlex.split(cache_clear_cmd) if isinstance(cache_clear_cmd, str) else cache_clear_cmd
        self.exit_at_target = exit_at_target
        self.success = False
        self.system_desc = get_system_description(submitter, division, status, system_name, host_processors_per_node)
        self.system_name = str(self.system_desc["system_name"])
        self._systems_name = posixpath.join("systems", f"{self.system_name}.json")
        self._result_name = posixpath.join("results", self.system_name, benchmark, f"result_{index}.txt")
        self.systems_path = os.path.join(root_folder, self._systems_name)
        self.filename = os.path.join(root_folder, self._result_name)
        self._file_handler: logging.FileHandler | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Create the files, clear the caches, and log the submission. Every rank must call this."""
        if os.path.exists(self.filename):
            raise FileExistsError(
                f"{self.filename} exists: a result is written once. Give another index, or move the file away."
            )
        dist.barrier()  # no rank may create the file before all of them have checked
        if dist.get_local_rank() == 0:
            for path in (self.systems_path, self.filename):
                os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(self.systems_path, "w", encoding="utf-8") as file:
                json.dump(self.system_desc, file, sort_keys=True, indent=4)
            self._file_handler = logging.FileHandler(self.filename)
            self._file_handler.setLevel(logging.INFO)
            # The library only logs to the console by default, but the checker reads a file.
            self.mllogger.logger.addHandler(self._file_handler)
            if self.cache_clear_cmd is None:
                warnings.warn(
                    "cache_clear_cmd is not set. MLPerf requires that the system's caches are cleared before each run.",
                    stacklevel=2,
                )
            else:
                subprocess.run(self.cache_clear_cmd, check=True, text=True)
                self.mllogger.start(key=self._constants.CACHE_CLEAR)
            self.mllogger.start(key=self._constants.INIT_START)
        if dist.get_global_rank() == 0:
            for key, value in {
                self._constants.SUBMISSION_BENCHMARK: self.benchmark,
                self._constants.SUBMISSION_DIVISION: self.system_desc["division"],
                self._constants.SUBMISSION_ORG: self.system_desc["submitter"],
                self._constants.SUBMISSION_PLATFORM: self.system_name,
                self._constants.SUBMISSION_STATUS: self.system_desc["status"],
            }.items():
                self._event(key, value)
            logger.upload_file(posixpath.join("{run_name}", self._systems_name), self.systems_path)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Log the sizes of data and batches, and the start of the run. Every rank must call this."""
        sizes = self._sizes(state)  # on every rank, so that an error is raised on all of them
        if dist.get_global_rank() == 0:
            for key, value in sizes.items():
                self._event(key, value)
        if dist.get_local_rank() == 0:
            self.mllogger.end(key=self._constants.INIT_STOP)
        dist.barrier()  # the measured time of the run starts when all ranks are initialized
        if dist.get_global_rank() == 0:
            self.mllogger.start(key=self._constants.RUN_START)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Log the start of an epoch."""
        if dist.get_global_rank() == 0:
            number = self._epoch_number(state)
            self.mllogger.start(key=self._constants.EPOCH_START, metadata={"epoch_num": number})
            metadata = {"first_epoch_num": number, "epoch_count": 1}
            self.mllogger.start(key=self._constants.BLOCK_START, metadata=metadata)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Log the end of an epoch."""
        if dist.get_global_rank() == 0:
            self.mllogger.end(key=self._constants.EPOCH_STOP, metadata={"epoch_num": self._epoch_number(state)})
            self._upload(logger)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Log the start of an evaluation."""
        if dist.get_global_rank() == 0:
            metadata = {"epoch_num": self._epoch_number(state)}
            self.mllogger.start(key=self._constants.EVAL_START, metadata=metadata)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Log the metric, and whether it has reached the target. Every rank must call this."""
        metric = state.eval_metrics.get(self.metric_label, {}).get(self.metric_name)
        if metric is None:
            raise ValueError(
                f"metric_name={self.metric_name!r} is not a metric of the evaluator labelled {self.metric_label!r}, "
                f"which has {sorted(state.eval_metrics.get(self.metric_label, {}))}."
            )
        accuracy = float(metric.compute())  # a collective, so on all ranks, although only rank 0 logs
        # Only once: a log must contain a single RUN_STOP.
        succeeds = accuracy > self.target and not self.success
        self.success = self.success or succeeds
        if dist.get_global_rank() == 0:
            constants, epoch = self._constants, self._epoch_number(state)
            self.mllogger.end(key=constants.EVAL_STOP, metadata={"epoch_num": epoch})
            self._event(constants.EVAL_ACCURACY, accuracy, {"epoch_num": epoch})
            self.mllogger.end(key=constants.BLOCK_STOP, metadata={"first_epoch_num": epoch})
            if succeeds:
                self.mllogger.end(key=constants.RUN_STOP, metadata={"status": constants.SUCCESS})
                self._upload(logger)
        if succeeds and self.exit_at_target:
            state.stop_training()

    def close(self, state: State, logger: Logger) -> None:
        """Close the log file."""
        if self._file_handler is not None:
            self.mllogger.logger.removeHandler(self._file_handler)
            self._file_handler.close()
            self._file_handler = None

    def _sizes(self, state: State) -> dict[str, Any]:
        if len(state.evaluators) > 1:
            labels = [evaluator.label for evaluator in state.evaluators]
            raise ValueError(f"MLPerf requires one evaluator, but the Trainer has {len(labels)}: {labels}. Give one.")
        loader: Any = state.train_dataloader
        constants, microbatch = self._constants, state.device_train_microbatch_size
        sizes: dict[str, Any] = {
            constants.SEED: state.seed,
            constants.GLOBAL_BATCH_SIZE: loader.batch_size * dist.get_world_size(),
            # Rounded up, since the last microbatch may be smaller.
            constants.GRADIENT_ACCUMULATION_STEPS: -(-loader.batch_size // int(microbatch or loader.batch_size)),
            constants.TRAIN_SAMPLES: _num_samples(loader),
        }
        if state.evaluators:
            sizes[constants.EVAL_SAMPLES] = _num_samples(state.evaluators[0].dataloader.dataloader)
        return sizes

    def _event(self, key: str, value: Any, metadata: dict[str, Any] | None = None) -> None:
        self.mllogger.event(key=key, value=value, metadata={} if metadata is None else metadata)

    def _epoch_number(self, state: State) -> int:
        # MLPerf's rules for BERT count epochs in samples.
        return int(state.timestamp.epoch if self.benchmark == "resnet" else state.timestamp.sample)

    def _upload(self, logger: Logger) -> None:
        logger.upload_file(posixpath.join("{run_name}", self._result_name), self.filename, overwrite=True)


def _num_samples(loader: Any) -> int:
    dataset = loader.dataset
    # An iterable dataset contains only this rank's shard of the data, a map-style dataset all of it.
    return len(dataset) * (dist.get_world_size() if isinstance(dataset, IterableDataset) else 1)


_UNKNOWN: Final = ""
_TO_BE_FILLED_IN: Final = """
    host_processor_frequency host_processor_caches host_processor_interconnect host_storage_type host_storage_capacity
    host_networking host_networking_topology host_memory_configuration accelerator_host_interconnect
    accelerator_frequency accelerator_on-chip_memories accelerator_memory_configuration accelerator_interconnect
    accelerator_interconnect_topology cooling hw_notes sw_notes
"""


def get_system_description(
    submitter: str,
    division: str,
    status: str,
    system_name: str | None = None,
    host_processors_per_node: int | None = None,
) -> dict[str, Any]:
    """Return the system description that MLPerf requires. Entries that cannot be detected are empty.

    Args:
        submitter: Name of the submitter.
        division: `'open'`.
        status: `'onprem'`, `'cloud'` or `'preview'`.
        system_name: Default: `<number of ranks>x<device>_composer`.
        host_processors_per_node: Number of CPUs of a node.

    Returns:
        The content of `systems/<system_name>.json`.

    Example:
        >>> get_system_description('Plum', 'open', 'onprem', system_name='shed')['system_name']
        'shed'
    """
    num_nodes = max(dist.get_world_size() // dist.get_local_world_size(), 1)
    if num_nodes > 1:
        warnings.warn(
            f"The description of a system of {num_nodes} nodes only describes this node. Check the file before you "
            "submit it.",
            stacklevel=2,
        )
    try:
        import psutil
    except ImportError:
        psutil = None
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else _UNKNOWN
    machine = get_composer_env_dict()
    default_name = f"{dist.get_world_size()}x{(accelerator or machine['cpu_model']).replace(' ', '_')}_composer"
    description = dict.fromkeys(_TO_BE_FILLED_IN.split(), _UNKNOWN)
    return description | {
        "submitter": submitter,
        "division": division,
        "status": status,
        "number_of_nodes": num_nodes,
        "host_processors_per_node": _UNKNOWN if host_processors_per_node is None else host_processors_per_node,
        "host_processor_model_name": machine["cpu_model"],
        "host_processor_core_count": psutil.cpu_count(logical=False) if psutil else _UNKNOWN,
        "host_processor_vcpu_count": os.cpu_count(),
        "host_memory_capacity": f"{psutil.virtual_memory().total / 1e9:.0f} GB" if psutil else _UNKNOWN,
        "accelerators_per_node": dist.get_local_world_size() if accelerator else 0,
        "accelerator_model_name": accelerator,
        "accelerator_memory_capacity": (
            f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB" if accelerator else _UNKNOWN
        ),
        "framework": f"PyTorch v{torch.__version__} and MosaicML composer v{machine['composer_version']}",
        "other_software_stack": {
            "cuda_version": torch.version.cuda or _UNKNOWN,
            "composer_version": machine["composer_version"],
            "python_version": sys.version,
        },
        "operating_system": f"{platform.system()} {platform.release()}",
        "system_name": default_name if system_name is None else system_name,
    }
