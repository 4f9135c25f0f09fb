"""What PyTorch has for the first version of FSDP says the same as the names of settings."""

import pytest
import torch
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from composer_dist import Precision
from composer_fsdp import FSDPConfig, make_plan
from composer_fsdp.mixed_precision import resolve_dtypes
from composer_fsdp.parse import BACKWARD_PREFETCH_MAP, SHARDING_MAP, get_mixed_precision
from composer_fsdp.plan import answer_of, check_options


def plan_of(precision="amp_bf16", **settings):
    return make_plan(FSDPConfig(**settings), precision=precision, world_size=1)


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_each_sharding_strategy_is_the_setting_of_its_name(name):
    assert SHARDING_MAP[name] is ShardingStrategy[name]
    assert FSDPConfig(sharding_strategy=SHARDING_MAP[name]) == FSDPConfig(sharding_strategy=name)


@pytest.mark.parametrize("name", ["NONE", "BACKWARD_PRE", "BACKWARD_POST"])
def test_each_prefetch_is_the_setting_of_its_name(name):
    torchs = BACKWARD_PREFETCH_MAP[name]
    assert torchs is (None if name == "NONE" else BackwardPrefetch[name])
    assert plan_of(backward_prefetch=torchs) == plan_of(backward_prefetch=name)
    options = answer_of(lambda module: {"backward_prefetch": torchs}, "layer", torch.nn.Linear(1, 1))
    check_options("layer", options, plan_of())
    assert options == {"backward_prefetch": name}


@pytest.mark.parametrize("setting", ["FULL", "default", "PURE", {"param_dtype": "bf16", "buffer_dtype": "fp16"}])
def test_formats_are_those_of_the_setting_and_go_into_a_config(setting):
    mixed, *dtypes = get_mixed_precision(Precision.AMP_FP16, setting, keep_low_precision_grads=True)
    expected = resolve_dtypes(setting, "amp_fp16")
    assert dtypes == [expected.param, expected.reduce, expected.buffer]
    assert mixed.keep_low_precision_grads
    assert resolve_dtypes(mixed, "fp32") == expected
    assert plan_of(mixed_precision=mixed).dtypes == expected


def test_a_setting_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="Unable to interpret mixed_precision='HALF'"):
        get_mixed_precision("fp32", "HALF")
    assert get_mixed_precision("fp32")[1] == torch.float32
