"""What does not go together is refused by each rank for itself, in the same words, before it asks another one.

The tests take the place of one of several ranks whose process group nobody has made: whoever asked another rank would
fail for want of it.
"""

import random
import re
import string

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from composer_dist import get_device
from composer_fsdp import (
    FSDP,
    FSDP2Config,
    FSDPConfig,
    ParallelismConfig,
    TPConfig,
    make_plan,
    parse_parallelism,
)
from composer_fsdp.tensor_parallel import check_layer_plan
from composer_fsdp.unit_selection import units_of
from composer_fsdp.wrap_rules import choose_units

CPU = get_device("cpu")
WORLD_SIZE = 4
FUZZED = 3_000


class Block(nn.Linear):
    pass


class Net(nn.Sequential):
    answer = True

    def __init__(self):
        super().__init__(nn.Linear(2, 4), Block(4, 4), Block(4, 4), nn.Linear(4, 2))

    def fsdp_wrap_fn(self, module):
        return self.answer if isinstance(module, Block) else False


class Model(nn.Module):
    def __init__(self, answer=True):
        super().__init__()
        self.net = Net()
        self.net.answer = answer


@pytest.fixture
def as_one_of_four(environ):
    assert not torch.distributed.is_initialized()
    for name, value in (("RANK", 1), ("WORLD_SIZE", WORLD_SIZE), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", WORLD_SIZE)):
        environ[name] = str(value)
    environ["NODE_RANK"] = "0"


def shard(model, config=None, optimizers=()):
    plan = make_plan(config or FSDPConfig(), world_size=WORLD_SIZE)
    FSDP(CPU, plan).prepare(model, list(optimizers))


def refusal(kind, text, *arguments, **settings):
    with pytest.raises(kind) as error:
        shard(*arguments, **settings)
    said = str(error.value)
    assert text in said
    return said


DEGREES = [
    (FSDPConfig(data_parallel_shard_degree=3), "is not divisible by|does not equal|is less than"),
    (FSDPConfig(data_parallel_shard_degree=8), "World size 4"),
    (FSDPConfig(sharding_strategy="HYBRID_SHARD", data_parallel_replicate_degree=3), "World size 4 is not divisible"),
    (
        FSDPConfig(sharding_strategy="HYBRID_SHARD", data_parallel_replicate_degree=-1),
        "multiple parallelism dimensions",
    ),
    (ParallelismConfig(fsdp=FSDPConfig(), tp=TPConfig(tensor_parallel_degree=3)), "World size 4 is not divisible"),
    (FSDPConfig(data_parallel_shard_degree=0), "data_parallel_shard_degree=0"),
    (
        ParallelismConfig(fsdp=FSDPConfig(sharding_strategy="NO_SHARD"), tp=TPConfig(tensor_parallel_degree=2)),
        "'NO_SHARD' cannot be combined with tensor parallelism",
    ),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("config", "text"), DEGREES)
def test_degrees_that_do_not_make_up_the_world_are_refused(config, text, as_one_of_four):
    with pytest.raises(ValueError, match=text):
        shard(Model(), config)


@pytest.mark.parametrize("group", ["set3", "mod3"])
def test_a_process_group_that_cannot_be_dealt_out_is_refused(group, as_one_of_four):
    for given in ({"config": FSDPConfig(process_group=group)}, {"model": Model({"process_group": group})}):
        refusal(RuntimeError, "4 must be divisible by", **{"model": Model(), **given})


@pytest.mark.parametrize("group", [[0, 9], [-1, 1], [1, 1], ([0, 1], [1, 4])])
def test_ranks_that_there_are_not_are_refused(group, as_one_of_four):
    for given in ({"config": FSDPConfig(process_group=group)}, {"model": Model({"process_group": group})}):
        refusal(
            ValueError, "is not a list of ranks, each once. Give numbers between 0 and 3", **{"model": Model(), **given}
        )


@pytest.mark.parametrize("answer", ["FULL_SHARD", 1, 0.5, [True], torch.tensor(True), object()])
def test_an_answer_that_is_neither_yes_nor_no_nor_a_dict_is_refused(answer, as_one_of_four):
    assert "'net.1'" in refusal(TypeError, "fsdp_wrap_fn returned", Model(answer))


def test_a_wrap_function_that_is_none_is_refused(as_one_of_four):
    model = Model()
    model.net.fsdp_wrap_fn = True
    refusal(TypeError, "net.fsdp_wrap_fn=True is not a function", model)


OPTIONS = [
    {"mixed_precison": "FULL"},
    {7: "FULL"},
    {"mixed_precision": "HALF"},
    {"mixed_precision": {"param": "bf16"}},
    {"sharding_strategy": "ALL"},
    {"process_group": "everybody"},
    {"process_group": 3.5},
    {"backward_prefetch": "SOON"},
    {"cpu_offload": "yes"},
    {"forward_prefetch_limit": 0},
    {"forward_prefetch_limit": True},
    {"shard_placement_fn": "dim 1"},
    {"grad_sync": "all"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_settings_that_a_unit_cannot_have_are_refused_with_the_units_name(options, as_one_of_four):
    key, value = next(iter(options.items()))
    said = refusal(ValueError, "'net.1'", Model(options))
    assert repr(key) in said or f"{key}={value!r}" in said


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_tensor_parallel_plan_that_fits_nothing_is_refused(as_one_of_four):
    tp = TPConfig(tensor_parallel_degree=2, layer_plan={"net.layers.*": ColwiseParallel()})
    refusal(ValueError, "'net.layers.*'", Model(), ParallelismConfig(fsdp=FSDPConfig(), tp=tp))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_tensor_parallel_plan_that_is_no_dict_is_refused(as_one_of_four):
    tp = TPConfig(tensor_parallel_degree=2, layer_plan=["net.1"])  # pyright: ignore[reportArgumentType]  # what is tested
    refusal(ValueError, "layer_plan=['net.1'] is a list", Model(), ParallelismConfig(fsdp=FSDPConfig(), tp=tp))


@pytest.mark.parametrize("layer_plan", [None, {}])
def test_a_degree_of_tensor_parallelism_that_splits_nothing_is_warned_of(layer_plan, as_one_of_four):
    tp = TPConfig(tensor_parallel_degree=2, layer_plan=layer_plan)
    plan = make_plan(ParallelismConfig(fsdp=FSDPConfig(), tp=tp), world_size=WORLD_SIZE)
    assert plan.layer_plan is not None
    with pytest.warns(UserWarning, match="there is no layer_plan: no tensor is split"):
        check_layer_plan(Model(), plan.layer_plan)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
def test_a_unit_with_other_ranks_than_the_rest_does_not_go_with_tensor_parallelism(strategy, as_one_of_four):
    tp = TPConfig(tensor_parallel_degree=2, layer_plan={"net.0": ColwiseParallel()})
    model = Model({"sharding_strategy": strategy})
    refusal(ValueError, "of a single module", model, ParallelismConfig(fsdp=FSDPConfig(), tp=tp))


@pytest.mark.parametrize("name", ["cpu_offload", "auto_wrap", "verbose", "sync_module_states", "use_orig_params"])
@pytest.mark.parametrize("value", ["false", 2])
def test_what_is_neither_yes_nor_no_is_refused(name, value, as_one_of_four):
    refusal(ValueError, f"{name}={value!r} is neither True nor False", Model(), FSDPConfig(**{name: value}))


@pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
def test_a_units_setting_that_is_of_the_whole_model_is_warned_of(as_one_of_four):
    with pytest.warns(UserWarning, match="state_dict_type='full', which does nothing"):
        choose_units(Model({"state_dict_type": "full"}), make_plan(FSDP2Config(), world_size=WORLD_SIZE))


def test_weights_that_units_share_are_refused(as_one_of_four):
    model = Model()
    model.net[2].weight = model.net[1].weight
    refusal(ValueError, "Detected tied parameters between modules", model)
    model = Model()
    model.net[2] = nn.Linear(4, 4)
    model.net[2].weight = model.net[1].weight
    refusal(ValueError, "Parameter sharing detected between modules", model)


def left_outside(model):
    model.outside = nn.Linear(4, 4)
    model.outside._fsdp_wrap = False
    model.outside.weight = model.net[1].weight


def of_the_model_itself(model):
    model.weight = model.net[0].weight


@pytest.mark.parametrize("share", [left_outside, of_the_model_itself])
def test_weights_that_a_unit_shares_with_what_stays_whole_are_refused(share, as_one_of_four):
    model = Model()
    share(model)
    refusal(ValueError, "Parameter sharing detected between modules to be sharded and module", model)


def test_what_stays_whole_may_be_shared(as_one_of_four):
    model = Model()
    temperature = nn.Parameter(torch.tensor(1.0))
    for layer in (model.net[1], model.net[2], model):
        layer.temperature = temperature
    units = units_of(model, make_plan(FSDPConfig(), world_size=WORLD_SIZE), wraps_itself=False)
    assert [unit.name for unit in units] == ["net.1", "net.2", "net"]


WEIGHTS = [
    (lambda: nn.Embedding(8, 4, sparse=True), "gradients are sparse tensors"),
    (lambda: nn.Linear(4, 2, dtype=torch.bfloat16), "weights of several dtypes: 'net.0.weight' in float32"),
    (lambda: nn.Linear(4, 2, dtype=torch.complex64), "'net.3.weight' is torch.complex64"),
]


@pytest.mark.parametrize(("make", "text"), WEIGHTS)
def test_weights_that_cannot_be_sharded_together_are_refused_by_name(make, text, as_one_of_four):
    model = Model()
    model.net[3] = make()
    refusal(ValueError, text, model)


def test_a_unit_whose_weights_nobody_gathers_is_warned_of():
    model = Model()
    model.holder = nn.Module()
    model.holder.layer = nn.Linear(2, 2)
    plan = make_plan(FSDPConfig(), world_size=1)
    with pytest.warns(UserWarning, match="the module 'holder' is sharded as one, and its class Module has no forward"):
        units_of(model, plan, wraps_itself=False)
    model.holder.fsdp_forward_methods = ("encode",)
    assert len(units_of(model, plan, wraps_itself=False)) == 4


GRIDS = [("set2", "set2"), ("node", "node"), ("set4", "mod2")]


@pytest.mark.filterwarnings("ignore:FULL_SHARD is not supported with 2D device mesh:UserWarning")
@pytest.mark.parametrize("pair", GRIDS)
def test_pairs_of_groups_that_are_no_grid_of_ranks_are_refused(pair, as_one_of_four):
    for given in ({"config": FSDPConfig(process_group=pair)}, {"model": Model({"process_group": pair})}):
        refusal(ValueError, "not the row and the column of a grid", **{"model": Model(), **given})


def test_a_strategy_that_shares_nothing_takes_no_pair_of_groups(as_one_of_four):
    config = FSDPConfig(sharding_strategy="NO_SHARD", process_group=("set2", "mod2"))
    refusal(ValueError, "is a pair, and sharding_strategy='NO_SHARD' shares nothing", Model(), config)


@pytest.mark.parametrize("mesh", ["cpu", (2, 2)])
@pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
def test_what_is_no_mesh_is_refused(mesh, as_one_of_four):
    refusal(ValueError, f"device_mesh={mesh!r} must be a DeviceMesh", Model(), FSDP2Config(device_mesh=mesh))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, False, ""])
def test_formats_in_which_no_weights_compute_are_refused(dtype, as_one_of_four):
    refusal(ValueError, "Unable to interpret precision", Model(), FSDPConfig(mixed_precision={"param_dtype": dtype}))


@pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
def test_settings_of_another_kind_are_refused():
    for config in (None, {"min_params": 3}):
        with pytest.raises(TypeError, match=r"a (dict|NoneType)\. Give a"):
            make_plan(config, world_size=1)  # pyright: ignore[reportArgumentType]  # what is tested
    with pytest.raises(ValueError, match="under fsdp and under fsdp2"):
        make_plan(ParallelismConfig(fsdp=FSDPConfig(), fsdp2=FSDP2Config()), world_size=1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:fsdp_wrap_fn chooses none")
def test_a_plan_that_would_tear_weights_apart_is_refused(as_one_of_four):
    tied = Model()
    tied.net[2].weight = tied.net[1].weight
    tied.net.answer = False
    tp = TPConfig(tensor_parallel_degree=2, layer_plan={"net.1": ColwiseParallel()})
    refusal(ValueError, "'net.2.weight'", tied, ParallelismConfig(fsdp=FSDPConfig(), tp=tp))


@pytest.mark.parametrize("degree", [None, "2", 0])
def test_a_degree_of_tensor_parallelism_that_is_none_is_refused(degree, as_one_of_four):
    config = ParallelismConfig(fsdp=FSDPConfig(), tp=TPConfig(tensor_parallel_degree=degree))
    refusal(ValueError, f"tensor_parallel_degree={degree!r} is not a number of ranks", Model(), config)


def test_modules_that_are_not_in_the_model_cannot_be_ignored(as_one_of_four):
    refusal(ValueError, "not in the model", Model(), FSDPConfig(ignored_modules=[nn.Linear(1, 1)]))


def test_an_optimizer_of_another_model_is_refused(as_one_of_four):
    optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
    said = refusal(ValueError, "The same model must be passed to the optimizer", Model(), optimizers=[optimizer])
    assert "model.param_name.net.0.weight" in said


@pytest.mark.parametrize("name", ["load_planner", "save_planner"])
def test_what_is_no_planner_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=.* must be a .*Planner of torch.distributed.checkpoint"):
        make_plan(FSDPConfig(**{name: object()}), world_size=1)


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2,
    1e8,
    float("nan"),
    "",
    "FULL",
    "full_shard",
    "node",
    "bf16",
    [],
    [0],
    {},
    object(),
]


def misspelt(name, draw):
    """Return a name with one letter more, less, or another one."""
    place = draw.randrange(len(name))
    return name[:place] + draw.choice(["", draw.choice(string.ascii_lowercase)]) + name[place + draw.randrange(2) :]


def complaint(settings):
    """Return what is said of settings, or nothing where they are fine."""
    try:
        make_plan(parse_parallelism({"fsdp": settings}), world_size=WORLD_SIZE)
    except (TypeError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.filterwarnings("ignore")
def test_whatever_is_given_a_refusal_names_the_key_and_misspelt_ones_are_refused():
    draw = random.Random(45)
    fields = [name for name in FSDPConfig.__dataclass_fields__ if not name.startswith("_")]
    num_misspelt = 0
    for _ in range(FUZZED):
        settings = {draw.choice(fields): draw.choice(VALUES) for _ in range(draw.randrange(1, 3))}
        said = complaint(settings)
        assert not said or any(re.search(rf"\b{key}\b", said) for key in settings), (settings, said)
        wrong = misspelt(draw.choice(fields), draw)
        if wrong not in fields:
            num_misspelt += 1
            assert re.match(
                rf"(TypeError|ValueError): .*{re.escape(repr(wrong))}", complaint({wrong: True, **settings})
            )
    assert num_misspelt > FUZZED / 2


@pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
def test_a_misspelt_key_of_the_narrow_settings_says_the_nearest():
    with pytest.warns(UserWarning, match="'reshard_after_foward: True' is not a settable.*'reshard_after_forward'"):
        FSDP2Config.from_compatible_attrs({"reshard_after_foward": True})
