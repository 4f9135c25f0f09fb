"""Messages that arrive at a server on this machine, which answers as Slack does, or does not."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from urllib.parse import parse_qs

import pytest
import torch

from composer.core import Callback
from composer.loggers import SlackLogger

pytestmark = pytest.mark.skipif(find_spec("slack_sdk") is None, reason="needs the extra 'slack'")


class Slack:
    """A server that keeps what is posted to it, and answers what it is told to."""

    def __init__(self):
        self.messages = []
        self.answers = []  # statuses of the next answers, 200 afterwards
        self.may_answer = threading.Event()
        self.may_answer.set()
        slack = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                slack.may_answer.wait()
                status = slack.answers.pop(0) if slack.answers else 200
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                if status == 200:
                    slack.messages.append(_parsed(body))
                self.wfile.write(json.dumps({"ok": status == 200, "error": "ratelimited"}).encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/api/"


def _parsed(body):
    if body.startswith("{"):
        return json.loads(body)
    fields = {name: values[0] for name, values in parse_qs(body).items()}
    return {**fields, "blocks": json.loads(fields["blocks"])}


@pytest.fixture
def slack():
    slack = Slack()
    yield slack
    slack.may_answer.set()
    slack.server.shutdown()
    slack.server.server_close()


@pytest.fixture
def make_logger(slack):
    def make(include_keys=("loss/train",), **settings):
        settings = {"slack_logging_api_key": "xoxb-1", "channel_id": "C1", **settings}
        logger = SlackLogger(include_keys, **settings)
        logger.client.base_url = slack.url
        return logger

    return make


def text_of(message):
    return [block["text"]["text"] for block in message["blocks"]]


def test_a_message_has_the_step_and_the_values_that_are_wanted(make_trainer, make_logger, slack):
    trainer = make_trainer(max_duration="2ba", loggers=make_logger())
    assert slack.messages == []
    trainer.fit()
    trainer.close()
    assert [text_of(message)[0] for message in slack.messages] == ["step 0", "step 1"]
    assert text_of(slack.messages[0])[1].startswith("*loss/train/total:* ")
    assert {message["text"] for message in slack.messages} == {"Logged 1 items to Slack"}
    assert {message["channel"] for message in slack.messages} == {"C1"}


@pytest.mark.parametrize(("interval", "num_messages"), [("1ba", 8), ("4ba", 3), ("2ep", 3), (1, 4)])
def test_the_interval(make_trainer, make_logger, slack, interval, num_messages):
    # The first is always posted: of 8 batches 1, 4 and 8; of 4 epochs 1, 2 and 4.
    trainer = make_trainer(max_duration="4ep", loggers=make_logger(log_interval=interval))
    trainer.fit()
    trainer.close()
    assert len(slack.messages) == num_messages


def test_names_are_matched_from_their_beginning(begun, make_logger, slack):
    engine = begun(make_logger(["loss", "metrics/.*/Accuracy"]))
    engine.logger.log_metrics(
        {"loss/train": 1, "my_loss": 2, "metrics/eval/Accuracy": 3, "metrics/Accuracy": 4}, step=1
    )
    engine.close()
    assert text_of(slack.messages[0])[1:] == ["*loss/train:* 1", "*metrics/eval/Accuracy:* 3"]


def test_a_message_that_is_full_is_posted_at_once(begun, make_logger, slack):
    engine = begun(make_logger(["."], max_logs_per_message=500))
    engine.logger.log_metrics({f"m{number}": number for number in range(120)}, step=1)
    engine.close()
    assert [len(message["blocks"]) for message in slack.messages] == [50, 50, 21]  # the last with a header


def test_what_others_log_while_they_close_is_posted(make_trainer, make_logger, slack):
    class LogsAtTheEnd(Callback):
        def close(self, state, logger):
            logger.log_metrics({"own/last": 5})

    make_trainer(loggers=make_logger(["own"]), callbacks=LogsAtTheEnd()).close()
    assert text_of(slack.messages[-1])[1:] == ["*own/last:* 5"]


def test_blocks_of_ones_own(begun, make_logger, slack):
    def as_one(data, step=None):
        return [{"type": "section", "text": {"type": "plain_text", "text": f"{step}: {sorted(data)}"}}]

    engine = begun(make_logger(["."], formatter_func=as_one))
    engine.logger.log_metrics({"b": torch.tensor(1.0), "a": 2}, step=5)
    engine.close()
    assert text_of(slack.messages[0]) == ["5: ['a', 'b']"]


def test_a_slack_that_asks_for_patience_gets_it(begun, make_logger, slack, drawing):
    slack.answers = [429, 429]
    engine = begun(make_logger(["."]))
    engine.logger.log_metrics({"a": 1}, step=5)
    engine.close()
    assert len(slack.messages) == 1
    assert "composer-SlackLogger" not in drawing


def test_a_slack_that_refuses_costs_one_warning_and_no_step(make_trainer, make_logger, slack):
    slack.answers = [500] * 100
    trainer = make_trainer(max_duration="4ba", loggers=make_logger())
    with pytest.warns(RuntimeWarning, match="SlackLogger did not take what was logged; training continues") as warned:
        trainer.fit()
    trainer.close()
    assert trainer.state.timestamp.batch == 4
    assert len(warned) == 1


def test_a_slack_that_is_away_costs_one_warning_and_no_step(make_trainer, make_logger, slack, drawing):
    logger = make_logger()
    slack.server.shutdown()
    slack.server.server_close()
    trainer = make_trainer(max_duration="4ba", loggers=logger)
    with pytest.warns(RuntimeWarning, match=r"SlackLogger did not take what was logged.*refused") as warned:
        trainer.fit()
    trainer.close()
    assert trainer.state.timestamp.batch == 4
    assert len(warned) == 1
    assert "composer-SlackLogger" not in drawing


def test_a_slack_that_hangs_is_waited_for_at_the_end_only_and_only_so_long(make_trainer, make_logger, slack):
    slack.may_answer.clear()
    trainer = make_trainer(max_duration="20ba", loggers=make_logger(patience_s=0.5))
    with pytest.warns(RuntimeWarning, match=r"SlackLogger is not done after 0.5 s: the last 20 calls") as warned:
        trainer.fit()
    trainer.close()
    assert slack.messages == []  # it has answered nobody, and nobody waits for it any more
    assert trainer.state.timestamp.batch == 20
    assert len(warned) == 1


def test_what_a_slow_slack_has_not_taken_is_delivered_at_the_end(begun, make_logger, slack):
    slack.may_answer.clear()
    engine = begun(make_logger(["."], log_interval="1ba"))
    for step in range(5):
        engine.logger.log_metrics({"a": step}, step=step)
        engine.logger.destinations[0].batch_end(engine.state, engine.logger)
    threading.Timer(0.3, slack.may_answer.set).start()
    engine.close()
    assert text_of(slack.messages[-1]) == ["step 4", "*a:* 4"]


def test_what_finds_no_room_is_dropped_with_one_warning(begun, make_logger, slack):
    slack.may_answer.clear()
    engine = begun(make_logger(["."], max_logs_per_message=1))
    large = torch.zeros(5 * 2**20)  # 20 MiB of the 64 that there are
    for step in range(3):
        engine.logger.log_metrics({"large": large}, step=step)
    with pytest.warns(RuntimeWarning, match=r"is slower than what is logged.*the 64 MiB of the queue") as warned:
        engine.logger.log_metrics({"large": large}, step=3)
    for step in range(4, 8):
        engine.logger.log_metrics({"large": large}, step=step)
    slack.may_answer.set()
    engine.close()
    assert len(warned) == 1
    assert [text_of(message)[0] for message in slack.messages] == ["step 0", "step 1", "step 2"]  # without gaps


def test_what_is_larger_than_all_the_room_is_taken_where_nothing_waits(begun, make_logger, slack):
    engine = begun(make_logger(["."], max_logs_per_message=1))
    engine.logger.log_metrics({"large": torch.zeros(20 * 2**20)}, step=3)  # 80 MiB, and there are 64
    engine.close()
    assert [text_of(message)[0] for message in slack.messages] == ["step 3"]


def test_what_is_missing_is_said(caplog, monkeypatch):
    monkeypatch.delenv("SLACK_LOGGING_API_KEY", raising=False)
    monkeypatch.delenv("SLACK_LOGGING_CHANNEL_ID", raising=False)
    SlackLogger()
    assert "SLACK_LOGGING_API_KEY" in caplog.text
    assert "SLACK_LOGGING_CHANNEL_ID" in caplog.text
    assert "everything is posted" in caplog.text


@pytest.mark.parametrize("interval", ["5sp", "0ba"])
def test_no_interval(interval):
    with pytest.raises(ValueError, match=f"log_interval='{interval}' must be in epochs"):
        SlackLogger(["a"], log_interval=interval, slack_logging_api_key="x", channel_id="C")
