"""The page about runs, in a real browser."""

import json
import math
import re

import pytest

from composer.report import write_page

EVIL = "</script><img src=x onerror=alert(1)>"


def write_run(folder, name, *, offset=0.0, status="finished", error=None):
    folder.mkdir()
    metrics = [
        {"batch": n, "epoch": n // 10, "sample": 8 * n, "token": 0, "time_s": 0.5 * n,
         "metrics": {"loss/train/total": "nan" if n == 7 else 2.0 / (n + 1) + offset, f"own/{EVIL}": n,
                     "metrics/train/Accuracy": n / 40, "metrics/eval/Accuracy": n / 50, "lr-SGD/group0": 0.1,
                     "schedule/MixUp.alpha": n / 60}}
        for n in range(40)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "config.json").write_text(json.dumps({"run_name": name, "lr": offset, "world_size": 1, "seed": 3}))
    times = {"started": "2026-01-01T00:00:00+00:00", "updated": "2026-01-01T00:01:40+00:00"}
    (folder / "status.json").write_text(json.dumps({"status": status, "error": error, "batch": 40, **times}))
    (folder / "acting.json").write_text(json.dumps({f"{EVIL} on init": {"count": 2, "batches": [[0, 0], [5, 9]]}}))
    (folder / "times.json").write_text(json.dumps({"step": {"backward": 3.0, "waiting for data": 1.0}, "profiler": []}))
    return folder


@pytest.fixture
def page(tmp_path):
    first = write_run(tmp_path / "first", f"first {EVIL}")
    second = write_run(tmp_path / "second", "second", offset=1.0, status="failed", error=f"Traceback: {EVIL}")
    return write_page([first, second], tmp_path / "pages" / "report.html")


def test_the_data_lies_in_the_page_and_nothing_else_is_asked_for(page):
    text = page.read_text()
    block = re.search(r'<script type="application/json" id="composer-data">(.*?)</script>', text, re.DOTALL)[1]
    runs = json.loads(block)["runs"]
    assert [run["name"] for run in runs] == [f"first {EVIL}", "second"]
    assert len(runs[0]["curves"]["loss/train/total"]["values"]) == 40
    assert runs[0]["curves"]["loss/train/total"]["values"][2] == 0.66666667  # as many digits as a screen can show
    assert EVIL not in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


def test_the_page_of_a_long_run_with_many_metrics_is_small(tmp_path):
    names = [f"mine/value{number}" for number in range(30)]
    lines = [
        {"batch": n, "epoch": n // 1000, "sample": 64 * n, "token": 0, "time_s": 0.153171 * n,
         "metrics": {name: math.sin(n * (1 + place)) for place, name in enumerate(names)}}
        for n in range(20_000)
    ]  # fmt: skip
    run = write_run(tmp_path / "run", "run")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert write_page([run], tmp_path / "page.html").stat().st_size < 1_500_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 360])
def test_a_browser_shows_the_page_without_complaint_and_without_a_network(page, browser, width, scheme):
    browser.look(width=width, scheme=scheme)
    browser.open(page)
    assert browser.run("document.querySelector('h1').textContent") == "2 runs"
    browser.wait_until("document.querySelectorAll('.chart .curve').length > 0")
    assert browser.run("document.querySelector('tbody .failed').textContent") == "failed"
    assert browser.run("document.querySelector('pre').textContent") == f"Traceback: {EVIL}"
    assert browser.run("document.querySelectorAll('img').length") == 0
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 300) == (scheme == "dark")
    assert browser.complaints() == ([], [])


CHART = "document.querySelector('[data-chart=\"loss/train/total\"]')"
IS_DRAWN = f"{CHART}?.drawn"  # charts are drawn once they come into sight, and anew on a change


def test_runs_lie_over_each_other_and_can_be_taken_away(page, browser):
    browser.open(page)
    names = f"{CHART}.drawn.lines.map(line => line.name)"
    browser.wait_until(IS_DRAWN)
    assert browser.run(names)[1] == "second"
    browser.run("document.querySelector('[data-run=\"0\"]').click()")
    browser.wait_until(f"{names}.length === 1")
    assert browser.run(names) == ["second"]
    assert browser.run(f"{CHART}.querySelectorAll('.curve').length") == 1


