import sys
from types import SimpleNamespace

import pytest

from composer_checkpoint.stores.base import retry


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that were to be slept, which are not."""
    slept = []
    monkeypatch.setattr(sys.modules["composer_checkpoint.stores.base"], "time", SimpleNamespace(sleep=slept.append))
    return slept


def failing(times, error=OSError):
    calls = []

    def call():
        calls.append(len(calls))
        if len(calls) <= times:
            raise error(f"failure {len(calls)}")
        return "done"

    return call, calls


def test_without_parentheses_three_attempts_are_made(pauses):
    call, calls = failing(2)
    assert retry(call)() == "done"
    assert len(calls) == 3


def test_the_last_error_is_raised(pauses):
    call, calls = failing(9)
    with pytest.raises(OSError, match="failure 4"):
        retry(OSError, num_attempts=4)(call)()
    assert len(calls) == 4


def test_other_errors_pass_at_once(pauses):
    call, calls = failing(1, KeyError)
    with pytest.raises(KeyError):
        retry(OSError)(call)()
    assert len(calls) == 1


def test_pauses_double_and_have_some_jitter(pauses):
    call, _ = failing(3)
    retry(OSError, num_attempts=4, initial_backoff=2.0, max_jitter=0.25)(call)()
    assert len(pauses) == 3
    for pause, least in zip(pauses, (2, 4, 8), strict=True):
        assert least <= pause <= least + 0.25


def test_a_function_may_know_which_attempt_it_is(pauses):
    seen = []

    @retry(ValueError)
    def call(name, retry_index):
        seen.append((name, retry_index))
        if retry_index < 2:
            raise ValueError

    call("x")
    assert seen == [("x", 0), ("x", 1), ("x", 2)]


@pytest.mark.parametrize("arguments", [{"num_attempts": 0}, {"initial_backoff": -1}, {"max_jitter": float("nan")}])
def test_numbers_that_mean_nothing_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        retry(**arguments)
