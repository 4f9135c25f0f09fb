import pytest

from composer_dist.launch.report import crash_report, root_cause
from composer_dist.launch.workers import Ending

CHAIN = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'cause'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
RuntimeError: boom
"""


@pytest.fixture
def ending(tmp_path):
    """Return a function that makes the end of rank 1, which wrote a text to stderr."""

    def make(stderr="", **settings):
        path = tmp_path / "stderr.log"
        path.write_text(stderr)
        known = {
            "rank": 1,
            "local_rank": 1,
            "pid": 42,
            "exit_code": 1,
            "time": 0.0,
            "by_itself": True,
            "has_exited": True,
            "what": "exited with code 1",
            "error": None,
            "stdout": "",
            "stderr": str(path),
        }
        return Ending(**known | settings)

    return make


def test_a_traceback_is_shown_with_its_causes_and_nothing_before(ending):
    earlier = "Traceback (most recent call last):\n  File 'b.py'\nOSError: caught and logged\n"
    said = root_cause(ending(f"{earlier}step 1\n{CHAIN}"), [], None)
    assert said.endswith(f"ended with:\n{CHAIN}")
    assert "caught and logged" not in said


def test_lines_that_torch_marks_with_the_rank_are_understood(ending):
    marked = "".join(f"[rank1]: {line}\n" for line in CHAIN.splitlines())
    assert root_cause(ending(f"step 1\n{marked}"), [], None).endswith(f"ended with:\n{marked}")


def test_an_error_file_comes_before_stderr(ending):
    error = {"message": "ValueError: boom", "traceback": "the traceback\n", "event": "loss", "notes": ["in EMA"]}
    first = ending(CHAIN, error=error)
    assert root_cause(first, [], "/logs").endswith(
        "the logs are in /logs\ncomposer: rank 1 ended during the event loss with:\nthe traceback\n"
    )
    said = crash_report([first])
    assert said.startswith("Global rank 1 (PID 42) exited with code 1 (root cause)\nValueError: boom during the event")
    assert "in EMA\n" in said


def test_without_a_traceback_the_last_lines_are_shown(ending):
    text = "".join(f"line {number}\n" for number in range(50))
    assert root_cause(ending(text), [], None).endswith("ended with:\n" + "".join(text.splitlines(True)[-20:]))


def test_a_rank_that_waited_in_vain_points_at_those_that_had_not_failed(ending):
    error = {"message": "DistBackendError: Timed out waiting 300000ms for recv operation", "traceback": "t\n"}
    said = root_cause(ending(error=error), [0, 3], None)
    assert "Ranks that had not failed by then: 0, 3." in said
    assert "dist_timeout" in said


def test_only_the_first_of_several_failures_is_the_root_cause(ending):
    said = crash_report([ending("a"), ending("b", rank=2)])
    assert said.count("(root cause)") == 1
    assert said.index("Global rank 1") < said.index("Global rank 2")


def test_an_exit_code_is_the_one_of_a_shell(ending):
    assert (ending(exit_code=7).status, ending(exit_code=-11).status) == (7, 139)


@pytest.mark.parametrize("mark", ["", "[rank1]: "])
def test_the_traceback_at_the_end_is_not_also_in_the_output_of_the_rank(ending, mark):
    text = "a warning\n" + "".join(f"{mark}{line}\n" for line in CHAIN.splitlines()) + "after it\n"
    failure = ending(text, error={"message": "RuntimeError: boom", "traceback": CHAIN})
    said = crash_report([failure])
    assert "a warning\n[the traceback is at the end of this report]\nafter it\n" in said
    assert "a.py" not in said
    assert root_cause(failure, [], None).endswith(CHAIN)
    assert "a.py" in crash_report([failure, failure])  # the report ends with the traceback of the first alone
