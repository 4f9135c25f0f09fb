"""The sections of the page about runs in a real browser: their order, the way to them, and what is closed at first."""

import json

import pytest

from composer.report import write_page

NONE = "\N{EN DASH}"
NAMES = {
    "time/batch": 1.0,
    "time/train": 0.5,
    "activations/l2_norm/layer_output.0": 2.0,
    "throughput/device/samples_per_sec": 4.0,
    "throughput/samples_per_sec": 8.0,
    "memory/peak_allocated_mem": 3.0,
    "l2_norm/grad/layer10.weight": 1.0,
    "l2_norm/grad/layer9.weight": 1.0,
    "l2_norm/grad/global": 1.0,
    "lr-SGD/group0": 0.1,
    "metrics/eval/Accuracy": 0.5,
    "loss/train/total": 0.7,
    "mine/reward": 0.2,
    "cpu_percentage": 50.0,
}


def profiled(name, total_s, share, **more):
    spans = {"count": 4, "median_s": total_s / 5, "p95_s": total_s / 3, "longest_s": total_s / 2}
    return {"name": name, "total_s": total_s, "share_of_steps": share, **spans, **more}


def write_run(folder, *, names=NAMES, error=None, profiler=()):
    folder.mkdir()
    lines = [{"batch": n, "epoch": 0, "sample": n, "token": 0, "time_s": 30.0 * n, "metrics": names} for n in (1, 2, 3)]
    for line in lines:  # in minutes, as a SpeedMonitor may log the same clock
        line["metrics"] = names | ({"time/train": line["time_s"] / 60} if "time/train" in names else {})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"run_name": folder.name}))
    (folder / "status.json").write_text(json.dumps({"status": "failed" if error else "finished", "error": error}))
    (folder / "times.json").write_text(json.dumps({"step": {"forward": 1.0}, "profiler": list(profiler)}))
    return folder


@pytest.fixture
def page(tmp_path):
    return write_page(
        [write_run(tmp_path / "run", profiler=[profiled("event/batch", 2.0, 0.8)])], tmp_path / "page.html"
    )


def test_what_one_looks_at_first_comes_first_and_what_is_much_is_closed(page, browser):
    browser.open(page)
    titles = browser.run("[...document.querySelectorAll('h2')].map(head => head.firstChild.textContent)")
    assert titles == [
        *("Losses", "Metrics", "Learning rate", "Gradients", "Throughput", "Memory", "mine"),
        *("Where the time of a step goes", "Profiled events, algorithms and callbacks"),
        *("Norms of layers", "Activations", "Time", "Machine"),
        *("Settings", "Checkpoints"),
    ]
    charts = "[...document.querySelectorAll('.chart')].map(chart => chart.dataset.chart)"
    assert browser.run(charts) == [
        *("loss/train/total", "metrics/Accuracy", "lr-SGD/group0", "l2_norm/grad/global"),
        *(
            "throughput/samples_per_sec",
            "throughput/device/samples_per_sec",
            "memory/peak_allocated_mem",
            "mine/reward",
        ),
    ]
    browser.run("document.querySelector('#more-curves summary').click()")
    browser.wait_until(f"{charts}.includes('l2_norm/grad/layer9.weight')")
    assert browser.run(charts)[-2:] == ["l2_norm/grad/layer9.weight", "l2_norm/grad/layer10.weight"]


def test_the_contents_lead_to_each_section_and_open_it_also_by_keyboard(page, browser):
    browser.open(page)
    links = browser.run("[...document.querySelectorAll('nav a')].map(link => link.textContent)")
    assert (links[:2], len(links)) == (["Losses", "Metrics"], 15)
    missing = "[...document.querySelectorAll('nav a')].filter(link => !document.querySelector(link.hash)).length"
    assert browser.run(missing) == 0
    browser.run("[...document.querySelectorAll('nav a')].find(link => link.textContent === 'Time').focus()")
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **key)
    chart = "document.querySelector('[data-chart=\"time/train\"]')"
    browser.wait_until(f"{chart}?.drawn")
    assert browser.run(f"{chart}.closest('details').querySelector('h2').getBoundingClientRect().top") < 300
    # It is drawn as wide as its box, although there was no box while the section was closed.
    width, box = browser.run(f"[{chart}.querySelector('svg').getBoundingClientRect().width, {chart}.clientWidth]")
    assert (width, box > 300) == (pytest.approx(box, abs=1), True)


