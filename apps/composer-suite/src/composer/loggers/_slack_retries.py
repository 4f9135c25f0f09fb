"""When a message to Slack is sent again."""

import time
from typing import Any

from composer.loggers._optional import require

__all__ = ["retry_handlers"]

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
