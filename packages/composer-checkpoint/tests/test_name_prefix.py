"""The check of weights sees the names under which they are loaded, and tells those of the checkpoint."""

import pytest
import torch
from torch import nn

from composer_checkpoint import UnfittingWeightsError, load_checkpoint


class Wrapping(nn.Module):
    """Has its network as `module`, as a ComposerClassifier has it."""

    def __init__(self, network):
        super().__init__()
        self.module = network

    def forward(self, batch):
        return self.module(batch)


def saved(tmp_path, weights, **state):
    torch.save({"state": {"model": weights, **state}, "rng": []}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def load(loop, model, path, **settings):
    run = loop(model=model, optimizers=None)
    load_checkpoint(path, run.state, None, load_weights_only=True, **settings)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wrap", [(False, True), (True, False)])
def test_names_that_differ_by_a_prefix_are_those_of_another_model(loop, tmp_path, wrap, strict):
    saved_from, model = (Wrapping(nn.Linear(4, 2)) if wrapped else nn.Linear(4, 2) for wrapped in wrap)
    path = saved(tmp_path, saved_from.state_dict())
    with pytest.raises(UnfittingWeightsError, match=r"not one of its 2 weights \(.*weight, \.\.\.\) is among the 2"):
        load(loop, model, path, strict_model_weights=strict)


@pytest.mark.parametrize("key", ["is_model_ddp", "_is_model_ddp_wrapped"])
@pytest.mark.parametrize("wrap", [lambda network: network, Wrapping])
def test_what_ddp_put_before_the_names_is_taken_off_as_loading_does(loop, tmp_path, key, wrap):
    model, other = wrap(nn.Linear(4, 2)), wrap(nn.Linear(4, 2))
    path = saved(tmp_path, {f"module.{name}": value for name, value in other.state_dict().items()}, **{key: True})
    load(loop, model, path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


@pytest.mark.parametrize(("ddp", "before"), [({}, ""), ({"is_model_ddp": True}, "module.")])
def test_messages_have_the_names_of_the_checkpoint_by_which_weights_are_ignored(loop, tmp_path, ddp, before):
    def network(width):
        return Wrapping(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, width)))

    weights = {f"{before}{name}": value for name, value in network(5).state_dict().items()}
    path = saved(tmp_path, weights | {f"{before}module.more": torch.ones(1)}, **ddp)
    with pytest.raises(UnfittingWeightsError) as refusal:
        load(loop, network(2), path)
    assert f": {before}module.1.weight ((5, 3) in the checkpoint" in str(refusal.value)
    assert f"1 not in the model: {before}module.more" in str(refusal.value)
    ignored = [f"state/model/{before}module.{name}" for name in ("1.weight", "1.bias", "more")]
    load(loop, network(2), path, ignore_keys=ignored, strict_model_weights=False)