@pytest.mark.parametrize(
    ("chart", "unit"),
    [
        ("throughput/samples_per_sec", "samples/s"),
        ("throughput/device/samples_per_sec", "samples/s per device"),
        ("memory/peak_allocated_mem", "GB"),
        ("time/train", "minutes"),
        ("lr-SGD/group0", None),
    ],
)
def test_axes_have_the_units_that_are_known(page, browser, chart, unit):
    browser.open(page)
    browser.run("document.querySelectorAll('details').forEach(details => details.open = true)")
    node = f"document.querySelector('[data-chart=\"{chart}\"]')"
    browser.wait_until(node)
    browser.run(f"{node}.scrollIntoView()")
    browser.wait_until(f"{node}.drawn")
    assert browser.run(f"{node}.drawn.yTitle") == (unit or "")
    assert unit is None or browser.run(f"[...{node}.querySelectorAll('text')].some(t => t.textContent === '{unit}')")


def test_each_run_has_a_table_of_its_own_that_can_be_sorted(tmp_path, browser):
    event = profiled("event/batch", 6.0, 0.75)
    hook = profiled("callback/LRMonitor/event/batch_end", 2.0, 0.25)
    epoch = profiled("event/epoch", 9.0, None)
    first = write_run(tmp_path / "first", profiler=[event, hook, epoch])
    old = {key: event[key] for key in ("name", "count", "total_s", "longest_s")}  # of an earlier release
    second = write_run(tmp_path / "second", profiler=[old])
    browser.open(write_page([first, second], tmp_path / "page.html"))
    text = "row => [...row.cells].map(cell => cell.textContent)"
    one, other = browser.run(f"[...document.querySelectorAll('.sortable')].map(table => [...table.rows].map({text}))")
    assert one == [
        ["name", "count", "total s", "mean ms", "median ms", "p95 ms", "longest ms", "% of steps"],
        ["event/epoch", "4", "9.000", "2,250.000", "1,800.000", "3,000.000", "4,500.000", NONE],
        ["event/batch", "4", "6.000", "1,500.000", "1,200.000", "2,000.000", "3,000.000", "75.0"],
        ["callback/LRMonitor/event/batch_end", "4", "2.000", "500.000", "400.000", "666.667", "1,000.000", "25.0"],
    ]
    assert other[1] == ["event/batch", "4", "6.000", "1,500.000", NONE, NONE, "3,000.000", NONE]
    heads = "[...document.querySelector('.sortable').querySelectorAll('th button')]"
    names = "[...document.querySelectorAll('.sortable')[0].tBodies[0].rows].map(row => row.cells[0].textContent)"
    names += ".map(name => name.split('/').at(-1))"
    browser.run(f"{heads}.at(-1).click()")
    assert browser.run(names) == ["batch", "batch_end", "epoch"]
    browser.run(f"{heads}.at(0).click()")
    assert browser.run(names) == ["batch_end", "batch", "epoch"]
    browser.run(f"{heads}.at(0).click()")
    assert browser.run(names) == ["epoch", "batch", "batch_end"]
    assert browser.run("document.querySelector('.sortable th').getAttribute('aria-sort')") == "descending"


def test_what_ended_a_run_stands_below_it_without_opening_its_traceback(tmp_path, browser):
    error = "Traceback (most recent call last):\n  ...\nOSError: disk full\nraised by callback Saves on batch 3\n"
    browser.open(write_page([write_run(tmp_path / "run", error=error)], tmp_path / "page.html"))
    assert browser.run("document.querySelector('.failure summary').textContent") == "OSError: disk full"
    assert browser.run("document.querySelector('.failure').closest('td').colSpan") == browser.run(
        "document.querySelector('.overview thead tr').cells.length"
    )


def test_what_is_looked_for_is_found_also_in_closed_sections(page, browser):
    browser.open(page)
    search = "const f = document.getElementById('filter'); f.value = '{}'; f.dispatchEvent(new Event('input'))"
    browser.run(f"(() => {{ {search.format('layer')} }})()")
    found = "[...document.querySelectorAll('#curves .chart')].map(chart => chart.dataset.chart)"
    browser.wait_until(f"{found}.length === 3")
    assert browser.run(found)[0] == "l2_norm/grad/layer9.weight"
    browser.run(f"(() => {{ {search.format('nobody')} }})()")
    assert browser.run("document.getElementById('curves').textContent") == "No metric has “nobody” in its name."
    browser.run(f"(() => {{ {search.format('')} }})()")
    assert browser.run("document.querySelectorAll('#more-curves details:not([open])').length") == 4


