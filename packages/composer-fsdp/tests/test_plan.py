import json

import pytest
import torch
from torch import nn

from composer_fsdp import FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig, make_plan
from composer_fsdp.mixed_precision import Dtypes, resolve_dtypes

experimental = pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def plan_of(world_size=4, precision="fp32", tp=None, **settings):
    config = ParallelismConfig(fsdp=FSDPConfig(**settings), tp=tp)
    return make_plan(config, world_size=world_size, precision=precision)


@pytest.mark.parametrize(
    ("mixed_precision", "precision", "expected"),
    [
        ("FULL", "amp_bf16", (F32, F32, F32)),
        ("DEFAULT", "fp32", (F32, F32, F32)),
        ("default", "amp_fp16", (F16, F32, F16)),
        ("DEFAULT", "amp_bf16", (BF16, F32, BF16)),
        ("PURE", "amp_bf16", (BF16, BF16, BF16)),
        ({"param_dtype": "half"}, "amp_bf16", (F16, F32, F32)),
        ({"reduce_dtype": "amp_bf16", "buffer_dtype": torch.float16}, "fp32", (F32, BF16, F16)),
        (
            {"param_dtype": "torch.bfloat16", "reduce_dtype": "bfloat", "buffer_dtype": "fp32"},
            "fp32",
            (BF16, BF16, F32),
        ),
    ],
)
def test_mixed_precision_means_what_the_table_says(mixed_precision, precision, expected):
    dtypes = plan_of(mixed_precision=mixed_precision, precision=precision).dtypes
    assert (dtypes.param, dtypes.reduce, dtypes.buffer) == expected


def test_float8_gathers_in_bfloat16_and_says_so():
    with pytest.warns(UserWarning, match="gathered in bfloat16"):
        assert plan_of(mixed_precision={"param_dtype": "fp8"}).dtypes.param is BF16


@pytest.mark.parametrize(
    ("mixed_precision", "text"),
    [
        ("HALF", "Unable to interpret mixed_precision='HALF'"),
        (3, "Unable to interpret mixed_precision=3"),
        ({"param_type": "fp16"}, "Did you mean 'param_dtype'"),
        ({"param_dtype": "fp15"}, "Unable to interpret precision 'fp15'"),
    ],
)
def test_a_mixed_precision_that_is_none_is_refused(mixed_precision, text):
    with pytest.raises(ValueError, match=text):
        plan_of(mixed_precision=mixed_precision)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 4}, "FULL_SHARD"),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2", "data_parallel_shard_degree": 4}, "SHARD_GRAD_OP"),
        ({"sharding_strategy": "FULL_SHARD", "data_parallel_replicate_degree": 2}, "HYBRID_SHARD"),
        ({"sharding_strategy": "SHARD_GRAD_OP", "data_parallel_replicate_degree": 2}, "_HYBRID_SHARD_ZERO2"),
        ({"sharding_strategy": "FULL_SHARD", "process_group": ("set2", "mod2")}, "HYBRID_SHARD"),
        ({"sharding_strategy": "HYBRID_SHARD", "process_group": "set2"}, "FULL_SHARD"),
    ],
)
def test_a_strategy_for_another_number_of_axes_is_converted_with_a_warning(settings, expected):
    before = settings["sharding_strategy"]
    with pytest.warns(UserWarning, match=rf"{before} is not supported with .D device mesh. Using {expected} instead"):
        assert plan_of(**settings).sharding_strategy == expected


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_a_strategy_without_degrees_is_what_was_asked_for(strategy):
    plan = plan_of(sharding_strategy=strategy)
    assert plan.sharding_strategy == strategy
    assert plan.reshard_after_forward is (strategy in ("FULL_SHARD", "HYBRID_SHARD"))


