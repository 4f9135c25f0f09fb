"""Texts that users of Composer follow, as tests run them.

documents/ has their code, letter for letter; changes.toml lists what of it does not run so, and why. A test names the
blocks of a document that it runs, and gives them the names that they leave to their reader.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(__file__).parent
# What a change may need, and whether this machine has it. No machine of the tests has time.
HERE = {"GPU": torch.cuda.is_available(), "flash-attn": find_spec("flash_attn") is not None, "time": False}


@pytest.fixture(scope="session")
def documents():
    """The blocks of each document by their headings: the language and the text."""
    block = re.compile(r"^## ([^\n]+)\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {
        path.stem: {heading: (language, text) for heading, language, text in block.findall(path.read_text())}
        for path in (FOLDER / "documents").glob("*.md")
    }


@pytest.fixture(scope="session")
def changes():
    return tomllib.loads((FOLDER / "changes.toml").read_text())["change"]


@pytest.fixture(scope="session")
def text(documents, changes):
    """Return blocks of a document, one after the other, with the changes that they need here.

    `as_printed` adds what is left out, and changes nothing else.
    """

    def text(document, *headings, as_printed=False):
        found = "".join(documents[document][heading][1] for heading in headings)
        for change in changes:
            if change.get("document", document) == document and _is_needed(change, as_printed):
                found = found.replace(change["printed"], change["runs"])
        return found

    return text


def _is_needed(change, as_printed):
    if change["kind"] == "lacks":
        return not as_printed and not HERE[change["needs"]]
    return change["kind"] == "left out" or not as_printed


@pytest.fixture
def run(text):
    """Run blocks of a document with what they leave to their reader, and return all names that there are then."""
    scopes = []

    def run(document, *headings, as_printed=False, **names):
        scopes.append(names)
        source = text(document, *headings, as_printed=as_printed)
        exec(compile(source, f"{document}: {', '.join(headings)}", "exec"), names)
        return names

    yield run
    for names in scopes:
        for name in {"trainer", "engine"} & names.keys():
            names[name].close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which a script runs."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def shell(folder):
    """Run commands as they are printed after a prompt, and return what they write to the console."""

    def shell(lines):
        commands = "\n".join(re.sub(r"^(\$|>>>) ", "", line) for line in lines.splitlines())
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            commands, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return shell


@pytest.fixture
def dataset():
    """Twelve of scikit-learn's handwritten digits, in three colours that are all the same."""
    digits = load_digits()
    images = torch.tensor(digits.images[:12] / 16, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1).contiguous()
    return TensorDataset(images, torch.tensor(digits.target[:12]))


@pytest.fixture
def dataloader(dataset):
    return DataLoader(dataset, batch_size=4)


@pytest.fixture
def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 10))


@pytest.fixture
def model(network):
    from composer.models import ComposerModel

    return ComposerModel.from_module(network, F.cross_entropy)


@pytest.fixture
def settings(text):
    """The distributed guide's table of FSDP's settings: for each key its values and its default, or '' without one."""

    def read(source, indent):
        row = re.compile(rf"^{indent}'(\w+)': (?:\w+ = )?(.*?),? *(?:# Default: ('?\w+'?).*)?$", re.MULTILINE)
        return {
            key: ([_literal(value) for value in values.split(" | ") if value != "float"], default and _literal(default))
            for key, values, default in row.findall(source)
        }

    table = text("distributed_guide", "All settings of FSDP")
    found = read(table, "  ")
    dtypes = read(table, "  #   ")
    mixed = [dict(zip(dtypes, values, strict=True)) for values in product(*(values for values, _ in dtypes.values()))]
    found["mixed_precision"][0].extend(mixed)
    return found


def _literal(word):
    try:
        return ast.literal_eval(word)
    except ValueError:
        return word  # one default is not in quotes
