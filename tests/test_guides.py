"""The tables of the guides have every callback and logger, and the defaults of the code."""

import inspect
import re

import pytest

import composer.callbacks
import composer.loggers
from composer import Trainer


def table_rows(root, guide):
    text = (root / "docs" / "guides" / f"{guide}.md").read_text()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]


def defaults(function):
    return {name: repr(one.default) for name, one in inspect.signature(function).parameters.items()}


def test_the_table_of_callbacks_has_each_of_them_with_its_defaults(root):
    rows = {row[0].strip("`"): row[-1] for row in table_rows(root, "callbacks") if len(row) == 3}
    assert rows.keys() - {"callback"} >= set(composer.callbacks.__all__)
    for name in composer.callbacks.__all__:
        accepted = defaults(getattr(composer.callbacks, name))
        for option in re.findall(r"`([^`]*)`", rows[name]):
            argument, _, default = option.partition("=")
            if default and argument != "event":  # an Event, written as its name
                assert accepted[argument] == default, f"{name}({option})"


def test_the_table_of_loggers_has_each_of_them(root):
    names = {row[0].strip("`").rpartition(".")[2] for row in table_rows(root, "loggers")}
    assert names >= set(composer.loggers.__all__) - {"Logger", "LoggerDestination"}


@pytest.mark.parametrize("guide", ["callbacks", "checkpoints", "data", "evaluation", "loggers", "performance"])
def test_the_defaults_of_the_trainer_are_those_of_the_tables(root, guide):
    accepted = defaults(Trainer)
    for option, default, *_ in (row for row in table_rows(root, guide) if len(row) >= 3):
        names = re.findall(r"Trainer\((\w+)=\.\.\.\)", option) or re.findall(r"`(\w+)`", option)
        values = re.findall(r"`([^`]*)`", default)
        if len(values) == len(names):  # else the table explains the default in words
            stated = dict(zip(names, values, strict=True))
            assert {name: accepted[name] for name in stated if name in accepted}.items() <= stated.items()
