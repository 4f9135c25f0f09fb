"""What a state tells of the settings of parallelism, which are any objects with the right attributes."""

from types import SimpleNamespace

import pytest

from composer_events import ParallelismType, State


class FSDPConfig(SimpleNamespace):
    fsdp_version = 1


class FSDP2Config(FSDPConfig):
    fsdp_version = 2


def make_state(**config):
    parts = {"fsdp": None, "fsdp2": None, "tp": None, **config}
    return State(None, 0, parallelism_config=SimpleNamespace(**parts))


@pytest.mark.parametrize(("kind", "version"), [("fsdp", 1), ("fsdp2", 2)])
def test_the_parallelism_configuration_is_read_by_its_attributes(kind, version):
    config, tp = SimpleNamespace(load_monolith_rank0_only=False), SimpleNamespace(tensor_parallel_degree=2)
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
    config = SimpleNamespace(load_monolith_rank0_only=True, **settings)
    assert not make_state(**{kind: config}).load_monolith_rank0_only


def test_the_sharding_configuration_can_be_replaced_by_one_of_its_kinds_only():
    state = State(None, 0)
    for kind, version in ((FSDPConfig, 1), (FSDP2Config, 2), (FSDPConfig, 1)):
        state.fsdp_config = config = kind(state_dict_type="full")
        assert (state.fsdp_config, state.fsdp_config_version) == (config, version)
    with pytest.raises(TypeError, match="neither an FSDPConfig nor an FSDP2Config"):
        state.fsdp_config = {}
    assert (state.fsdp_config, state.fsdp_config_version) == (config, 1)


@pytest.mark.parametrize("config", ["fsdp", {"fsdp": {}}, FSDPConfig(state_dict_type="full")])
def test_what_has_no_settings_of_parallelism_is_refused(config):
    with pytest.raises(TypeError, match=r"without parallelism settings.* goes into ParallelismConfig\(fsdp=\.\.\.\)"):
        State(None, 0, parallelism_config=config)


def test_the_axes_of_the_mesh_have_their_names():
    assert [axis.value for axis in ParallelismType] == [
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
    ]
