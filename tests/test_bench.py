"""`make bench`: whatever becomes of a benchmark has its line in the table."""

import ast
import os
import time

import pytest

ROWS = [
    {"what": "a step | with a bar", "ours": 12.5, "unit": "ms", "plain": 10.0, "peers": {"Lightning": 31.25},
     "ratio": 1.25, "budget": "1.30", "is_met": True},
    {"what": "a slow step", "ours": 2000.4, "unit": "us", "plain": None, "peers": {},
     "ratio": None, "budget": "1500 us", "is_met": False},
]  # fmt: skip

SCRIPTS = {
    "keeps": f"write({ROWS[:1]!r})",
    "loses": f"write({ROWS!r}); sys.exit(1)",
    "breaks": "raise ValueError('no such layer')",
    "breaks_late": f"write({ROWS[:1]!r}); raise ValueError('no such layer')",
    "hangs": "import time; time.sleep(600)",
}
HEAD = """
import json, sys
def write(rows):
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump(rows, file)
"""


@pytest.fixture
def bench(tool, root, monkeypatch):
    monkeypatch.syspath_prepend(root / "tools")
    return tool("bench")


@pytest.fixture
def run(bench, tmp_path):
    for name, body in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(f"{HEAD}{body}\n")
    page = tmp_path / "page.md"

    def run(*names, arguments=(), limit_s=30.0):
        plan = [bench.Script(name, ("--rounds", "3"), limit_s) for name in names]
        status = bench.main(list(arguments), plan, tmp_path, page)
        table = [line for line in page.read_text().split("\n") if line.startswith("| ")] if page.exists() else []
        return status, table[2:]

    return run


def test_a_row_has_what_was_measured_and_the_command_for_it(run):
    status, (row,) = run("keeps")
    assert status == 0
    assert row == (
        r"| a step \| with a bar | 12.5 ms | 10 ms | Lightning 31.2 ms | 1.25 | 1.30 | yes "
        "| `python benchmarks/keeps.py --rounds 3` |"
    )


def test_the_summary_has_the_chosen_rows_and_the_number_of_budgets_met(bench, run, monkeypatch, tmp_path):
    monkeypatch.setitem(bench.SUMMARY, "a slow step", "A step, in short")
    run("loses")
    summary, _, rest = (tmp_path / "page.md").read_text().partition("## How it is measured")
    assert "| A step, in short | 2000 us |  |  |  |" in summary
    assert "1 of 2 budgets are met." in summary
    assert "| a slow step | 2000 us |" in rest


def test_what_lost_stays_in_the_table_and_is_no_failure(run):
    status, (_, row) = run("loses")
    assert status == 0
    assert row.startswith("| a slow step | 2000 us |  |  |  | 1500 us | **no** |")


@pytest.mark.parametrize(("name", "num_rows"), [("breaks", 0), ("breaks_late", 1)])
def test_a_script_that_fails_has_a_row_that_says_so(run, name, num_rows):
    status, rows = run(name, "keeps")
    assert status == 1
    assert len(rows) == num_rows + 2  # the next one ran all the same
    assert rows[num_rows].startswith("| **failed**: it ended with status 1: ValueError: no such layer |")


def test_a_script_that_hangs_is_ended(run):
    start = time.monotonic()
    status, (row,) = run("hangs", limit_s=1.0)
    assert (status, time.monotonic() - start < 300) == (1, True)
    assert "it was not done after 1 s" in row


def test_when_the_time_is_up_nothing_is_begun(run):
    status, rows = run("keeps", "loses", arguments=["--minutes", "0"])
    assert status == 1
    assert [row.split("|")[1].strip() for row in rows] == ["**failed**: there was no time left to run it"] * 2


def test_a_part_of_the_scripts_leaves_the_page_alone(run, tmp_path, capsys):
    status, rows = run("keeps", "breaks", arguments=["--only", "keeps"])
    assert (status, rows) == (0, [])
    assert "| 12.5 ms |" in capsys.readouterr().out
    run("keeps", "breaks", arguments=["--only", "keeps", "--output", str(tmp_path / "other.md")])
    assert "| 12.5 ms |" in (tmp_path / "other.md").read_text()


def test_the_page_is_replaced_in_one_step(bench, run, tmp_path, monkeypatch):
    run("keeps")
    before = (tmp_path / "page.md").read_text()

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        run("loses")
    assert (tmp_path / "page.md").read_text() == before
    assert not list(tmp_path.glob("tmp*"))


def test_the_machine_is_described_without_its_name(bench):
    assert "torch 2." in bench.machine()
    assert os.uname().nodename not in bench.machine()


def test_every_benchmark_is_in_the_plan_and_can_be_asked_for_its_rows(bench, root):
    scripts = {}
    for path in (root / "benchmarks").glob("*.py"):
        text = path.read_text()
        if '__name__ == "__main__"' in text:
            scripts[path.stem] = text
    assert set(scripts) == {script.name for script in bench.PLAN}
    for name, text in scripts.items():
        assert "add_option(" in text or "from gpt_steps import" in text, name


def test_every_benchmark_of_the_plan_has_its_rows_and_its_command_on_the_page(bench, root):
    page = (root / "docs" / "benchmarks.md").read_text()
    assert {script.name for script in bench.PLAN if f"| `{script.command}` |" not in page} == set()
    assert "**failed**" not in page


def test_rows_are_written_as_the_table_reads_them(root):
    tree = ast.parse((root / "benchmarks" / "rows.py").read_text())
    fields = [node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    assert set(fields) == set(ROWS[0])
