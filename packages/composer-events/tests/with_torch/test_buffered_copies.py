import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from composer_events import BufferedDestination, Logger
from composer_events.logger_destination import restored
from composer_time import Timestamp


class Late(BufferedDestination):
    copies_values = True

    def __init__(self):
        self.taken = []

    def take_metrics(self, logged):
        self.taken += logged


def test_who_asks_for_copies_gets_values_as_they_were():
    late, loss = Late(), torch.tensor([0.5, 1.0])
    number = torch.tensor(2, dtype=torch.int16)
    Logger(SimpleNamespace(timestamp=Timestamp()), late).log_metrics(
        {"losses": loss, "number": number, "name": "a", "nested": {"loss": loss}}
    )
    loss.zero_()
    number.zero_()
    late.catch_up()
    [(_, copies, _, _)] = late.taken
    values = {name: restored(value) for name, value in copies.items()}
    assert values["losses"].tolist() == values["nested"]["loss"].tolist() == [0.5, 1.0]
    assert (values["number"].item(), values["number"].dtype, values["name"]) == (2, torch.int16, "a")


def test_what_waits_keeps_no_activations_in_memory():
    late, weight = Late(), torch.ones(3, requires_grad=True)
    hidden = weight.exp()
    activations = weakref.ref(hidden)
    loss = hidden.square().sum()
    Logger(SimpleNamespace(timestamp=Timestamp()), late).log_metrics({"loss": loss})
    del hidden, loss
    assert activations() is None
    late.catch_up()
    assert late.taken[0][0]["loss"].item() == pytest.approx(3 * math.exp(2))


def test_what_waits_in_a_container_keeps_no_activations_either():
    late, weight = Late(), torch.ones(3, requires_grad=True)
    hidden = weight.exp()
    activations = weakref.ref(hidden)
    losses = {"loss": {"first": hidden.square().sum()}, "all": [hidden.square().sum()]}
    late.copies_values = False
    Logger(SimpleNamespace(timestamp=Timestamp()), late).log_metrics(losses)
    del hidden, losses
    assert activations() is None
