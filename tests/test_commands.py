"""The commands that Composer's users type, under each of their names."""

import re
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
