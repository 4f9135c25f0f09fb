"""Entries of metrics with several numbers."""

import pytest
import torch

from composer_events.metric_entries import by_entry, metric_with, number_of


def test_every_number_of_nested_values_has_its_own_name():
    values = {"a": {"x": torch.tensor([1.0, 2.0]), "y": (3.0, {"z": 4.0})}, "b": 5.0, "one": torch.tensor([6.0])}
    entries = by_entry(values)
    assert {name: float(value) for name, value in entries.items()} == {
        "a/x/0": 1.0,
        "a/x/1": 2.0,
        "a/y/0": 3.0,
        "a/y/1/z": 4.0,
        "b": 5.0,
        "one": 6.0,
    }
    assert all(number_of("a", values["a"], name) is not None for name in entries if name.startswith("a/"))


def test_what_is_no_list_of_numbers_by_class_stays_whole():
    values = {"matrix": torch.zeros(3, 3), "curve": torch.zeros(5000), "none": torch.zeros(0), "text": "x"}
    assert by_entry(values) == values


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("val/acc", "val/acc"),
        ("val/acc/2", "val/acc"),
        ("val/f1", "val"),
        ("val", "val"),
        ("valid", None),
        ("ac", None),
    ],
)
def test_an_entry_belongs_to_the_metric_with_the_longest_name(entry, name):
    assert metric_with({"val": None, "val/acc": None, "acc": None}, entry) == name
