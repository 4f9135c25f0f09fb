import sys
import warnings
from types import ModuleType

import pytest
import torch

from composer_dist import STR_TO_DTYPE, Device, DeviceCPU, Precision, get_precision_context, validate_precision


class DeviceElsewhere(Device):
    """A device that is not a CPU."""

    def module_to_device(self, module):
        return module

    def tensor_to_device(self, tensor):
        return tensor


def product_dtype():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("AMP_BF16", torch.bfloat16), (Precision.AMP_BF16, torch.bfloat16)],
)
def test_products_on_a_cpu_have_the_precisions_dtype(precision, dtype):
    with get_precision_context(precision, device_type="cpu"):
        assert product_dtype() == dtype
    assert product_dtype() == torch.float32


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the default is the accelerator")
def test_without_an_accelerator_the_context_is_that_of_the_cpu():
    with get_precision_context("amp_bf16"):
        assert product_dtype() == torch.bfloat16


def test_fp32_switches_an_autocast_around_it_off():
    with get_precision_context("amp_bf16", device_type="cpu"):
        with get_precision_context("fp32", device_type="cpu"):
            assert product_dtype() == torch.float32
        assert product_dtype() == torch.bfloat16


def test_fp32_costs_nothing_where_no_autocast_is_on():
    first, second = (get_precision_context("fp32", device_type="cpu") for _ in range(2))
    assert first is second


def test_fp16_leaves_a_cpu_in_float32():
    with get_precision_context("amp_fp16", device_type="cpu"):
        assert product_dtype() == torch.float32


def test_gradients_under_bf16_are_those_of_fp32_but_for_rounding():
    torch.manual_seed(0)
    layer, batch = torch.nn.Linear(8, 4), torch.randn(16, 8)
    gradients = []
    for precision in ("fp32", "amp_bf16"):
        with get_precision_context(precision, device_type="cpu"):
            loss = layer(batch).float().square().mean()
        gradients.append(torch.autograd.grad(loss, layer.weight)[0])
    assert gradients[1].dtype == torch.float32
    # bfloat16 has 8 significant bits, so each of the factors is off by up to 2**-9.
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("legacy", "name", "member"),
    [
        ("amp", "AMP", Precision.AMP_FP16),
        ("fp16", "FP16", Precision.AMP_FP16),
        ("BF16", "BF16", Precision.AMP_BF16),
    ],
)
def test_older_names_mean_the_members_of_today(legacy, name, member):
    with pytest.warns(
        DeprecationWarning, match=f"precision='{legacy}' is an older spelling. Write '{member.value}'"
    ) as w:
        assert Precision(legacy) is member
    assert len(w) == 1
    assert w[0].filename == __file__
    assert Precision[name] is getattr(Precision, name) is member


@pytest.mark.parametrize(
    "call",
    [
        lambda: get_precision_context("bf16", device_type="cpu"),
        lambda: validate_precision("bf16", DeviceCPU()),
    ],
)
def test_an_older_name_is_pointed_out_where_it_was_written(call):
    with pytest.warns(DeprecationWarning, match="precision='bf16' is an older spelling") as caught:
        call()
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, call.__code__.co_firstlineno)]


def test_short_names_stand_for_torchs_dtypes():
    named = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert named == STR_TO_DTYPE


def test_names_of_today_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [Precision(name) for name in ("FP32", "amp_fp16", "Amp_Bf16", "amp_fp8")] == list(Precision)


def test_older_names_are_no_members():
    assert [member.name for member in Precision] == ["FP32", "AMP_FP16", "AMP_BF16", "AMP_FP8"]
    assert len(Precision) == 4


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="'int3'"):
        get_precision_context("int3")


def test_fp8_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ImportError, match="AMP_FP8 precision is used but TransformerEngine is not installed"):
        get_precision_context("amp_fp8")


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_BF16])
def test_a_cpu_trains_in_fp32_and_bf16(precision):
    validate_precision(precision, DeviceCPU())


@pytest.mark.parametrize("precision", [Precision.AMP_FP16, Precision.AMP_FP8])
def test_a_cpu_does_not_train_in_fp16_or_fp8(precision):
    message = f"precision='{precision.value}' is not supported for CPU training. .*'amp_bf16'"
    with pytest.raises(ValueError, match=message):
        validate_precision(precision, DeviceCPU())


@pytest.mark.parametrize("precision", [one for one in Precision if one is not Precision.AMP_FP8])
def test_other_devices_are_not_refused(precision):
    validate_precision(precision, DeviceElsewhere())


def test_fp8_is_refused_before_training_where_its_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ImportError, match=r"TransformerEngine is not installed.*'transformer-engine'.*amp_bf16"):
        validate_precision("amp_fp8", DeviceElsewhere())


def test_fp8_is_refused_on_a_device_that_cannot_compute_in_it(monkeypatch):
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common.recipe"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"current device does not support it.*None.*\(8, 9\)"):
        validate_precision("amp_fp8", DeviceElsewhere())
