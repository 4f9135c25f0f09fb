"""A server with the health of this node's ranks: `/healthz` for probes, `/metrics` for Prometheus."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("--health-port needs prometheus-client. Run `pip install 'composer-dist[health]'`.") from error

from composer_dist.launch.args import CannotStartError
from composer_dist.progress import RankProgress

if TYPE_CHECKING:
    from prometheus_client import Metric

_POLL_S = 0.2
_SAMPLE_S = 1.0
_WINDOW = 60  # samples of the throughput


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this node's ranks.

    Attributes:
        ranks: The progress of those that have begun.
        num_restarts: How often all ranks were started again.
        problem: Why the ranks do not make progress, or `None` if they do.
    """

    ranks: Sequence[RankProgress]
    num_restarts: int
    problem: str | None


class HealthServer(ThreadingMixIn, WSGIServer):
    """A server in a thread of the launcher.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        look: Returns the state of the ranks; called from threads of the server.

    Raises:
        CannotStartError: If nothing can listen there.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, look: Callable[[], Snapshot]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._look, self._samples = look, deque[tuple[float, int]](maxlen=_WINDOW)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise CannotStartError(
                f"cannot listen on --health-host={host} --health-port={port}: {error}. Give another port, or an "
                "address of this machine."
            ) from error
        self.registry = CollectorRegistry()
        self.registry.register(_Metrics(look, self._throughput))
        self._metrics = make_wsgi_app(self.registry)
        self.set_app(self._respond)
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="composer-health", daemon=True)

    def start(self) -> None:
        """Serve requests."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, and release the port."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave clients that send nothing or close the connection early out of the console."""

    def service_actions(self) -> None:
        """Take a sample of the throughput; called several times a second."""
        now = time.monotonic()
        if self._samples and now - self._samples[-1][0] < _SAMPLE_S:
            return
        # Only ranks that train, since the counts of a resumed run do not begin at 0.
        counts = [progress.samples for progress in self._look().ranks if progress.phase != "start"]
        if not counts or (self._samples and max(counts) < self._samples[-1][1]):  # started again
            self._samples.clear()
        if counts:
            self._samples.append((now, max(counts)))

    def _throughput(self) -> float | None:
        taken = list(self._samples)
        if len(taken) < 2:
            return None
        return (taken[-1][1] - taken[0][1]) / (taken[-1][0] - taken[0][0])

    def _respond(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return self._metrics(environ, start_response)
        status, text = "404 Not Found", "There are /healthz and /metrics."
        if path == "/healthz":
            problem = self._look().problem
            status, text = ("200 OK", "ok") if problem is None else ("503 Service Unavailable", problem)
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # for a client that sends nothing

    def log_message(self, format: str, *args: Any) -> None:
        """Leave requests out of the console."""


class _Metrics(Collector):
    """The metrics, computed when they are asked for."""

    def __init__(self, look: Callable[[], Snapshot], throughput: Callable[[], float | None]) -> None:
        self._look, self._throughput = look, throughput

    def collect(self) -> "Iterator[Metric]":
        state, now = self._look(), time.monotonic()
        batches = CounterMetricFamily("composer_batches", "Batches done.", labels=["rank"])
        idle = GaugeMetricFamily("composer_idle_seconds", "Time since a rank's last progress.", labels=["rank"])
        phases = CounterMetricFamily(
            "composer_phase_seconds", "Time spent in each phase of training.", labels=["rank", "phase"]
        )
        for progress in state.ranks:
            rank = str(progress.rank)
            batches.add_metric([rank], progress.batch)
            idle.add_metric([rank], max(0.0, now - progress.time_s))
            for phase, seconds in progress.seconds.items():
                phases.add_metric([rank, phase], seconds)
        yield from (batches, idle, phases)
        yield CounterMetricFamily(
            "composer_restarts", "How often all ranks were started again.", value=state.num_restarts
        )
        if state.ranks:
            latest = max(state.ranks, key=lambda progress: progress.batch)
            yield CounterMetricFamily("composer_samples", "Samples trained on, by all ranks.", value=latest.samples)
            yield CounterMetricFamily("composer_tokens", "Tokens trained on, by all ranks.", value=latest.tokens)
        yield from self._gauges(state.ranks)

    def _gauges(self, ranks: Sequence[RankProgress]) -> "Iterator[Metric]":
        throughput = self._throughput()
        if throughput is not None:
            yield GaugeMetricFamily(
                "composer_samples_per_second", "Throughput of all ranks in the last minute.", value=throughput
            )
        for progress in ranks:
            if progress.loss is not None:  # on rank 0
                yield GaugeMetricFamily("composer_loss", "The last training loss.", value=progress.loss)
        saved = max((progress for progress in ranks if progress.checkpoint_s), key=_saved_s, default=None)
        if saved is not None:
            yield GaugeMetricFamily(
                "composer_checkpoint_batch", "Batch of the last checkpoint.", value=saved.checkpoint_batch
            )
            yield GaugeMetricFamily(
                "composer_checkpoint_timestamp_seconds", "When it was complete, since 1970.", value=_saved_s(saved)
            )


def _saved_s(progress: RankProgress) -> float:
    return progress.checkpoint_s or 0.0
