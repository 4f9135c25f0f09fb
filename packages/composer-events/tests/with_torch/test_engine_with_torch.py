"""The engine around a real model, a real dataloader and a real `State`."""

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer_events import Algorithm, Callback, Engine, Event, State, format_log_data_value
from composer_time import Time


class MixUp(Algorithm):
    """Mixes each batch with its own reverse, half and half, inputs and loss."""

    def match(self, event, state):
        return event in [Event.AFTER_DATALOADER, Event.AFTER_LOSS]

    def apply(self, event, state, logger):
        if event == Event.AFTER_DATALOADER:
            self.permuted_targets = state.targets.flip(0)
            state.inputs = (state.inputs + state.inputs.flip(0)) / 2
        if event == Event.AFTER_LOSS:
            loss = torch.nn.functional.mse_loss(state.outputs, self.permuted_targets)
            state.loss = (state.loss + loss) / 2


def dataloader(**kwargs):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, **kwargs)


def test_a_loop_of_ones_own_trains_with_two_way_callbacks():
    model = torch.nn.Linear(3, 1)
    model.load_state_dict({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dataloader()
    state = State(model=model, max_duration=Time(1, "epoch"), rank_zero_seed=0, dataloader=loader, optimizers=optimizer)
    with pytest.warns(DeprecationWarning, match="algorithms="):
        engine = Engine(state=state, algorithms=[MixUp()])
    engine.run_event("init")
    engine.run_event("fit_start")
    engine.run_event("epoch_start")
    for state.inputs, state.targets in loader:
        engine.run_event("after_dataloader")
        engine.run_event("batch_start")
        engine.run_event("before_forward")
        state.outputs = state.model.forward(state.inputs)
        engine.run_event("after_forward")
        engine.run_event("before_loss")
        state.loss = torch.nn.functional.mse_loss(state.outputs, state.targets)
        engine.run_event("after_loss")
        engine.run_event("before_backward")
        state.optimizers.zero_grad()
        state.loss.backward()
        engine.run_event("after_backward")
        state.optimizers.step()
        engine.run_event("batch_end")
    engine.run_event("epoch_end")
    engine.close()

    # The same by hand: the loss is quadratic, so its gradient is 2/n sum (w x + b - y) (x, 1) for either target.
    weight, bias = torch.zeros(3), torch.zeros(())
    for inputs, targets in loader:
        mixed, wanted = (inputs + inputs.flip(0)) / 2, (targets + targets.flip(0)).squeeze(1) / 2
        error = mixed @ weight + bias - wanted
        weight, bias = weight - 0.2 * (error[:, None] * mixed).mean(0), bias - 0.2 * error.mean()
    # Sums of eight float32 numbers, in another order.
    torch.testing.assert_close(model.weight.detach()[0], weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.bias.detach()[0], bias, rtol=1e-5, atol=1e-6)


def test_closing_ends_persistent_workers_and_the_dataloader_can_be_used_again():
    loader = dataloader(num_workers=1, persistent_workers=True)
    state = State(model=torch.nn.Linear(3, 1), rank_zero_seed=0, max_duration="1ep", dataloader=loader)
    before = set(multiprocessing.active_children())
    batches = len(list(loader))
    assert set(multiprocessing.active_children()) - before
    Engine(state).close()
    assert not set(multiprocessing.active_children()) - before
    assert len(list(loader)) == batches
    Engine(state).close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (torch.tensor(0.70341), "0.7034"),
        (torch.tensor([3]), "3"),
        (torch.zeros(2, 3), "Tensor of shape torch.Size([2, 3])"),
        ([torch.tensor(1.0)], "[1.0000]"),
        (torch.zeros((), device="meta"), "Tensor of shape torch.Size([])"),
    ],
)
def test_a_tensor_reads_as_its_only_element_or_as_its_shape(data, text):
    assert format_log_data_value(data) == text


def test_an_error_in_a_hook_is_attributed_with_the_time_of_the_run():
    class Fail(Callback):
        def fit_start(self, state, logger):
            raise KeyError("learning_rate")

    state = State(
        model=torch.nn.Linear(3, 1), rank_zero_seed=0, max_duration="1ep", dataloader=dataloader(), callbacks=[Fail()]
    )
    engine = Engine(state)
    with pytest.raises(KeyError, match="learning_rate") as caught:
        engine.run_event(Event.FIT_START)
    engine.close()
    assert caught.value.__notes__ == ["raised by callback Fail on Event.FIT_START (epoch 0, batch 0)"]
