"""What a state makes of the settings of parallelism, which are any objects with the right attributes."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_events import ParallelismType, State
from composer_events.parallelism import parallelism_degrees


class FSDPConfig(SimpleNamespace):
    def __init__(self, state_dict_type="full", **settings):
        super().__init__(**{"load_monolith_rank0_only": False, "sync_module_states": True, **settings})
        self.state_dict_type = state_dict_type


class FSDP2Config(FSDPConfig):
    pass


class TPConfig:
    def __init__(self, tensor_parallel_degree):
        self.tensor_parallel_degree = tensor_parallel_degree


class ParallelismConfig:
    def __init__(self, fsdp=None, fsdp2=None, tp=None):
        self.fsdp, self.fsdp2, self.tp = fsdp, fsdp2, tp


def make_state(**config):
    return State(None, 0, parallelism_config=ParallelismConfig(**config))


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


tensor_parallelism = pytest.mark.filterwarnings("ignore:Tensor parallelism .TP. is experimental:FutureWarning")


@pytest.mark.parametrize(("kind", "version"), [("fsdp", 1), ("fsdp2", 2)])
@tensor_parallelism
def test_the_parallelism_configuration_is_read_by_its_attributes(two_ranks, kind, version):
    config, tp = FSDPConfig(), TPConfig(2)
    state = make_state(**{kind: config}, tp=tp)
    assert state.fsdp_config is config
    assert state.fsdp_config_version == version
    assert state.tp_config is tp
    config.load_monolith_rank0_only = True
    assert state.load_monolith_rank0_only
    assert not state.fsdp_enabled  # nothing has been sharded yet


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("fsdp", {"auto_wrap": False}),
        ("fsdp", {"state_dict_type": "sharded"}),
        ("fsdp2", {"state_dict_type": "sharded"}),
    ],
)
def test_only_a_full_checkpoint_of_an_automatically_wrapped_model_is_read_on_rank_zero_alone(kind, settings):
    config = FSDPConfig(load_monolith_rank0_only=True, **settings)
    assert not make_state(**{kind: config}).load_monolith_rank0_only


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("state_dict_type", [None, "full", "sharded", "local"])
def test_the_ways_to_save_a_sharded_model_are_accepted(kind, state_dict_type):
    config = FSDPConfig(state_dict_type)
    assert make_state(**{kind: config}).fsdp_config is config


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FSDPConfig("Full"), "state_dict_type='Full'.*fsdp_state_dict_type must be one of 'full'"),
        (
            FSDPConfig(activation_cpu_offload=True, use_orig_params=False),
            "activation_cpu_offload=True is not supported",
        ),
        (FSDPConfig(data_parallel_shard_degree=0), "data_parallel_shard_degree=0 is not a number of ranks"),
        (FSDPConfig(data_parallel_replicate_degree=1.5), "data_parallel_replicate_degree=1.5 is not a number of ranks"),
        (FSDPConfig(data_parallel_shard_degree=True), "data_parallel_shard_degree=True is not a number of ranks"),
    ],
)
def test_sharding_settings_that_cannot_be_meant_are_refused(kind, config, message):
    with pytest.raises(ValueError, match=message):
        make_state(**{kind: config})


def test_metrics_are_not_saved_in_shards():
    with pytest.raises(ValueError, match="save_metrics=True does not go with state_dict_type='sharded'"):
        State(None, 0, save_metrics=True, parallelism_config=ParallelismConfig(fsdp2=FSDP2Config("sharded")))


def test_activations_may_be_offloaded_with_the_original_parameters():
    make_state(fsdp=FSDPConfig(activation_cpu_offload=True))
    make_state(fsdp=FSDPConfig(activation_cpu_offload=True, use_orig_params=True))


def test_rank_zero_loads_alone_only_if_the_others_receive_its_weights():
    settings = {"load_monolith_rank0_only": True, "sync_module_states": False}
    with pytest.raises(ValueError, match="load_monolith_rank0_only=True needs sync_module_states=True"):
        make_state(fsdp=FSDPConfig(**settings))
    assert make_state(fsdp2=FSDP2Config(**settings)).load_monolith_rank0_only


@tensor_parallelism
@pytest.mark.parametrize(
    ("fsdp", "message"),
    [
        (None, r"Tensor parallelism \(TP\) currently requires FSDP to be enabled"),
        (FSDPConfig(use_orig_params=False), r"use_orig_params=False does not go with tensor parallelism"),
        (FSDPConfig(load_monolith_rank0_only=True), "load_monolith_rank0_only is not compatible with tensor parallel"),
    ],
)
def test_tensor_parallelism_with_settings_that_it_cannot_work_with_is_refused(two_ranks, fsdp, message):
    with pytest.raises(ValueError, match=message):
        make_state(fsdp=fsdp, tp=TPConfig(2))


def test_tensor_parallelism_is_announced_as_experimental_where_the_state_is_made(two_ranks):
    with pytest.warns(FutureWarning, match="experimental and may change in future versions") as caught:
        make_state(fsdp=FSDPConfig(), tp=TPConfig(2))
    assert [warning.filename for warning in caught] == [__file__]


@tensor_parallelism
def test_tensor_parallelism_over_one_rank_is_left_out():
    with pytest.warns(UserWarning, match="Received tensor_parallel_degree of 1, which is a no-op") as caught:
        state = make_state(fsdp=FSDPConfig(load_monolith_rank0_only=True), tp=TPConfig(1))
    assert [warning.category for warning in caught] == [FutureWarning, UserWarning]
    assert state.tp_config is None


def test_the_sharding_configuration_can_be_replaced_by_one_of_its_kinds_only():
    state = State(None, 0)
    state.fsdp_config = config = FSDPConfig()
    assert (state.fsdp_config, state.fsdp_config_version) == (config, 1)
    state.fsdp_config = config = FSDP2Config()
    assert (state.fsdp_config, state.fsdp_config_version) == (config, 2)
    with pytest.raises(TypeError, match="neither an FSDPConfig nor an FSDP2Config"):
        state.fsdp_config = {}


@pytest.mark.parametrize("degree", [1, 3])
def test_degrees_that_do_not_fit_the_ranks_are_refused_before_any_process_group_runs(two_ranks, degree):
    message = rf"World size 2 does not equal the product .*, {degree}, of .*'data_parallel_shard': {degree}"
    with pytest.raises(ValueError, match=message):
        make_state(fsdp=FSDPConfig(data_parallel_shard_degree=degree))
    assert make_state(fsdp=FSDPConfig(data_parallel_shard_degree=2)).device_mesh is None


def test_the_axes_of_the_mesh_have_their_names():
    assert [axis.value for axis in ParallelismType] == [
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
    ]


degree = st.integers(1, 6)


@given(replicate=degree | st.none(), shard=degree, tensor=degree | st.none(), filled=st.sampled_from([None, 0, 1, 2]))
def test_degrees_multiply_to_the_number_of_ranks_whichever_of_them_is_left_open(replicate, shard, tensor, filled):
    axes = ["data_parallel_replicate", "data_parallel_shard", "tensor_parallel"]
    expected = {axis: size for axis, size in zip(axes, (replicate, shard, tensor), strict=True) if size is not None}
    world_size = (replicate or 1) * shard * (tensor or 1)
    given = dict(expected)
    if filled is not None and axes[filled] in given:
        given[axes[filled]] = -1
    fsdp = SimpleNamespace(**{f"{axis}_degree": given.get(axis) for axis in axes[:2]})
    tp = None if tensor is None else TPConfig(given["tensor_parallel"])
    assert parallelism_degrees(fsdp, tp, world_size) == expected


def test_only_one_degree_may_be_left_open():
    config = FSDPConfig(data_parallel_shard_degree=-1, data_parallel_replicate_degree=-1)
    with pytest.raises(
        ValueError, match="Found multiple parallelism dimensions with -1: data_parallel_replicate, data"
    ):
        parallelism_degrees(config, None, 4)


@pytest.mark.parametrize("replicate", [3, 8])
def test_an_open_degree_needs_ranks_that_can_be_divided(replicate):
    config = FSDPConfig(data_parallel_replicate_degree=replicate)
    with pytest.raises(ValueError, match=f"World size 4 is not divisible by the product of .*, {replicate}, of"):
        parallelism_degrees(config, None, 4)


@tensor_parallelism
def test_settings_may_be_dicts_all_the_way_down(two_ranks):
    state = State(None, 0, parallelism_config={"fsdp": {"state_dict_type": "sharded"}, "tp": TPConfig(2)})
    assert (state.fsdp_config_version, state.fsdp_config.state_dict_type) == (1, "sharded")
    assert state.tp_config.tensor_parallel_degree == 2
    state = make_state(fsdp2={"load_monolith_rank0_only": True}, tp=None)
    assert (state.fsdp_config_version, state.load_monolith_rank0_only) == (2, True)
    assert State(None, 0, parallelism_config={}).fsdp_config is None


def test_settings_in_dicts_are_checked_as_those_in_objects():
    with pytest.raises(ValueError, match="state_dict_type='shards' is not a way to save"):
        State(None, 0, parallelism_config={"fsdp": {"state_dict_type": "shards"}})
    with pytest.raises(ValueError, match=r"World size 1 does not equal"):
        State(None, 0, parallelism_config={"fsdp": {"data_parallel_shard_degree": 2}})


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ("fsdp", TypeError, "parallelism_config='fsdp' is a 'str'.*Give a ParallelismConfig"),
        (FSDPConfig(), TypeError, r"FSDPConfig.*goes into ParallelismConfig\(fsdp=\.\.\.\)"),
        ({"fdsp": {}}, ValueError, "parallelism_config has the unknown key 'fdsp'.*fsdp, fsdp2, tp"),
        ({"fsdp": "full"}, TypeError, "fsdp settings of parallelism_config are 'full', a 'str'.*FSDPConfig"),
        (ParallelismConfig(fsdp=FSDPConfig(), tp=2), TypeError, "tp settings of parallelism_config are 2, a 'int'"),
    ],
)
def test_what_says_nothing_of_parallelism_is_refused(config, kind, message):
    with pytest.raises(kind, match=message):
        State(None, 0, parallelism_config=config)


@pytest.mark.parametrize("kind", [FSDPConfig, FSDP2Config])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_dict_type": "bogus"}, "state_dict_type='bogus' is not a way to save"),
        ({"state_dict_type": "sharded"}, "save_metrics=True does not go with"),
        ({"data_parallel_shard_degree": 7}, "World size 1 does not equal the product"),
    ],
)
def test_a_sharding_configuration_that_replaces_another_is_checked_too(kind, settings, message):
    state = State(None, 0, save_metrics=True)
    state.fsdp_config = good = FSDPConfig()
    with pytest.raises(ValueError, match=message):
        state.fsdp_config = kind(**settings)
    assert (state.fsdp_config, state.fsdp_config_version) == (good, 1)


def test_a_sharding_configuration_takes_the_place_of_one_of_the_other_version():
    state = State(None, 0, parallelism_config=ParallelismConfig(fsdp2=FSDP2Config()))
    state.fsdp_config = config = FSDPConfig()
    assert (state.fsdp_config, state.fsdp_config_version) == (config, 1)
