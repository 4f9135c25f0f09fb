"""Recording of the system load: processors, memory, disks and network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from composer.callbacks._machine import BackgroundReader
from composer.loggers._service_queue import require, warn_logging_problem
from composer.profiler.trace_handler import profiler_of
from composer_events.arguments import check_seconds
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["SystemProfiler"]

_GIB = 1 << 30
_KIB = 1 << 10


class SystemProfiler(Callback):
    """Read the system load in a separate thread, and add it to the trace as counters.

    It requires psutil: `pip install 'composer-suite[system]'`. Values that cannot be read are left out, with one
    warning.

    Args:
        profile_cpu: Record CPU utilization: counter `cpu`, in percent.
        profile_memory: Record memory usage: `memory/virtual` and `memory/swap`, and for each GPU `memory/cuda/...`, in
            GiB.
        profile_disk: Record disk reads and writes: `disk/<device>/<what>`, in operations, KiB or ms since boot.
        profile_net: Record network traffic: `network/<interface>/...`, in KiB since the last reading.
        stats_thread_interval_seconds: Interval between readings, in seconds.

    Raises:
        MissingConditionalImportError: If psutil is not installed, at the start of training.
        RuntimeError: If the Trainer has no profiler.
        ValueError: If the interval is not positive.
    """

    def __init__(
        self,
        profile_cpu: bool = True,
        profile_memory: bool = False,
        profile_disk: bool = False,
        profile_net: bool = False,
        stats_thread_interval_seconds: float = 0.5,
    ) -> None:
        check_seconds(stats_thread_interval_seconds=stats_thread_interval_seconds)
        self.profile_cpu = profile_cpu
        self.profile_memory = profile_memory
        self.profile_disk = profile_disk
        self.profile_net = profile_net
        self.stats_thread_interval_seconds = stats_thread_interval_seconds
        self._reader: BackgroundReader[None] | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Start reading."""
        psutil, profiler = require("psutil", extra="system"), profiler_of(state, self)
        counters: dict[str, Any] = {}  # of the network, at the last reading
        wanted: dict[Callable[[], None], bool] = {
            lambda: profiler.marker("cpu", categories=["cpu"]).counter(
                {"cpu_percent": psutil.cpu_percent()}
            ): self.profile_cpu,
            lambda: _read_memory(psutil, profiler): self.profile_memory,
            lambda: _read_disks(psutil, profiler): self.profile_disk,
            lambda: _read_network(psutil, profiler, counters): self.profile_net,
        }
        readers = [read for read, is_wanted in wanted.items() if is_wanted]

        def read() -> None:
            readers[:] = [each for each in readers if _succeeds(each)]

        self._reader = BackgroundReader("The machine's load", read, self.stats_thread_interval_seconds)
        self._reader.latest()

    def close(self, state: State, logger: Logger) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _succeeds(read: Callable[[], None]) -> bool:
    """Return whether a reader succeeds. A failed reader is not called again: it would most likely fail again."""
    try:
        read()
    except Exception as error:  # profiling must not end training
        warn_logging_problem(f"The SystemProfiler leaves out what cannot be read: {type(error).__name__}: {error}")
        return False
    return True


def _read_memory(psutil: Any, profiler: Profiler) -> None:
    swap, virtual = psutil.swap_memory(), psutil.virtual_memory()
    count = profiler.marker
    count("memory/swap", categories=["memory"]).counter({"used_gib": swap.used / _GIB})
    count("memory/virtual", categories=["memory"]).counter(
        {"used_gib": virtual.used / _GIB, "available_gib": virtual.available / _GIB}
    )
    if torch.cuda.is_initialized():  # reading must not initialize CUDA
        for name, value in torch.cuda.memory_stats().items():
            if "bytes" in name and name.endswith(("current", "peak")):
                count(f"memory/cuda/{name}", categories=["memory"]).counter({"gib": value / _GIB})


def _read_disks(psutil: Any, profiler: Profiler) -> None:
    disks = psutil.disk_io_counters(perdisk=True) or {}  # containers may hide disks
    for device, counters in disks.items():
        for field, value in counters._asdict().items():  # named tuples, whose fields depend on the platform
            number = value / _KIB if field.endswith("bytes") else value
            unit = field.replace("bytes", "kib")
            profiler.marker(f"disk/{device}/{field}", categories=["disk"]).counter({unit: number})


def _read_network(psutil: Any, profiler: Profiler, before: dict[str, Any]) -> None:
    now = psutil.net_io_counters(pernic=True)
    for nic, counters in now.items():
        last = before.get(nic, counters)  # the first difference of an interface is zero
        for name, sent in (("kb_sent", "bytes_sent"), ("kb_recv", "bytes_recv")):
            since = (getattr(counters, sent) - getattr(last, sent)) / _KIB
            profiler.marker(f"network/{nic}/{name}", categories=["net"]).counter({name: since})
    before.clear()
    before.update(now)