def test_curves_can_be_smoothed_made_logarithmic_and_shown_over_time(page, browser):
    browser.open(page)
    browser.run(
        "for (const [id, value, event] of [['smoothing', 0.5, 'input'], ['axis', 'time_s', 'change']]) {"
        "  const control = document.getElementById(id); control.value = value; control.dispatchEvent(new Event(event));"
        "} document.getElementById('log').click()"
    )
    browser.wait_until(f"{CHART}?.drawn?.isLog")
    smooth = f"{CHART}.drawn.lines.find(line => !line.isRaw)"
    assert browser.run(f"{smooth}.x.slice(0, 3)") == [0, 0.5, 1]
    # A mean of all before, by 0.5 for each step back, over the weights that there are: 2, then (2 * 0.5 + 1) / 1.5.
    assert browser.run(f"{smooth}.y.slice(0, 2)") == pytest.approx([2.0, 4 / 3])
    assert browser.run(f"{smooth}.y[7]") is None


def test_evaluations_and_schedules_are_never_smoothed(page, browser):
    browser.open(page)
    browser.run("const s = document.getElementById('smoothing'); s.value = 0.9; s.dispatchEvent(new Event('input'))")
    browser.wait_until(f"{CHART}?.drawn?.lines.some(line => line.isRaw)")
    for chart, smoothed in (
        ("metrics/Accuracy", ["second train"]),
        ("lr-SGD/group0", []),
        ("schedule/MixUp.alpha", []),
    ):
        node = f"document.querySelector('[data-chart=\"{chart}\"]')"
        browser.run(f"{node}.scrollIntoView()")
        browser.wait_until(f"{node}.drawn")
        assert browser.run(f"{node}.drawn.lines.filter(line => line.isRaw).map(line => line.name)")[1:] == smoothed
    sections = browser.run("[...document.querySelectorAll('h2')].map(title => title.textContent)")
    assert sections[sections.index("Learning rate") + 1] == "Schedules"
    evaluated = "document.querySelector('[data-chart=\"metrics/Accuracy\"]').drawn.lines"
    evaluated += ".find(line => line.name === 'second eval').y"
    assert browser.run(evaluated) == pytest.approx([n / 50 for n in range(40)])


def test_zooming_into_a_chart_changes_what_it_shows(page, browser):
    browser.open(page)
    browser.wait_until(IS_DRAWN)
    browser.run(f"{CHART}.scrollIntoView()")
    before = browser.run(f"{CHART}.drawn.xRange")
    left, top, width, height = browser.run(
        f"(() => {{ const r = {CHART}.querySelector('.sensor').getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height]; })()"
    )
    for kind, share in (("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseMoved", 0.75), ("mouseReleased", 0.75)):
        place = {"x": left + share * width, "y": top + height / 2}
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)
    browser.wait_until(f"{CHART}.drawn.xRange[0] !== {before[0]}")
    first, last = browser.run(f"{CHART}.drawn.xRange")
    # The middle half of what was shown, give or take a pixel at either side.
    pixel = (before[1] - before[0]) / width
    assert first == pytest.approx(before[0] + 0.25 * (before[1] - before[0]), abs=2 * pixel)
    assert last == pytest.approx(before[0] + 0.75 * (before[1] - before[0]), abs=2 * pixel)
    reset = f"{CHART}.parentNode.querySelector('.reset')"
    assert browser.run(f"{reset}.hidden") is False
    browser.run(f"{reset}.click()")
    assert browser.run(f"{CHART}.drawn.xRange") == before


