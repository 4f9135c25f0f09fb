"""`EMA` and models inside DDP, torch.compile and FSDP: the names and the weights of the bare model."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from composer_algorithms import EMA
from composer_algorithms.ema import EMAParameters, compute_ema
from composer_events import Event

WRAPPERS = {
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "compile": torch.compile,
    "DDP of compile": lambda model: DistributedDataParallel(torch.compile(model)),
    "compile of DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    "compiled submodule": lambda model: nn.Sequential(torch.compile(model[0]), *model[1:]),
}


def module_named_model():
    """A model with a submodule that is itself called `module`, as ComposerClassifier has."""
    model = nn.Sequential(nn.Module())
    model[0].module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].forward = lambda x: model[0].module(x)
    return model


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_names_are_those_of_the_bare_model_and_of_torchs_checkpoints(wrap):
    model = module_named_model()
    average = EMAParameters(wrap(model))
    names = {*average.named_parameters_dict, *average.named_buffers_dict}
    assert names == set(model.state_dict())
    if not isinstance(wrapped := wrap(module_named_model()), DataParallel):  # which torch's function does not know
        assert names == set(get_model_state_dict(wrapped))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_an_average_goes_from_a_wrapped_model_to_a_bare_one_and_back(wrap):
    bare = module_named_model()
    wrapped = wrap(copy.deepcopy(bare))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(1.0)
    average = EMAParameters(wrapped)
    compute_ema(bare, average, 0.25)
    expected = {n: 0.25 * (p + 1) + 0.75 * p for n, p in bare.named_parameters()}
    torch.testing.assert_close(average.named_parameters_dict, expected)
    average.transfer_ema_params(wrapped)
    torch.testing.assert_close([*wrapped.parameters()], [*average.named_parameters_dict.values()], check_stride=False)

    module_target = copy.deepcopy(bare)
    compute_ema(wrapped, module_target, 0.0)
    torch.testing.assert_close([*module_target.parameters()], [*average.named_parameters_dict.values()])


@pytest.mark.usefixtures("process_group")
def test_ddp_and_the_bare_model_have_the_same_state(state):
    bare = state.model
    states = {}
    for kind, model in (("bare", bare), ("DDP", DistributedDataParallel(copy.deepcopy(bare)))):
        state.model, ema = model, EMA()
        for event in (Event.INIT, Event.BATCH_END):
            assert ema.match(event, state)
            ema.apply(event, state, None)
        states[kind] = ema.state_dict()["ema_model"]
    torch.testing.assert_close(states["bare"], states["DDP"], rtol=0, atol=0)


@pytest.mark.usefixtures("process_group")
def test_a_sharded_model_is_averaged_and_exchanged_in_its_shards(make_model):
    torch.manual_seed(0)
    model, batch = make_model(), (torch.randn(8, 4), None)
    before_wrapping = EMAParameters(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    average = EMAParameters(model)
    start = {name: tensor.full_tensor().clone() for name, tensor in average.named_parameters()}
    model(batch).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    trained = {name: tensor.full_tensor().detach().clone() for name, tensor in model.named_parameters()}

    compute_ema(model, average, 0.75)
    expected = {name: 0.75 * start[name] + 0.25 * trained[name] for name in start}
    result = {name: tensor.full_tensor() for name, tensor in average.named_parameters()}
    torch.testing.assert_close(result, expected)

    model.eval()
    with torch.no_grad():
        outputs = model(batch)  # leaves the root's parameters gathered
        average.swap_params(model)
        assert not torch.equal(model(batch), outputs)
        average.swap_params(model)
        torch.testing.assert_close(model(batch), outputs, rtol=0, atol=0)

    before_wrapping.move_params_to_device(model)
    assert all(isinstance(tensor, DTensor) for _, tensor in before_wrapping.named_parameters())


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_gathers_whole_parameters(make_model, use_orig_params):
    torch.manual_seed(0)
    bare, batch = make_model(), (torch.randn(8, 4), None)
    model = FullyShardedDataParallel(
        copy.deepcopy(bare), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    average = EMAParameters(model)
    torch.testing.assert_close(
        average.named_parameters_dict, {name: p.detach() for name, p in bare.named_parameters()}, rtol=0, atol=0
    )
    model(batch).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    compute_ema(model, average, 0.75)
    model.eval()
    with torch.no_grad():
        outputs = model(batch)
        average.swap_params(model)
        assert not torch.equal(model(batch), outputs)
        average.swap_params(model)
        torch.testing.assert_close(model(batch), outputs, rtol=0, atol=0)
