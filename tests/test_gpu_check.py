"""The check for machines with a GPU, on one without: it runs, reports and ends as it says."""

import os
import re
import subprocess
import sys
import time
from importlib.metadata import Distribution, entry_points

import pytest
import torch

ODD_CASES = """
import os, time
from gpu_cases import Skip
def passes(device): return f"ran on {device}"
def fails(device): assert device == "cuda", "no sum is 3"
def lacks(device): raise Skip("no such thing here")
def crashes(device): print("about to crash"); os._exit(7)
def hangs(device): print("waiting", flush=True); time.sleep(600)
"""


@pytest.fixture
def check(tool, root, monkeypatch):
    monkeypatch.syspath_prepend(root / "tools")
    yield tool("gpu_check")
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpu_cases"]:
        del sys.modules[name]


@pytest.fixture
def run(check, tmp_path):
    (tmp_path / "odd_cases").mkdir()
    (tmp_path / "odd_cases" / "odd.py").write_text(ODD_CASES)

    def run(*names, limit_s=120.0, seconds=600.0, **settings):
        runner = check.Runner(tmp_path, "cpu", time.monotonic() + seconds, recipe_minutes=1.0)
        cases = [check.Case(f"odd.{name}", name, limit_s, package="odd_cases", **settings) for name in names]
        return runner.run_all(cases, 2, lambda result: None)

    return run


def call(root, *arguments):
    command = [sys.executable, root / "tools" / "gpu_check.py", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_a_line(root):
    done = call(root)
    assert done.returncode == 2
    assert done.stdout.startswith("No GPU")
    assert done.stdout.count("\n") == 1


def test_cases_that_make_sense_on_a_cpu_pass_there(root):
    done = call(root, "--device", "cpu", "--only", "precision.amp_bf16", "precision.amp_fp16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed: ") == 1  # float16 is left out
    assert re.search(r"^amp_bf16 +passed +[\d.]+  loss \d", done.stdout, re.MULTILINE)


def test_a_case_that_does_not_exist_is_refused_with_those_there_are(check):
    with pytest.raises(SystemExit, match=r"precision\.amp_fp8 not among the cases.*precision\.amp_bf16"):
        check.choose(["precision.amp_fp8"], "cpu")


def test_cases_none_of_which_makes_sense_on_a_cpu_are_refused_there(check):
    with pytest.raises(SystemExit, match=r"precision\.amp_fp16 makes sense on a GPU alone"):
        check.choose(["precision.amp_fp16"], "cpu")


def test_a_library_that_is_missing_is_named_in_a_line(check, monkeypatch, capsys):
    monkeypatch.setattr(check, "NEEDED", ("torch", "torch_vision_of_nobody"))
    assert check.main(["--device", "cpu"]) == 2
    assert capsys.readouterr().out == (
        "torch_vision_of_nobody not installed: the check needs torch, torch_vision_of_nobody.\n"
    )


def test_every_case_is_a_function_of_the_device(check, root):
    for case in check.CASES:
        module, _, function = case.name.partition(".")
        assert f"\ndef {function}(device: str) -> str:\n" in (root / f"tools/gpu_cases/{module}.py").read_text()


@pytest.mark.parametrize("alone", [False, True])
def test_a_crash_costs_only_its_own_case(check, run, alone):
    results = run("passes", "fails", "crashes", "lacks", alone=alone)
    assert [(result.outcome, result.figure) for result in results] == [
        ("passed", "ran on cpu"),
        ("failed", "AssertionError: no sum is 3"),
        ("failed", "ended with status 7 and no answer: about to crash"),
        ("skipped", "no such thing here"),
    ]
    assert not check.is_good(results)
    assert check.is_good([results[0], results[3]])


def test_a_case_that_hangs_is_ended(run):
    (result,) = run("hangs", limit_s=5.0)
    assert (result.outcome, result.figure) == ("failed", "not done after 5 s: waiting")


def test_a_case_without_time_is_not_begun_and_is_no_success(check, run):
    (result,) = run("passes", seconds=5.0)
    assert result.outcome == "no time"
    assert not check.is_good([result])


def test_the_table_has_a_line_for_each_case(check, run):
    lines = check.table(run("passes", "fails")).split("\n")
    assert [line.split()[:2] for line in lines] == [["case", "outcome"], ["passes", "passed"], ["fails", "failed"]]


def test_a_checkout_looks_installed(check, tmp_path):
    check.write_metadata(tmp_path)
    names = {one.name: one.version for one in Distribution.discover(path=[str(tmp_path)])}
    assert len(names) == len(check.source_folders())
    made = next(one for one in Distribution.discover(path=[str(tmp_path)]) if one.name == "composer-dist")
    points = {*entry_points(group="composer_events.state"), *entry_points(group="console_scripts", name="composer")}
    assert set(made.entry_points) == {point for point in points if point.dist.name == "composer-dist"}
