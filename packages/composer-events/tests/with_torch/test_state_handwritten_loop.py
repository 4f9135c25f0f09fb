import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer_events import Algorithm, Engine, Event, State
from composer_events import types as event_types
from composer_time import Time


class Classifier(torch.nn.Linear):
    def loss(self, outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets)


class ScaleLoss(Algorithm):
    def match(self, event, state):
        return event in [Event.AFTER_DATALOADER, Event.AFTER_LOSS]

    def apply(self, event, state, logger):
        if event == Event.AFTER_LOSS:
            state.loss *= 0.5


def make_dataloader():
    return DataLoader(TensorDataset(torch.eye(4), torch.arange(4)), batch_size=2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_loop_written_by_hand_needs_four_arguments():
    dataloader = make_dataloader()
    model = Classifier(4, 4)
    state = State(model=model, max_duration=Time(10, "epoch"), rank_zero_seed=0, dataloader=dataloader)
    engine = Engine(state=state, algorithms=[ScaleLoss()])
    state.optimizers = torch.optim.SGD(model.parameters(), lr=1.0)
    before = state.model.weight.detach().clone()

    engine.run_event("init")
    engine.run_event("fit_start")
    for _ in range(2):
        engine.run_event("epoch_start")
        for state.inputs, state.targets in dataloader:
            engine.run_event("after_dataloader")
            engine.run_event("before_forward")
            state.outputs = state.model.forward(state.inputs)
            engine.run_event("before_loss")
            state.loss = state.model.loss(state.outputs, state.targets)
            full_loss = state.loss.item()
            engine.run_event("after_loss")
            assert state.loss.item() == pytest.approx(full_loss / 2)
            state.loss.backward()
            state.optimizers.step()
            state.schedulers.step()
            state.optimizers.zero_grad()
        engine.run_event("epoch_end")
    assert not torch.equal(before, state.model.weight)
    assert state.dataloader_len == Time(2, "ba")


def test_outputs_and_loss_are_empty_tensors_before_the_first_batch():
    state = State(model=Classifier(4, 4), rank_zero_seed=0)
    assert state.outputs.numel() == state.loss.numel() == 0


def test_the_names_for_torchs_own_types_are_torchs():
    assert event_types.Dataset is torch.utils.data.Dataset
    assert event_types.PyTorchScheduler is torch.optim.lr_scheduler.LRScheduler
    assert all(isinstance(getattr(torch, member.value), torch.memory_format) for member in event_types.MemoryFormat)
