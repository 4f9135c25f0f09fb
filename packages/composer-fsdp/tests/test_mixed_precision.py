import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from composer_fsdp import FSDPConfig, make_plan
from composer_fsdp.mixed_precision import cast_buffers, to_dtype

NAMES = {
    torch.float32: ["float32", "torch.float32", "fp32"],
    torch.float16: ["float16", "torch.float16", "half", "fp16", "amp", "amp_fp16"],
    torch.bfloat16: ["bfloat16", "bfloat", "torch.bfloat16", "bf16", "amp_bf16"],
}


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for dtype in NAMES for name in NAMES[dtype]])
def test_a_format_has_several_names(name, dtype):
    assert to_dtype(name) is to_dtype(name.upper()) is dtype


# By torch's documentation, what is not said stays in float32, and gradients are reduced as the weights compute.
OF_TORCH = [
    (MixedPrecision(), ("float32", "float32", "float32")),
    (MixedPrecision(param_dtype=torch.bfloat16), ("bfloat16", "bfloat16", "float32")),
    (MixedPrecision(torch.bfloat16, torch.float32, torch.float16), ("bfloat16", "float32", "float16")),
]


@pytest.mark.parametrize(("mixed_precision", "expected"), OF_TORCH)
def test_an_object_of_torch_says_the_formats_whatever_the_run_computes_in(mixed_precision, expected):
    settings = make_plan(FSDPConfig(mixed_precision=mixed_precision), precision="amp_fp16", world_size=2).to_dict()
    assert (settings["param_dtype"], settings["reduce_dtype"], settings["buffer_dtype"]) == expected


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((2,), 1.001))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("index", torch.zeros((), dtype=torch.long))
        self.seen = []

    def forward(self, fails=False):
        self.seen.append((self.scale.dtype, self.index.dtype))
        self.count += 1
        if fails:
            raise KeyError
        self.scale = self.scale * 2
        return self.scale


def test_buffers_are_seen_in_another_format_and_what_is_written_is_kept_in_their_own():
    module = Counting()
    assert cast_buffers(module, torch.bfloat16)
    assert module().dtype is torch.bfloat16
    assert module.seen == [(torch.bfloat16, torch.long)]
    assert (module.scale.dtype, module.scale.tolist()) == (torch.float32, [2.0, 2.0])  # 1.001 is 1 in bfloat16
    assert (module.count.dtype, module.count.item()) == (torch.float32, 1.0)


def test_buffers_are_back_after_an_error():
    module = Counting()
    cast_buffers(module, torch.bfloat16)
    stored = module.scale
    with pytest.raises(KeyError):
        module(fails=True)
    assert module.scale is stored
    assert module.count.item() == 1.0


def test_running_statistics_are_not_cast():
    assert not cast_buffers(nn.BatchNorm1d(2), torch.bfloat16)
    assert not cast_buffers(nn.Linear(2, 2), torch.bfloat16)
