"""Where logged values go."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_events import Logger, LoggerDestination
from composer_time import Timestamp


class Keep(LoggerDestination):
    """Keeps how each of its methods was called."""

    def __init__(self):
        self.calls = []

    def log_hyperparameters(self, *args, **kwargs):
        self.calls.append(("log_hyperparameters", args, kwargs))

    def log_metrics(self, *args, **kwargs):
        self.calls.append(("log_metrics", args, kwargs))

    def log_table(self, *args, **kwargs):
        self.calls.append(("log_table", args, kwargs))

    def log_images(self, *args, **kwargs):
        self.calls.append(("log_images", args, kwargs))

    def log_traces(self, *args, **kwargs):
        self.calls.append(("log_traces", args, kwargs))

    def upload_file(self, *args, **kwargs):
        self.calls.append(("upload_file", args, kwargs))


class OnlyMetrics(LoggerDestination):
    def log_metrics(self, metrics, step=None):
        self.step = step


@pytest.fixture
def state():
    return SimpleNamespace(timestamp=Timestamp(batch=7), run_name="plum")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda log: log.log_hyperparameters({"lr": 1}), ("log_hyperparameters", ({"lr": 1},), {})),
        (lambda log: log.log_metrics({"loss": 1}), ("log_metrics", ({"loss": 1}, 7), {})),
        (lambda log: log.log_metrics({"loss": 1}, step=0), ("log_metrics", ({"loss": 1}, 0), {})),
        (lambda log: log.log_table(["a"], [[1]]), ("log_table", (["a"], [[1]], "Table", 7), {})),
        (lambda log: log.log_table(["a"], [[1]], "T", 3), ("log_table", (["a"], [[1]], "T", 3), {})),
        (lambda log: log.log_images("x"), ("log_images", ("x", "Images", False, 7, None, None, True), {})),
        (
            lambda log: log.log_images("x", "I", True, 0, {"m": 1}, {0: "cat"}, False),
            ("log_images", ("x", "I", True, 0, {"m": 1}, {0: "cat"}, False), {}),
        ),
        (lambda log: log.log_traces({"a": 1}), ("log_traces", ({"a": 1},), {})),
    ],
)
def test_every_destination_gets_the_value_and_the_current_batch_unless_told_another(state, call, expected):
    places = [Keep(), Keep()]
    call(Logger(state, places))
    assert [place.calls for place in places] == [[expected], [expected]]


def test_a_file_goes_out_under_names_that_are_filled_in(state, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    place = Keep()
    Logger(state, place).upload_file("{run_name}/{rank}/{batch}", "/tmp/{run_name}.pt", overwrite=True)
    expected = {
        "state": state,
        "remote_file_name": "plum/0/{batch}",
        "file_path": Path("/tmp/plum.pt"),
        "overwrite": True,
    }
    assert place.calls == [("upload_file", (), expected)]


def test_a_file_is_handed_to_a_destination_that_does_not_say_it_keeps_files(state, tmp_path):
    place = Keep()
    logger = Logger(state, place)
    assert not logger.has_file_upload_destination()
    logger.upload_file("a", tmp_path)
    assert place.calls[0][2]["overwrite"] is False


def test_a_destination_that_keeps_files_is_known(state):
    class KeepFiles(LoggerDestination):
        def can_upload_files(self):
            return True

    assert Logger(state, [Keep(), KeepFiles()]).has_file_upload_destination()


@pytest.mark.parametrize(
    ("given", "number"), [(None, 0), ([], 0), (Keep(), 1), ([Keep()], 1), ((Keep(), Keep()), 2), ({Keep(), Keep()}, 2)]
)
def test_destinations_are_kept_as_a_tuple(state, given, number):
    destinations = Logger(state, given).destinations
    assert isinstance(destinations, tuple)
    assert len(destinations) == number


def test_destinations_can_be_changed(state):
    logger, place = Logger(state), Keep()
    logger.destinations = place
    logger.log_traces({"a": 1})
    assert len(place.calls) == 1


def test_what_nobody_takes_is_not_even_given_a_step():
    logger = Logger(SimpleNamespace(), LoggerDestination())  # a state without a timestamp
    logger.log_metrics({"loss": 1})
    logger.log_table(["a"], [[1]])
    logger.log_images("x")
    logger.upload_file("a", "b")


def test_a_logger_tells_what_somebody_takes(state):
    logger = Logger(state, OnlyMetrics())
    assert logger.takes("log_metrics")
    assert not logger.takes("log_images")
    with pytest.raises(ValueError, match=r"method='images'.*log_images"):
        logger.takes("images")


def test_a_destination_of_another_make_takes_everything(state):
    class Duck:
        def __getattr__(self, name):
            return lambda *args, **kwargs: heard.append(name)

    heard = []
    logger = Logger(state, Duck())
    logger.log_traces({})
    logger.log_metrics({})
    assert heard == ["log_traces", "log_metrics"]
