"""Messages of a run in a Slack channel."""

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer.loggers._service_queue import PATIENCE_S, Outbox, Snapshot, require
from composer_events.arguments import check_counts, check_text_lists, to_time
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination, format_log_data_value
from composer_events.state import State
from composer_time import Time, TimeUnit

__all__ = ["SlackLogger"]

_MOST_PER_MESSAGE = 50  # Slack's limit of blocks per message, with the header,
_LONGEST = 3000  # and of characters per block
_MOST_WAITS = 5  # per message; a channel takes about one message a second
_RECONNECT_S = 1.0

_log = logging.getLogger("composer.loggers.slack_logger")


class SlackLogger(LoggerDestination):
    """Logger that posts values to a Slack channel, several per message.

    A separate thread sends the messages, so a slow or unreachable Slack causes a warning but does not delay training.

    Args:
        include_keys: Regular expressions, matched at the beginning of the names of values. If empty, everything is
            posted, and a warning is logged.
        formatter_func: Function of the values by name and the keyword `step` that returns the blocks of a message. By
            default, they are a header with the step and a line for each value.
        log_interval: The interval in epochs (`'1ep'`, or a bare number) or batches. The first one is always posted.
        max_logs_per_message: Maximum number of values in a message, at most Slack's limit of 50.
        slack_logging_api_key: By default the environment variable `SLACK_LOGGING_API_KEY`.
        channel_id: By default the environment variable `SLACK_LOGGING_CHANNEL_ID`.
        patience_s: Seconds that the end of the run waits for Slack.

    Attributes:
        client: Slack's client, a `slack_sdk.WebClient`.
        log_dict: The values of the next message.

    Raises:
        MissingConditionalImportError: If slack-sdk is not installed; the extra `slack` brings it.
        ValueError: If the interval has another unit.

    Example:
        >>> from composer.loggers import SlackLogger
        >>> slack = SlackLogger(["loss/train", "metrics/eval"], log_interval="1ep", slack_logging_api_key="xoxb-1",
        ...                     channel_id="C0123456789")
    """

    def __init__(
        self,
        include_keys: Sequence[str] = (),
        formatter_func: Callable[..., list[dict[str, Any]]] | None = None,
        log_interval: int | str | Time[int] = "1ba",
        max_logs_per_message: int = 50,
        slack_logging_api_key: str | None = None,
        channel_id: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        slack_sdk = require("slack_sdk", extra="slack")
        self.log_interval: Time[Any] = to_time("log_interval", log_interval, TimeUnit.EPOCH)
        if self.log_interval.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self.log_interval.value < 1:
            raise ValueError(f"log_interval={log_interval!r} must be in epochs ('1ep') or batches ('10ba').")
        check_counts(max_logs_per_message=max_logs_per_message)
        self.slack_logging_api_key = slack_logging_api_key or os.environ.get("SLACK_LOGGING_API_KEY")
        self.channel_id = channel_id or os.environ.get("SLACK_LOGGING_CHANNEL_ID")
        needs = {
            "slack_logging_api_key (or SLACK_LOGGING_API_KEY) is not set, so Slack rejects messages": (
                self.slack_logging_api_key
            ),
            "channel_id (or SLACK_LOGGING_CHANNEL_ID) is not set, so Slack rejects messages": self.channel_id,
            "include_keys is empty, so everything is posted": include_keys,
        }
        for notice in (text for text, given in needs.items() if not given):
            _log.warning("SlackLogger: %s.", notice)
        # The client's own retries draw their delays from Python's global generator, which would change the random
        # numbers of data augmentation in training.
        self.client = slack_sdk.WebClient(retry_handlers=[])
        self.formatter_func = formatter_func
        self.max_logs_per_message = min(max_logs_per_message, _MOST_PER_MESSAGE)
        self.log_dict: dict[str, Any] = {}
        check_text_lists(include_keys=include_keys)
        self._wanted = [re.compile(pattern) for pattern in include_keys or ()]
        self._outbox = Outbox(type(self).__name__, patience_s=patience_s)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Store hyperparameters for the next message."""
        self._keep(hyperparameters, None)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Store metrics for the next message."""
        self._keep(metrics, step)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Store the actions of algorithms for the next message."""
        self._keep(traces, None)

    def init(self, state: State, logger: Logger) -> None:
        """Start the sending thread."""
        self._outbox.begin()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Post at the interval, if it counts batches."""
        self._post_at(TimeUnit.BATCH, state.timestamp.num_batches)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Post at the interval, if it counts epochs."""
        self._post_at(TimeUnit.EPOCH, state.timestamp.num_epochs)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait until all messages are posted, since users read the channel when training has ended."""
        self._outbox.drain()

    def close(self, state: State, logger: Logger) -> None:
        """Post the remaining values."""
        self._post()

    def post_close(self) -> None:
        """Post the values that other callbacks logged while closing, and wait until they are sent."""
        self._post()
        self._outbox.close()

    def _keep(self, values: dict[str, Any], step: int | None) -> None:
        wanted = values
        if self._wanted:
            wanted = {name: values[name] for name in values if any(each.match(name) for each in self._wanted)}
        snapshot = Snapshot(wanted)
        for name in wanted:
            self.log_dict[name] = (snapshot, step)
            if len(self.log_dict) >= self.max_logs_per_message:
                self._post()

    def _post_at(self, unit: TimeUnit, count: int) -> None:
        if self.log_interval.unit == unit and (count == 1 or count % self.log_interval.value == 0):
            self._post()

    def _post(self) -> None:
        if not self.log_dict:
            return
        kept, self.log_dict = self.log_dict, {}
        # The values of one logging call share a snapshot, which must be counted only once.
        size_bytes = sum({id(snapshot): snapshot.size_bytes for snapshot, _ in kept.values()}.values())
        self._outbox.post(lambda: self._send(kept), size_bytes=size_bytes)

    def _send(self, kept: dict[str, tuple[Snapshot, int | None]]) -> None:
        data = {name: snapshot.read()[name] for name, (snapshot, _) in kept.items()}
        step = max((step for _, step in kept.values() if step is not None), default=None)
        blocks = (self.formatter_func or _default_blocks)(data, step=step)
        message = {
            "token": self.slack_logging_api_key,
            "channel": self.channel_id,
            "blocks": blocks,
            "text": f"Logged {len(data)} items to Slack",
        }
        for attempt in range(_MOST_WAITS + 1):
            try:
                self.client.chat_postMessage(**message)
                return
            except OSError:
                if attempt:
                    raise
                time.sleep(_RECONNECT_S)
            except require("slack_sdk.errors", extra="slack").SlackApiError as error:
                if error.response.status_code != 429 or attempt == _MOST_WAITS:
                    raise
                time.sleep(int(error.response.headers.get("Retry-After", 1)))


def _default_blocks(data: dict[str, Any], step: int | None) -> list[dict[str, Any]]:
    texts = [f"*{name}:* {format_log_data_value(value)}"[:_LONGEST] for name, value in data.items()]
    blocks: list[dict[str, Any]] = [{"type": "section", "text": {"type": "mrkdwn", "text": text}} for text in texts]
    if step is not None and len(blocks) < _MOST_PER_MESSAGE:
        blocks.insert(0, {"type": "header", "text": {"type": "plain_text", "text": f"step {step}"}})
    return blocks
