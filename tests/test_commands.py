"""The commands that Composer's users type, under each of their names."""

import re
import shlex
import subprocess
import sys

import pytest

NAMES = ["composer", "composer.cli", "composer.cli.launcher", "composer_dist.launch"]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [[sys.executable, "-m", name] for name in NAMES] + [[f"{sys.prefix}/bin/composer"]])
def test_every_name_of_the_launcher_prints_the_version_of_the_whole(command):
    import composer

    assert run(*command, "--version").stdout == f"MosaicML Composer {composer.__version__}\n"


def test_the_launcher_of_composer_is_the_one_of_composer_dist():
    from composer.cli import launcher
    from composer_dist.launch.main import main

    assert launcher.main is main


@pytest.mark.parametrize("name", ["composer.cli.collect_env", "composer.utils.collect_env"])
def test_the_environment_is_described_with_the_versions_of_all_packages(name):
    described = run(sys.executable, "-m", name)
    assert described.returncode == 0, described.stderr
    assert re.search(r"^composer-dist: \d", described.stdout, re.MULTILINE)
    assert re.search(r"^PyTorch version: \d", described.stdout, re.MULTILINE)


MODELS = """
from composer.models import ComposerGPT, composer_resnet

def make_model():
    return ComposerGPT(dict(d_model=16, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=2048))

def make_resnet():
    return composer_resnet("resnet18", num_classes=10)
"""


COORD_CHECK = """
from composer.models import ComposerGPT

def make(width):
    return ComposerGPT(dict(d_model=width, n_heads=2, n_layers=1, vocab_size=8, max_seq_len=16))
"""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_coord_check_prints_and_plots_the_growth_with_the_width(optimizer, tmp_path, monkeypatch, capsys):
    from composer.cli.optim import main

    (tmp_path / "make_widths.py").write_text(COORD_CHECK)
    monkeypatch.chdir(tmp_path)
    arguments = ["coord-check", "make_widths.py:make", "--widths", "32,128", "--optimizer", optimizer]
    assert main([*arguments, "--plot", "growth.svg"]) == 0
    with_mup, without = capsys.readouterr().out.strip().split("\n\n")
    assert with_mup.startswith("MuP(base_width=32)\nlayer ")
    assert without.startswith("without muP\nlayer ")
    flat, growing = (float(re.search(r"mlp\.2 +(\S+)", table)[1]) for table in (with_mup, without))
    assert flat < 0.2 < 0.5 < growing
    assert "without muP" in (tmp_path / "growth.svg").read_text()

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*arguments, "--plot", "growth.svg"]) == 2
    assert "--plot needs matplotlib. Run `pip install matplotlib`." in capsys.readouterr().err


def estimate(tmp_path, monkeypatch, arguments):
    from composer_fsdp.cli import main

    (tmp_path / "model.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return main(["estimate", *arguments])


def test_estimate_with_the_options_of_its_readme_takes_a_composer_gpt(root, tmp_path, monkeypatch, capsys):
    page = (root / "packages/composer-fsdp/README.md").read_text()
    command = re.search(r"^composer-fsdp estimate ((?:.*\\\n)*.*)$", page, re.MULTILINE)[1]
    assert estimate(tmp_path, monkeypatch, shlex.split(command.replace("\\\n", " "))) == 0
    # Token ids and labels, 2,048 of each for 4 examples, of 8 bytes each.
    assert re.search(r"^needs .* of 40\.0 GiB(.*\n)*  batch +128\.0 KiB$", capsys.readouterr().out, re.MULTILINE)


def test_estimate_makes_images_and_classes_for_a_composer_classifier(tmp_path, monkeypatch, capsys):
    arguments = ["model.py:make_resnet", "--input-shape", "3,32,32", "--batch-size", "2"]
    assert estimate(tmp_path, monkeypatch, arguments) == 0
    assert re.search(r"^  batch +24\.0 KiB$", capsys.readouterr().out, re.MULTILINE)
