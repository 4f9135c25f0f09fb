"""Messages of a run in a channel of Slack."""

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer.loggers._logged_values import Snapshot
from composer.loggers._service_queue import PATIENCE_S, Outbox, require
from composer_events.arguments import check_counts, check_functions, check_text_lists, check_texts, to_time
from composer_events.logger import Logger
from composer_events.logger_destination import LoggerDestination, format_log_data_value
from composer_events.state import State
from composer_time import Time, TimeUnit

__all__ = ["SlackLogger"]

_MOST_PER_MESSAGE = 50  # Slack takes no more blocks, of which a header is one,
_LONGEST = 3000  # and no more characters in one

_log = logging.getLogger("composer.loggers.slack_logger")


class SlackLogger(LoggerDestination):
    """Posts what is logged to a channel, some values to a message.

    Messages are sent on a thread of their own: a Slack that is slow or away costs a warning and no time.

    Args:
        include_keys: Regular expressions. A value is posted if one of them matches the beginning of its name. None
            posts everything, and a line in Python's log says so.
        formatter_func: Makes the blocks of a message out of values by name; it is also given `step`. By default a
            header with the step and a line for each value.
        log_interval: How often: epochs (`'1ep'`, or a bare number) or batches. The first one is always posted.
        max_logs_per_message: How many values a message has at most; never more than 50, the most that Slack takes.
        slack_logging_api_key: By default the variable of the environment `SLACK_LOGGING_API_KEY`.
        channel_id: By default the variable of the environment `SLACK_LOGGING_CHANNEL_ID`.
        patience_s: How long the end of the run waits for a Slack that does not answer.

    Attributes:
        client: The client of Slack, an `slack_sdk.WebClient`.
        log_dict: What the next message will have.

    Raises:
        MissingConditionalImportError: If slack-sdk is not installed; the extra `slack` brings it.
        TypeError: If an argument is of another kind.
        ValueError: If the interval is in another unit, or a pattern is no regular expression.

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
            raise ValueError(
                f"log_interval={log_interval!r} is no interval of messages. Give epochs ('1ep') or batches ('10ba')."
            )
        check_counts(max_logs_per_message=max_logs_per_message)
        check_functions(formatter_func=formatter_func)
        check_texts(slack_logging_api_key=slack_logging_api_key, channel_id=channel_id, may_be_none=True)
        self.slack_logging_api_key = slack_logging_api_key or os.environ.get("SLACK_LOGGING_API_KEY")
        self.channel_id = channel_id or os.environ.get("SLACK_LOGGING_CHANNEL_ID")
        self._tell_what_is_missing(include_keys)
        self.client = slack_sdk.WebClient(retry_handlers=retry_handlers())
        self.formatter_func = formatter_func
        self.max_logs_per_message = min(max_logs_per_message, _MOST_PER_MESSAGE)
        self.log_dict: dict[str, Any] = {}
        self._wanted = _patterns(include_keys)
        self._outbox = Outbox(type(self).__name__, patience_s=patience_s)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep the settings of the run for the next message."""
        self._keep(hyperparameters, None)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep values for the next message."""
        self._keep(metrics, step)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Keep which algorithms acted for the next message."""
        self._keep(traces, None)

    def init(self, state: State, logger: Logger) -> None:
        """Begin to send, once there is something to send."""
        self._outbox.begin()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Post at the interval, if it counts batches."""
        self._post_at(TimeUnit.BATCH, state.timestamp.num_batches)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Post at the interval, if it counts epochs."""
        self._post_at(TimeUnit.EPOCH, state.timestamp.num_epochs)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait until what was posted is there, so that nobody looks at the channel too early."""
        self._outbox.drain()

    def close(self, state: State, logger: Logger) -> None:
        """Post what is left."""
        self._post()

    def post_close(self) -> None:
        """Post what the others have logged while they closed, and wait until it is sent."""
        self._post()
        self._outbox.close()

    def _keep(self, values: dict[str, Any], step: int | None) -> None:
        wanted = {name: value for name, value in values.items() if self._is_wanted(name)}
        snapshot = Snapshot(wanted)
        for name in wanted:
            self.log_dict[name] = (snapshot, step)
            if len(self.log_dict) >= self.max_logs_per_message:
                self._post()

    def _is_wanted(self, name: str) -> bool:
        return not self._wanted or any(pattern.match(name) for pattern in self._wanted)

    def _post_at(self, unit: TimeUnit, count: int) -> None:
        if self.log_interval.unit == unit and (count == 1 or count % self.log_interval.value == 0):
            self._post()

    def _post(self) -> None:
        if not self.log_dict:
            return
        kept, self.log_dict = self.log_dict, {}
        size_bytes = sum({id(snapshot): snapshot.size_bytes for snapshot, _ in kept.values()}.values())
        self._outbox.post(lambda: self._send(kept), size_bytes=size_bytes)

    def _send(self, kept: dict[str, tuple[Snapshot, int | None]]) -> None:
        data = {name: snapshot.read()[name] for name, (snapshot, _) in kept.items()}
        step = max((step for _, step in kept.values() if step is not None), default=None)
        blocks = (self.formatter_func or _default_blocks)(data, step=step)
        self.client.chat_postMessage(
            token=self.slack_logging_api_key,
            channel=self.channel_id,
            blocks=blocks,
            text=f"Logged {len(data)} items to Slack",
        )

    def _tell_what_is_missing(self, include_keys: Sequence[str]) -> None:
        missing = []
        if not self.slack_logging_api_key:
            missing.append(
                "slack_logging_api_key (or the variable SLACK_LOGGING_API_KEY) is not given, so Slack refuses"
            )
        if not self.channel_id:
            missing.append("channel_id (or the variable SLACK_LOGGING_CHANNEL_ID) is not given, so Slack refuses")
        if not include_keys:
            missing.append("include_keys is empty, so everything is posted")
        for notice in missing:
            _log.warning("SlackLogger: %s.", notice)


def _patterns(include_keys: Any) -> list[re.Pattern[str]]:
    check_text_lists(include_keys=include_keys)
    try:
        return [re.compile(pattern) for pattern in include_keys or ()]
    except re.error as error:
        raise ValueError(
            f"include_keys={include_keys!r} has {error.pattern!r}, which is no regular expression: {error}."
        ) from None


def _default_blocks(data: dict[str, Any], step: int | None) -> list[dict[str, Any]]:
    texts = [f"*{name}:* {format_log_data_value(value)}"[:_LONGEST] for name, value in data.items()]
    blocks: list[dict[str, Any]] = [{"type": "section", "text": {"type": "mrkdwn", "text": text}} for text in texts]
    if step is not None and len(blocks) < _MOST_PER_MESSAGE:
        blocks.insert(0, {"type": "header", "text": {"type": "plain_text", "text": f"step {step}"}})
    return blocks


_RECONNECT_S = 1.0
_MOST_WAITS = 5  # for one message


def retry_handlers() -> list[Any]:
    """Return handlers for Slack's client, for connections that break and for messages that come too fast.

    Those of the client itself draw by how much longer to wait from Python's own generator. They would do so on the
    thread of the logger, and a batch that is being augmented on that of training would draw other numbers.
    """
    builtin = require("slack_sdk.http_retry.builtin_handlers", extra="slack")
    intervals = require("slack_sdk.http_retry.builtin_interval_calculators", extra="slack")

    class WaitsAsAsked(builtin.RateLimitErrorRetryHandler):
        """A channel takes about one message a second; what comes faster is sent when Slack says that it may be."""

        def prepare_for_next_attempt(
            self, *, state: Any, request: Any, response: Any = None, error: Exception | None = None
        ) -> None:
            headers = {name.lower(): values for name, values in response.headers.items()}
            state.next_attempt_requested = True
            time.sleep(int(headers.get("retry-after", ["1"])[0]))
            state.increment_current_attempt()

    return [
        builtin.ConnectionErrorRetryHandler(
            interval_calculator=intervals.FixedValueRetryIntervalCalculator(_RECONNECT_S)
        ),
        WaitsAsAsked(max_retry_count=_MOST_WAITS),
    ]
