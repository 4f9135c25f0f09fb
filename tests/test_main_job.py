"""The main job of the README, from the command line to the accuracy on held-out data."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_example_reads_unseen_digits_and_says_where_its_results_are(root, tmp_path):
    script = [str(root / "examples/train.py"), "--seeds", "23", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "composer", "-n", "2", *script]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert run.returncode == 0, run.stderr
    result, page = run.stdout.splitlines()
    said = re.fullmatch(r"seed 23: (\d+\.\d)% of 500 held-out digits read right; results in (\S+)", result)
    assert said
    assert json.loads((tmp_path / "seed-23/status.json").read_text())["status"] == "finished"
    assert '"name":"digits-23"' in Path(page.split()[-1]).read_text()
    assert float(said[1]) >= 97
    result = json.loads((tmp_path / "seed-23/result.json").read_text())
    assert f"{result['held_out_accuracy']:.1%}" == f"{said[1]}%"
    assert re.search(r"train epoch 8/8, .*41/41", run.stderr.replace("\r", "\n"))


@pytest.mark.slow
def test_the_saved_weights_are_those_that_were_evaluated(root, tmp_path):
    command = [sys.executable, str(root / "examples/train.py"), "--seeds", "5", "--duration", "1ep"]
    subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, cwd=root, timeout=300)
    check = (
        "import json, sys, torch; sys.path.insert(0, 'examples'); import train\n"
        "weights = torch.load(sys.argv[1] + '/weights.pt', weights_only=True)\n"
        "network = train.make_network()\n"
        "own = {k.removeprefix('module.'): v for k, v in weights.items() if k.startswith('module.')}\n"
        "network.load_state_dict(own)\n"
        "network.eval()\n"
        "pairs = [(network(x).argmax(1), y) for x, y in train.make_loaders(5)[1]]\n"
        "right = sum(int((guess == y).sum()) for guess, y in pairs) / train.NUM_HELD_OUT\n"
        "print(right - json.load(open(sys.argv[1] + '/result.json'))['held_out_accuracy'])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", check, str(tmp_path / "seed-5")], capture_output=True, text=True, cwd=root, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert abs(float(run.stdout)) < 1e-6


@pytest.mark.slow
def test_the_example_of_the_tour_learns_and_publishes_a_model(root, tmp_path):
    script = [str(root / "examples/stdlib_gpt.py"), "--duration", "10ba", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "composer", "--no_runs", "-n", "2", *script]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=400)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["after"] < result["before"]
    assert (tmp_path / "published" / "config.json").exists()