def test_what_was_zoomed_into_stays_so_when_curves_are_smoothed(page, browser):
    browser.open(page)
    chart = "document.querySelector('[data-chart=\"loss/train/total\"]')"
    browser.wait_until(f"{chart}?.drawn")
    browser.run(f"{chart}.querySelector('.sensor').scrollIntoView({{block: 'center'}})")
    drag(browser, chart, 0.25, 0.75)
    zoomed = browser.run(f"{chart}.drawn.xRange")
    browser.run("const s = document.getElementById('smoothing'); s.value = 0.5; s.dispatchEvent(new Event('input'))")
    browser.wait_until(f"{chart}.drawn.lines.length === 2")
    assert browser.run(f"{chart}.drawn.xRange") == zoomed
    assert 1 < zoomed[0] < zoomed[1] < 3


def drag(browser, chart, begin, end):
    """Drag the mouse over a chart, from one share of its width to another."""
    left, top, width, height = browser.run(
        f"(() => {{ const r = {chart}.querySelector('.sensor').getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height]; })()"
    )
    for kind, share in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
        place = {"x": left + share * width, "y": top + height / 2}
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)


def test_long_runs_are_shown_over_hours(tmp_path, browser):
    run = write_run(tmp_path / "run")
    lines = [{"batch": n, "time_s": 3600.0 * n, "metrics": {"loss/train/total": 1.0}} for n in range(5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser.open(write_page([run], tmp_path / "page.html"))
    browser.run("const a = document.getElementById('axis'); a.value = 'time_s'; a.dispatchEvent(new Event('change'))")
    chart = "document.querySelector('[data-chart=\"loss/train/total\"]')"
    browser.wait_until(f"{chart}?.drawn?.xTitle === 'hours'")
    assert browser.run(f"{chart}.drawn.lines[0].x") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_training_has_the_first_color_and_no_two_runs_of_twenty_have_one(tmp_path, browser, scheme):
    names = {"metrics/eval/Accuracy": 0.5, "metrics/train/Accuracy": 0.6}
    runs = [write_run(tmp_path / f"run{number:02}", names=names) for number in range(20)]
    chart = "document.querySelector('[data-chart=\"metrics/Accuracy\"]')"
    browser.look(scheme=scheme)
    for shown, labels in ((runs[:1], ["train", "eval"]), (runs, ["run00 train", "run00 eval"])):
        browser.open(write_page(shown, tmp_path / "page.html"))
        browser.wait_until(f"{chart}?.drawn")
        drawn = browser.run(f"{chart}.drawn.lines.map(line => line.name)")
        colors = browser.run(f"[...{chart}.querySelectorAll('.curve')].map(curve => getComputedStyle(curve).stroke)")
        assert drawn[:2] == labels
        assert len(set(colors)) == max(len(shown), 2)


@pytest.mark.parametrize("width", [1400, 360])
def test_a_value_that_is_pointed_at_says_of_which_run_it_is(tmp_path, browser, width):
    names = [f"digits-resnet-bs64-{number}" for number in (1, 2)]
    runs = [write_run(tmp_path / name, names={"loss/train/total": 0.5}) for name in names]
    browser.look(width=width)
    browser.open(write_page(runs, tmp_path / "page.html"))
    chart = "document.querySelector('[data-chart=\"loss/train/total\"]')"
    browser.wait_until(chart)
    browser.run(f"{chart}.scrollIntoView({{block: 'center'}})")
    browser.wait_until(f"{chart}.drawn")
    x, y = browser.run(
        f"(() => {{ const r = {chart}.querySelector('.sensor').getBoundingClientRect();"
        " return [r.left + r.width / 2, r.top + r.height / 2]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.wait_until(f"{chart}.querySelector('.tip').textContent.includes('0.5')")
    assert browser.run(f"[...{chart}.querySelectorAll('.tip .name')].map(name => name.textContent)") == names
    assert browser.run(f"{chart}.querySelector('.tip').firstChild.textContent") == "batches 2"


@pytest.fixture
def nine(tmp_path):
    """Return the page of nine runs of a sweep."""
    folders = []
    for number in range(9):
        folder = write_run(tmp_path / f"cifar-resnet50-lr0.{number}-wd0.0001-seed{number}")
        settings = {"optimizer/lr": number / 10, "optimizer/weight_decay": 1e-4, "foreach": None, "algorithms": "MixUp"}
        config = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(config))
        acting = {"MixUp on before_forward": {"count": 3, "batches": [[1, 3]]}}
        (folder / "acting.json").write_text(json.dumps(acting))
        folders.append(folder)
    return write_page(folders, tmp_path / "page.html")


def test_long_names_and_values_do_not_fill_the_table_of_runs(browser, tmp_path):
    folders = []
    for number in (1, 3):
        folder = write_run(tmp_path / f"run{number}-{'x' * 100}")
        settings = {"optimizer/lr": 0.1 * number, "optimizer/foreach": f"{number} y" * 200}
        (folder / "config.json").write_text(json.dumps({"run_name": folder.name} | settings))
        folders.append(folder)
    browser.open(write_page(folders, tmp_path / "page.html"))
    assert browser.run("document.querySelector('.overview').offsetHeight") < 300
    text = browser.run("document.querySelector('.overview').innerText")
    assert "0.3" in text
    assert "0.30000000000000004" not in text
    assert "x" * 50 not in text


OVERLAPS = """(() => {
  const found = [], rightmost = document.documentElement.clientWidth + 1;
  const pairs = (boxes, meet, name) => boxes.forEach((one, index) => boxes.slice(index + 1).forEach(other => {
    if (meet(one, other)) found.push(name);
  }));
  const meet = (room) => (one, other) => one.left + room < other.right && other.left + room < one.right
    && one.top + room < other.bottom && other.top + room < one.bottom;
  const boxesOf = (nodes) => [...nodes].map(node => node.getBoundingClientRect()).filter(box => box.width * box.height);
  for (const box of boxesOf(document.querySelectorAll('main *'))) {
    if (box.left < -1) found.push('cut off on the left');
  }
  for (const node of document.querySelectorAll('main > *, figure, .chart > svg, .controls > *, .runs > *, .wide')) {
    if (node.getBoundingClientRect().right > rightmost) found.push(`${node.tagName} is cut off`);
  }
  for (const holder of document.querySelectorAll('main, .grid, .controls, .runs, figcaption, nav, .wide')) {
    pairs(boxesOf(holder.children), meet(1), `overlap in ${holder.className || holder.tagName}`);
  }
  for (const chart of document.querySelectorAll('.chart > svg')) {
    pairs(boxesOf(chart.querySelectorAll(':scope > text')), meet(0), 'labels of an axis');
  }
  return found;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 360])
def test_nothing_overlaps_or_is_cut_off_at_any_width(nine, browser, width, scheme):
    browser.look(width=width, scheme=scheme)
    browser.open(nine)
    browser.run("document.querySelectorAll('details').forEach(details => details.open = true)")
    charts = browser.run("document.querySelectorAll('.chart').length")
    for number in range(charts):
        browser.run(f"document.querySelectorAll('.chart')[{number}].scrollIntoView()")
        browser.wait_until(f"document.querySelectorAll('.chart')[{number}].drawn")
    browser.run("scrollTo(0, 0)")
    assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert browser.run(OVERLAPS) == []
    assert browser.complaints() == ([], [])


@pytest.mark.parametrize("width", [1400, 360])
def test_each_of_nine_runs_can_be_found_in_the_legend_and_stands_out_when_pointed_at(nine, browser, width):
    browser.look(width=width)
    browser.open(nine)
    chart = "document.querySelector('[data-chart=\"loss/train/total\"]')"
    browser.run(f"{chart}.scrollIntoView({{block: 'center'}})")
    browser.wait_until(f"{chart}.drawn")
    names = browser.run("[...document.querySelectorAll('.runs label')].map(label => label.innerText.trim())")
    assert names == [f"cifar-resnet50-lr0.{number}-wd0.0001-seed{number}" for number in range(9)]
    browser.run("document.querySelectorAll('.runs label')[4].dispatchEvent(new Event('pointerenter'))")
    assert browser.run(f"[...{chart}.querySelectorAll('.curve:not(.dim)')].map(curve => curve.dataset.run)") == ["4"]
    browser.run("document.querySelectorAll('.runs button')[1].click()")  # none
    browser.wait_until(f"{chart}.drawn.lines.length === 0")
    browser.run("document.querySelectorAll('.runs input')[2].click()")
    browser.wait_until(f"{chart}.drawn.lines.length === 1")
    browser.run("document.querySelectorAll('.runs button')[0].click()")  # all
    browser.wait_until(f"{chart}.drawn.lines.length === 9")


def test_the_timeline_of_algorithms_is_folded(nine, browser):
    browser.open(nine)
    assert browser.run("document.getElementById('timeline').open") is False
    text = browser.run("document.querySelector('#timeline .acting').textContent")
    assert text == "MixUp on before_forward 3 times: batches 1 to 3"


def test_settings_are_in_groups_and_what_says_nothing_is_only_found_by_a_search(nine, browser):
    browser.open(nine)
    rows = "[...document.querySelectorAll('.settings tbody tr')].map(row => row.cells[0].textContent)"
    assert browser.run(rows) == [
        *("Optimizer", "optimizer/lr", "optimizer/weight_decay", "Algorithms", "algorithms", "Training", "run_name"),
    ]
    search = "(() => {{ const s = document.getElementById('settings'); s.value = '{}';"
    search += " s.dispatchEvent(new Event('input')); }})()"
    browser.run(search.format("mixup"))
    assert browser.run(rows) == ["Algorithms", "algorithms"]
    browser.run(search.format("foreach"))
    assert browser.run(rows) == ["Other settings", "foreach"]
    browser.run(search.format("nobody"))
    assert browser.run("document.querySelector('.settings').textContent") == "No setting is like that."


def write_attempts(folder, *attempts):
    (folder / "attempts.json").write_text(json.dumps({"version": 1, "attempts": attempts}))


def test_goodput_is_shown_over_all_attempts_with_the_ranks(tmp_path, browser):
    rank = {"rank": 1, "cause": "data", "seconds": 0.05, "others": 0.001, "factor": 50.0, "batch": 90, "host": "node-7"}
    first = {"launch": "a", "number": 0, "started": 0.0, "updated": 60.0, "ending": "failed", "first_batch": 0}
    first |= {"batch": 50, "seconds": {"start": 10.0, "train": 20.0, "backward": 20.0, "hang": 10.0}}
    second = {"launch": "a", "number": 1, "started": 70.0, "updated": 100.0, "ending": "finished", "first_batch": 40}
    second |= {"batch": 100, "seconds": {"start": 10.0, "train": 15.0, "data": 5.0}, "num_compared": 2}
    ranks = {"data": {"min": 0.001, "median": 0.0255, "max": 0.05, "slowest_rank": 1}}
    second |= {"world_size": 4, "ranks": ranks, "stragglers": [rank]}
    folder = write_run(tmp_path / "run")
    write_attempts(folder, first, second)
    browser.open(write_page([folder], tmp_path / "page.html"))
    text = browser.run("document.getElementById('goodput').innerText")
    # 40 s and 15 s of training, of which 8 s were lost with batches 40 to 50.
    assert "47.0 % of 00:01:40 trained" in text
    assert "10 batches trained again" in text
    rows = "[...document.querySelectorAll('#goodput-shares tbody tr')]"
    assert browser.run(f"{rows}.map(row => row.innerText.trim().split(/\\s*\\t\\s*/))") == [
        ["training", "47.0 % 47.00 s"],
        ["training that was lost", "8.0 % 8.00 s"],
        ["start", "20.0 % 20.00 s"],
        ["restarts", "10.0 % 10.00 s"],
        ["waiting for data", "5.0 % 5.00 s"],
        ["no progress", "10.0 % 10.00 s"],
    ]
    assert "Time per batch of 2 of 4 ranks, those of rank 0's node" in text
    assert "Rank 1 (node-7) was slow at batch 90: data took 50 ms of each of its batches, 1 ms on the other" in text
    widths = browser.run("[...document.querySelectorAll('#goodput-shares .bar div')].map(part => part.style.width)")
    assert widths == ["47%", "8%", "20%", "10%", "5%", "10%"]
