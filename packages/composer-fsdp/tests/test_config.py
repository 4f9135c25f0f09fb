import copy
import dataclasses
import pickle

import pytest
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from composer_fsdp import FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig, parse_parallelism

# As Composer documents them.
DEFAULTS = {
    "activation_checkpointing": False,
    "activation_checkpointing_reentrant": True,
    "activation_cpu_offload": False,
    "auto_wrap": True,
    "te_checkpoint_wrapper": False,
    "te_shard_fp8_weight": False,
    "backward_prefetch": "BACKWARD_POST",
    "backward_prefetch_limit": 1,
    "cpu_offload": False,
    "data_parallel_shard_degree": -1,
    "data_parallel_replicate_degree": None,
    "forward_prefetch": False,
    "forward_prefetch_limit": 1,
    "ignored_modules": None,
    "keep_low_precision_grads": False,
    "limit_all_gathers": True,
    "load_monolith_rank0_only": False,
    "load_planner": None,
    "save_planner": None,
    "mixed_precision": "DEFAULT",
    "process_group": None,
    "sharded_ckpt_prefix_dir": "ep{epoch}-ba{batch}",
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "full",
    "sync_module_states": False,
    "use_orig_params": True,
    "verbose": False,
    "min_params": 1e8,
}
DEFAULTS_OF_FSDP2 = {
    "device_mesh": None,
    "reshard_after_forward": True,
    "activation_checkpointing": False,
    "activation_cpu_offload": False,
    "state_dict_type": "sharded",
    "load_monolith_rank0_only": False,
    "mixed_precision": "DEFAULT",
    "verbose": False,
}
FIXED_OF_FSDP2 = {
    "load_planner": None,
    "save_planner": None,
    "sharded_ckpt_prefix_dir": "ep{epoch}-ba{batch}",
    "data_parallel_shard_degree": -1,
    "data_parallel_replicate_degree": None,
    "use_orig_params": True,
}

experimental = pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
legacy = pytest.mark.filterwarnings("ignore:fsdp_config:DeprecationWarning")


def test_the_settings_have_the_documented_defaults_in_the_documented_order():
    config = FSDPConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert [entry.name for entry in dataclasses.fields(config)][: len(DEFAULTS)] == list(DEFAULTS)


@pytest.mark.parametrize("key", ["device_mesh", "_device_mesh"])
def test_a_device_mesh_cannot_be_given(key):
    with pytest.raises(ValueError, match="Directly specifying device mesh for FSDP was deprecated"):
        FSDPConfig(**{key: None})


@pytest.mark.parametrize(
    ("make", "key", "advice"),
    [
        (FSDPConfig, "shrading_strategy", "Did you mean 'sharding_strategy'"),
        (FSDPConfig, "mix_precision", "Did you mean 'mixed_precision'"),
        (FSDPConfig, "auto_wrap_policy", "define fsdp_wrap_fn"),
        (FSDPConfig, "mp_policy", "use 'mixed_precision'"),
        (FSDPConfig, "reshard_after_forward", "use 'sharding_strategy'"),
        (FSDP2Config, "reshard_after_forwad", "Did you mean 'reshard_after_forward'"),
        (TPConfig, "layers_plan", "Did you mean 'layer_plan'"),
        (ParallelismConfig, "fspd", "Did you mean 'fsdp'"),
    ],
)
def test_a_key_that_is_none_is_refused_with_what_was_meant(make, key, advice):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{key}'.*{advice}"):
        make(**{key: 1})


def test_strings_may_be_in_any_case():
    config = FSDPConfig(
        sharding_strategy="shard_grad_op", backward_prefetch="none", mixed_precision="Pure", state_dict_type="SHARDED"
    )
    assert (config.sharding_strategy, config.backward_prefetch) == ("SHARD_GRAD_OP", "NONE")
    assert (config.mixed_precision, config.state_dict_type) == ("PURE", "sharded")


def test_torchs_own_names_for_the_strategies_are_understood():
    config = FSDPConfig(
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    )
    assert (config.sharding_strategy, config.backward_prefetch) == ("HYBRID_SHARD", "BACKWARD_PRE")


@pytest.mark.parametrize("clone", [copy.deepcopy, dataclasses.replace, lambda c: pickle.loads(pickle.dumps(c))])
def test_settings_can_be_copied(clone):
    config = FSDPConfig(sharding_strategy="SHARD_GRAD_OP", process_group=[0, 1])
    assert clone(config) == config


def test_construction_of_the_narrow_form_warns_that_it_is_experimental():
    with pytest.warns(UserWarning, match="FSDP2 Config/APIs are experimental and subject to heavy changes"):
        FSDP2Config()