@pytest.mark.parametrize(
    ("settings", "tp", "world_size", "expected"),
    [
        ({}, None, 4, {"data_parallel_shard": 4}),
        ({"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": -1}, None, 8, (4, 2)),
        ({"data_parallel_replicate_degree": 1, "sharding_strategy": "HYBRID_SHARD"}, None, 4, (1, 4)),
        ({}, 2, 8, {"data_parallel_shard": 4, "tensor_parallel": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is not supported with:UserWarning")
def test_degrees_are_filled_in(settings, tp, world_size, expected):
    plan = plan_of(world_size, tp=None if tp is None else TPConfig(tensor_parallel_degree=tp), **settings)
    if isinstance(expected, tuple):
        expected = dict(zip(("data_parallel_replicate", "data_parallel_shard"), expected, strict=True))
    assert plan.degrees == expected
    assert plan.tensor_parallel_degree == (tp or 1)


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ((-1, -1), "Found multiple parallelism dimensions with -1"),
        ((8, None), "World size 4 is less than the product"),
        ((-1, 3), "World size 4 is not divisible by the product"),
        ((2, None), "World size 4 does not equal the product"),
        ((0, None), "data_parallel_shard_degree=0 is not a number of ranks"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is not supported with:UserWarning")
def test_degrees_that_do_not_fit_the_ranks_are_refused(degrees, text):
    with pytest.raises(ValueError, match=text):
        plan_of(data_parallel_shard_degree=degrees[0], data_parallel_replicate_degree=degrees[1])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sharding_strategy": "FULL"}, "sharding_strategy='FULL' is not a valid value"),
        ({"backward_prefetch": "LATER"}, "backward_prefetch='LATER' is not a valid value"),
        ({"backward_prefetch_limit": 0}, "backward_prefetch_limit=0"),
        ({"state_dict_type": "half"}, "fsdp_state_dict_type must be one of"),
        ({"tie_policy": "ignore"}, "tie_policy='ignore' is not a valid value"),
        ({"min_params": "many"}, "min_params='many'"),
        ({"process_group": "all"}, "Unsure how to setup process_group='all'"),
        ({"process_group": 3}, "Unsure how to setup process_group=3"),
        ({"activation_cpu_offload": True, "use_orig_params": False}, "activation_cpu_offload=True is not supported"),
        ({"load_monolith_rank0_only": True}, "needs sync_module_states=True"),
        ({"ignored_modules": ["head"]}, "ignored_modules has 'head'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        plan_of(**settings)


def test_ranks_that_cannot_be_dealt_out_are_an_error_of_their_number():
    with pytest.raises(RuntimeError, match=r"4 must be divisible by set size \(3\)"):
        plan_of(process_group="set3")
    with pytest.raises(RuntimeError, match=r"4 must be divisible by mod \(3\)"):
        plan_of(process_group="mod3")


def test_tensor_parallelism_needs_sharding_beside_it():
    tp = TPConfig(tensor_parallel_degree=2)
    with pytest.raises(ValueError, match=r"Tensor parallelism \(TP\) currently requires FSDP to be enabled."):
        make_plan(ParallelismConfig(tp=tp), world_size=4)
    with pytest.raises(ValueError, match="use_orig_params=False cannot be combined with tensor parallelism"):
        plan_of(tp=tp, use_orig_params=False)
    with pytest.raises(ValueError, match=r"load_monolith_rank0_only is not compatible with tensor parallelism \(TP\)."):
        plan_of(tp=tp, load_monolith_rank0_only=True, sync_module_states=True)


@pytest.mark.parametrize("name", ["te_checkpoint_wrapper", "te_shard_fp8_weight"])
def test_an_engine_that_is_not_installed_is_named(name):
    with pytest.raises(ModuleNotFoundError, match=f"{name}=True needs the package 'transformer_engine'"):
        plan_of(**{name: True})


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"keep_low_precision_grads": True}, DeprecationWarning, "keep_low_precision_grads=True does nothing"),
        ({"limit_all_gathers": False}, DeprecationWarning, "limit_all_gathers=False does nothing"),
        ({"process_group": "set2", "data_parallel_shard_degree": 4}, UserWarning, "process_group='set2' is ignored"),
    ],
)
def test_a_setting_without_effect_says_so(settings, kind, text):
    with pytest.warns(kind, match=text) as caught:
        plan_of(**settings)
    assert len(caught) == 1


def test_parameters_on_the_host_are_refused_where_composer_refuses_them(environ):
    assert plan_of(cpu_offload=True).cpu_offload
    environ["COMPOSER_STRICT_COMPAT"] = "1"
    with pytest.raises(ValueError, match=r"FSDP CPU Offload not supported yet\."):
        plan_of(cpu_offload=True)


@pytest.mark.parametrize(("given", "expected"), [(1e8, 1e8), ("1e8", 1e8), (0, None), (None, None), (5, 5.0)])
def test_the_size_rule_takes_numbers_in_several_spellings(given, expected):
    assert plan_of(min_params=given).min_params == expected


@experimental
def test_the_narrow_form_gives_the_same_plan_for_the_settings_of_both(environ):
    common = {"mixed_precision": "PURE", "activation_checkpointing": True, "state_dict_type": "sharded"}
    broad = plan_of(precision="amp_bf16", min_params=None, **common)
    narrow = make_plan(FSDP2Config(**common), world_size=4, precision="amp_bf16")
    assert narrow.to_dict() == broad.to_dict()


def test_a_degree_of_tensor_parallelism_takes_what_the_others_leave():
    config = ParallelismConfig(fsdp=FSDPConfig(data_parallel_shard_degree=2), tp=TPConfig(tensor_parallel_degree=-1))
    assert make_plan(config, world_size=8).tensor_parallel_degree == 4


def test_a_precision_may_be_a_dtype():
    plan = make_plan(FSDPConfig(), precision=torch.bfloat16, world_size=1)
    assert resolve_dtypes("PURE", plan.precision) == Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def test_a_plan_can_be_written_down():
    pair = ("set2", [0, 1])
    plan = plan_of(
        precision="amp_bf16", ignored_modules=[nn.Linear(1, 1)], process_group=pair, sharding_strategy="HYBRID_SHARD"
    )
    written = json.loads(json.dumps(plan.to_dict()))
    assert (written["param_dtype"], written["ignored_modules"]) == ("bfloat16", 1)
    said = plan.describe().splitlines()
    for key in ("sharding_strategy", "cpu_offload", "mixed_precision", "param_dtype", "reduce_dtype", "buffer_dtype",
                "backward_prefetch", "min_params", "activation_checkpointing", "activation_checkpointing_reentrant",
                "activation_cpu_offload", "sync_module_states", "forward_prefetch", "state_dict_type"):  # fmt: skip
        assert any(line.startswith(f"FSDP: Using {key}=") for line in said), key