def test_the_times_of_a_step_say_where_callbacks_count(page, browser):
    browser.open(page)
    text = browser.run("document.querySelector('#step-times + p').textContent")
    assert "includes the algorithms and callbacks of the event that ends it" in text
    assert "preparing the batch those of before_forward" in text
    rows = browser.run(
        "[...document.querySelectorAll('#step-times tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows == [["backward", *["75.0 % 3.00 s"] * 2], ["waiting for data", *["25.0 % 1.00 s"] * 2]]


def test_the_table_of_settings_shows_what_differs(page, browser):
    browser.open(page)
    browser.run("document.getElementById('differences').click()")
    rows = browser.run("[...document.querySelectorAll('tr.differs')].map(row => row.cells[0].textContent)")
    assert rows == ["run_name", "lr"]


def overview(browser):
    """Return the head of the table of runs, and its first row."""
    cells = "[...document.querySelectorAll('.overview {} tr:first-child :is(th, td)')].map(cell => cell.innerText)"
    head, row = (browser.run(cells.format(part)) for part in ("thead", "tbody"))
    return dict(zip(head, row, strict=True))


def test_the_table_of_runs_has_results_and_only_the_settings_that_differ(page, browser):
    browser.open(page)
    shown = overview(browser)
    assert list(shown) == [
        *("run", "ended", "train loss", "eval Accuracy", "train Accuracy", "learning rate", "lr"),
        *("batches", "started", "took"),
    ]
    assert shown["train loss"] == "0.05000\nbest 0.05000 at batch 39"  # the lower, the better
    assert shown["eval Accuracy"] == "0.7800\nbest 0.7800 at batch 39"
    assert (shown["ended"], shown["lr"], shown["learning rate"]) == ("finished", "0.0", "0.1000")
    assert (shown["batches"], shown["started"], shown["took"]) == ("40", "2026-01-01 00:00", "00:01:40")


def test_a_run_that_diverged_marks_every_point_that_is_no_number_and_draws_fast(tmp_path, browser):
    run = write_run(tmp_path / "run", "run", status="running")
    lines = [{"batch": n, "metrics": {"loss/train/total": 1.0 if n < 50 else "nan"}} for n in range(20_000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = {"started": "2026-01-01T00:00:00+00:00", "updated": "2026-01-03T03:04:05+00:00"}
    (run / "status.json").write_text(json.dumps({"status": "running", **times}))
    browser.open(write_page([run], tmp_path / "page.html"))
    browser.wait_until(IS_DRAWN)
    # One line in the chart says where it began.
    assert browser.run(f"[...{CHART}.querySelectorAll('text.bad')].map(text => text.textContent)") == ["nan"]
    assert browser.run(f"{CHART}.querySelectorAll('.odd-line').length") == 1
    [odd] = browser.run(f"{CHART}.drawn.odd")
    assert (odd["first"], odd["marks"][0], 3_000 < len(odd["marks"]) <= 4_000) == (50, 50, True)
    shown = overview(browser)
    assert shown["ended"] == "running, seen last 2026-01-03 03:04:05 UTC"  # a run that was killed cannot say so
    assert shown["train loss"] == "nan\nbest 1 at batch 0"
    assert shown["took"] == "2 d 03:04:05"
    assert browser.complaints() == ([], [])


def test_one_run_without_metrics_and_one_with_thousands_of_names_are_shown(tmp_path, browser):
    few = write_run(tmp_path / "few", "few")
    (few / "metrics.jsonl").write_text("")
    browser.open(write_page([few], tmp_path / "few.html"))
    assert "No metrics were logged." in browser.run("document.getElementById('curves').textContent")
    many = write_run(tmp_path / "many", "many")
    values = {f"layers/{number}": 1.0 for number in range(3_000)}
    (many / "metrics.jsonl").write_text(json.dumps({"batch": 0, "metrics": values}) + "\n")
    browser.open(write_page([many], tmp_path / "many.html"))
    assert browser.run("document.querySelectorAll('.chart').length") == 0
    browser.run("document.querySelector('#more-curves summary').click()")
    browser.wait_until("document.querySelectorAll('.chart').length === 60")
    assert browser.run("document.querySelector('#more-curves .grid + button').textContent") == "2940 more"
    assert browser.complaints() == ([], [])