@experimental
def test_the_narrow_form_has_the_documented_defaults_and_fixed_values():
    config = FSDP2Config()
    assert {name: getattr(config, name) for name in DEFAULTS_OF_FSDP2} == DEFAULTS_OF_FSDP2
    assert {name: getattr(config, name) for name in FIXED_OF_FSDP2} == FIXED_OF_FSDP2
    assert FSDP2Config.settable_attrs() == set(DEFAULTS_OF_FSDP2)


@experimental
@pytest.mark.parametrize("name", FIXED_OF_FSDP2)
def test_fixed_values_of_the_narrow_form_cannot_be_assigned(name):
    with pytest.raises(AttributeError):
        setattr(FSDP2Config(), name, 1)


@experimental
def test_the_engine_may_say_that_weights_were_handed_on():
    config = FSDP2Config()
    assert config.sync_module_states is False
    config.sync_module_states = True
    assert config.sync_module_states is True


@experimental
def test_the_narrow_form_passes_over_what_it_has_not_with_a_warning_each():
    attrs = {"verbose": True, "auto_wrap": True, "sync_module_states": True}
    with pytest.warns(UserWarning, match="is not a settable attribute") as caught:
        config = FSDP2Config.from_compatible_attrs(attrs)
    said = [str(warning.message) for warning in caught]
    for key in ("auto_wrap", "sync_module_states"):
        text = f"Attribute '{key}: True' is not a settable attribute of FSDP2Config and will be ignored"
        assert text in said
    assert config.verbose is True
    assert config.sync_module_states is False


def test_legacy_keys_of_a_dict_are_understood_with_a_warning_each():
    settings = {"flatten_parameters": True, "min_params": 10, "load_fsdp_monolith_rank0_only": True}
    with pytest.warns(DeprecationWarning, match="fsdp_config") as caught:
        config = FSDPConfig.from_dict(settings)
    assert len(caught) == 3
    assert all(warning.filename == __file__ for warning in caught)
    assert (config.min_params, config.load_monolith_rank0_only) == (10, True)


@legacy
def test_a_setting_under_its_older_and_its_newer_name_is_refused_if_they_differ():
    with pytest.raises(ValueError, match="load_monolith_rank0_only=False, which mean the same"):
        FSDPConfig.from_dict({"load_fsdp_monolith_rank0_only": True, "load_monolith_rank0_only": False})


@pytest.mark.parametrize("nothing", [None, {}, {"fsdp": None}, {"fsdp": None, "tp": None}])
def test_arguments_that_say_nothing_mean_no_parallelism(nothing):
    assert parse_parallelism(nothing) is None


@experimental
def test_a_dict_is_of_the_version_that_the_environment_says(environ):
    assert isinstance(parse_parallelism({"fsdp": {}}).fsdp, FSDPConfig)
    environ["FSDP_VERSION"] = "2"
    parsed = parse_parallelism({"fsdp": {}})
    assert parsed.fsdp is None
    assert isinstance(parsed.fsdp2, FSDP2Config)
    environ["FSDP_VERSION"] = "3"
    with pytest.raises(ValueError, match="FSDP_VERSION='3'"):
        parse_parallelism({"fsdp": {}})


@experimental
def test_configurations_go_where_they_belong():
    fsdp, fsdp2, tp = FSDPConfig(), FSDP2Config(), TPConfig(tensor_parallel_degree=2)
    assert parse_parallelism({"fsdp": fsdp, "tp": tp}) == ParallelismConfig(fsdp=fsdp, tp=tp)
    assert parse_parallelism({"fsdp": fsdp2}) == ParallelismConfig(fsdp2=fsdp2)
    assert parse_parallelism({"tp": {"tensor_parallel_degree": 2}, "fsdp": {}}) == ParallelismConfig(fsdp=fsdp, tp=tp)
    whole = ParallelismConfig(fsdp=fsdp)
    assert parse_parallelism(whole) == whole


def test_the_older_arguments_mean_the_newer_ones():
    older = parse_parallelism(fsdp_config={"verbose": True}, fsdp_auto_wrap=False, load_fsdp_monolith_rank0_only=True)
    assert older.fsdp == FSDPConfig(verbose=True, auto_wrap=False, load_monolith_rank0_only=True)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"parallelism_config": {"fsdp": {}}, "fsdp_config": {}}, ValueError, "were both given"),
        ({"fsdp_config": {"auto_wrap": True}, "fsdp_auto_wrap": False}, ValueError, "contradicts"),
        ({"parallelism_config": {"fsdq": {}}}, ValueError, "key 'fsdq', which is unknown. Did you mean 'fsdp'"),
        ({"parallelism_config": 3}, TypeError, "parallelism_config=3 is a int"),
        ({"fsdp_config": 3}, TypeError, "the FSDP settings are 3"),
        ({"parallelism_config": {"tp": {"degree": 2}}}, TypeError, "tensor_parallel_degree"),
        ({"parallelism_config": {"tp": 2}}, TypeError, "Give a TPConfig or a dict"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, kind, text):
    with pytest.raises(kind, match=text):
        parse_parallelism(**arguments)
