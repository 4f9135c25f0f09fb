"""The command `composer report` says on the console what it could not read or write."""

import json

import pytest

from composer.report.cli import main

GOOD = json.dumps({"batch": 1, "metrics": {"loss": 0.5}})


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run the command in a folder of the test, and return its exit status, what it printed and its errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main(arguments)
        return code, *capsys.readouterr()

    return call


def write_metrics(folder, *lines):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_lines_that_cannot_be_read_are_counted_for_each_run(run, tmp_path):
    write_metrics(tmp_path / "runs" / "a", "garbage", "{}")
    write_metrics(tmp_path / "runs" / "b", GOOD)
    write_metrics(tmp_path / "runs" / "c", GOOD, GOOD[:9])
    code, out, errors = run("runs", "--json")
    assert code == 0
    assert [len(one["curves"]) for one in json.loads(out)["runs"]] == [0, 1, 1]
    assert errors.splitlines() == [
        "composer report: unreadable lines of runs/a/metrics.jsonl left out: 2",
        "composer report: unreadable lines of runs/c/metrics.jsonl left out: 1",
    ]


def test_a_page_about_nothing_readable_is_written_and_says_so(run, tmp_path):
    write_metrics(tmp_path / "c1", "garbage")
    code, out, errors = run("c1")
    assert (code, out) == (0, "c1/report.html\n")
    assert errors == "composer report: unreadable lines of c1/metrics.jsonl left out: 1\n"


@pytest.mark.parametrize("folder", ["c1", "."])
def test_a_folder_in_the_place_of_the_metrics_is_named(folder, run, tmp_path):
    (tmp_path / "c1" / "metrics.jsonl").mkdir(parents=True)
    code, out, errors = run(folder)
    assert (code, out) == (2, "")
    assert errors == "composer report: error: [Errno 21] Is a directory: 'c1/metrics.jsonl'\n"


def test_a_page_that_cannot_be_written_is_named(run, tmp_path):
    write_metrics(tmp_path / "c1", GOOD)
    (tmp_path / "{file}").touch()
    code, out, errors = run("c1", "-o", "{file}/page.html")
    assert (code, out) == (2, "")
    assert errors.startswith("composer report: error: ")
    assert "'{file}" in errors


@pytest.mark.parametrize("typed", [["runs"], ["runs/a", "runs/b"]])
def test_the_page_lies_in_the_first_folder_that_was_named(typed, run, tmp_path):
    write_metrics(tmp_path / "runs" / "a", GOOD)
    write_metrics(tmp_path / "runs" / "b", GOOD)
    assert run(*typed)[:2] == (0, f"{typed[0]}/report.html\n")
