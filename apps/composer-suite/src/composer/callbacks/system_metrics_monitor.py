"""What the machine does while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from composer.callbacks._machine import GPU_KEYS, GPUReader, HostReader
from composer.callbacks._steady_reader import SteadyReader
from composer_dist import dist
from composer_events.arguments import check_flags
from composer_events.callback import Callback
from composer_events.logger import log_lazily

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State
    from composer_time import Timestamp

__all__ = ["SystemMetricsMonitor"]

_FRESH_S: Final = 1.0  # the drivers' own numbers are means over about as long


class SystemMetricsMonitor(Callback):
    """Log what the machine is doing when a batch of training, evaluation or prediction begins.

    | metric | what it is |
    |---|---|
    | `cpu_percentage` | use of the processors |
    | `cpu_memory_<field>`, `disk_memory_<field>` | bytes and percent of memory and of the disk with the root folder |
    | `network_<field>` | bytes, packets and errors since the computer was started |
    | `min_<key>_rank_<r>`, `max_<key>_rank_<r>` | the least and the most over all ranks, and whose it is |

    The keys of the last line are `gpu_percentage`, `memory_percentage`, `gpu_temperature_C` and `gpu_power_usage_W`, of
    NVIDIA's GPUs. The rest is of this rank's computer. The machine is asked once a second, on a thread of its own, and
    its latest answer logged: no batch waits for a driver or a disk. With GPUs on several ranks there is a collective
    for each batch, between the CPUs. It needs the extra `system`.

    Args:
        log_all_data: Whether to log the GPUs of all ranks, as `<key>_rank_<r>`, instead of the least and the most.

    Raises:
        TypeError: If `log_all_data` is neither true nor false.
        MissingConditionalImportError: If psutil is not installed, or nvidia-ml-py where there are GPUs.
    """

    def __init__(self, log_all_data: bool = False) -> None:
        check_flags(log_all_data=log_all_data)
        self.log_all_data = log_all_data
        self._look_for_machine()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Log, while training."""
        self._log(state, logger)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Log, while evaluating."""
        self._log(state, logger)

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """Log, while predicting."""
        self._log(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Ask no more."""
        self._machine.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what reads: its thread and the drivers' handles belong to this process and this machine."""
        return {name: value for name, value in vars(self).items() if name not in ("_machine", "_has_gpu")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read the machine that the copy is on."""
        vars(self).update(state)
        self._look_for_machine()

    def _look_for_machine(self) -> None:
        self._has_gpu = torch.cuda.is_available() and torch.version.hip is None
        reading = _reading(HostReader(), GPUReader() if self._has_gpu else None)
        self._machine = SteadyReader("The machine's load", reading, _FRESH_S)

    def _log(self, state: State, logger: Logger) -> None:
        of_host, of_gpu = self._machine.latest()
        if self._has_gpu:
            of_host = of_host | _named_by_rank(dist.all_gather_object(of_gpu), self.log_all_data)
        log_lazily(state, logger, _copy, of_host)


def _copy(now: Timestamp, numbers: dict[str, float]) -> dict[str, float]:
    del now
    return dict(numbers)


def _reading(host: HostReader, gpu: GPUReader | None) -> Callable[[], tuple[dict[str, float], dict[str, float]]]:
    return lambda: (host.read(), {} if gpu is None else gpu.read())


def _named_by_rank(of_ranks: Sequence[dict[str, float]], log_all_data: bool) -> dict[str, float]:
    """Return what each rank's GPU does, or the least and the most of it, under names that say the rank.

    >>> _named_by_rank([{"gpu_percentage": 80}, {"gpu_percentage": 30}], log_all_data=False)
    {'min_gpu_percentage_rank_1': 30, 'max_gpu_percentage_rank_0': 80}
    """
    named: dict[str, float] = {}
    for key in GPU_KEYS:
        values = {rank: numbers[key] for rank, numbers in enumerate(of_ranks) if key in numbers}
        if log_all_data:
            named |= {f"{key}_rank_{rank}": value for rank, value in values.items()}
        elif values:
            least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            named |= {f"min_{key}_rank_{least}": values[least], f"max_{key}_rank_{most}": values[most]}
    return named
