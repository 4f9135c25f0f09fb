"""What is read on a thread of its own."""

import gc
import itertools
import threading
import time

import pytest

from composer.callbacks._machine import BackgroundReader


def eventually(is_so, timeout_s=120.0):
    end_s = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.002)
    return is_so()


@pytest.fixture
def threads():
    """Tell the threads that read and did not do so before the test."""
    before = set(threading.enumerate())
    return lambda: [each for each in threading.enumerate() if each.name == "composer-reader" and each not in before]


def test_the_first_answer_is_there_at_once_and_later_ones_follow_by_themselves():
    go_on, counter = threading.Event(), itertools.count()

    def read():
        number = next(counter)
        if number:
            go_on.wait()
        return number

    reader = BackgroundReader("The counter", read, interval_s=0.001)
    assert reader.latest() == 0
    go_on.set()
    assert eventually(lambda: reader.latest() >= 3)
    reader.close()


def test_a_reading_that_hangs_delays_nobody(threads):
    go_on, calls = threading.Event(), itertools.count()

    def read():
        number = next(calls)
        if number:
            go_on.wait()
        return number

    reader = BackgroundReader("The disk", read, interval_s=0.001)
    assert [reader.latest() for _ in range(100)] == [0] * 100
    reader.close()
    go_on.set()
    assert eventually(lambda: not threads())


def test_a_reading_that_fails_costs_one_line_and_the_last_answer_stays(threads, caplog):
    answers = iter([1, 2])
    reader = BackgroundReader("The machine", lambda: next(answers), interval_s=0.001)
    assert reader.latest() == 1
    assert eventually(lambda: not threads())
    assert reader.latest() == 1
    assert sum("The machine can no longer be read" in record.getMessage() for record in caplog.records) == 1
    reader.close()


def test_the_first_failure_is_the_callers():
    def read():
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        BackgroundReader("The device", read, interval_s=1.0).latest()


def test_no_thread_outlives_a_reader_that_nobody_closes(threads):
    reader = BackgroundReader("The counter", lambda: 1, interval_s=0.001)
    reader.latest()
    assert threads()
    del reader
    gc.collect()
    assert eventually(lambda: not threads())


def test_after_close_it_begins_anew(threads):
    counter = itertools.count()
    reader = BackgroundReader("The counter", lambda: next(counter), interval_s=60.0)
    reader.latest()
    reader.close()
    assert eventually(lambda: not threads())
    assert reader.latest() > 0
    reader.close()
