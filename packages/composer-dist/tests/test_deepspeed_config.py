import copy
import subprocess
import sys

import pytest

from composer_dist import Precision, get_device, parse_deepspeed_config
from composer_dist.deepspeed import check_deepspeed_fits

RUN = {"batch_size": 8, "microbatch_size": 2, "world_size": 4, "precision": "fp32"}
INFERRED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_allow_untested_optimizer": True,
}


def parse(config, **changes):
    return parse_deepspeed_config(config, **{**RUN, **changes})


def test_an_empty_configuration_is_inferred_from_the_run():
    assert parse({}) == INFERRED


def test_the_users_configuration_stays_as_it_was():
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    before = copy.deepcopy(config)
    parsed = parse(config, precision="amp_bf16")
    parsed["zero_optimization"]["stage"] = 3
    assert config == before


def test_what_the_run_does_not_settle_is_kept():
    assert parse({"steps_per_print": 7, "a_key_of_tomorrow": {"x": 1}}) == {
        **INFERRED,
        "steps_per_print": 7,
        "a_key_of_tomorrow": {"x": 1},
    }


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_batch_size_may_be_given_if_it_is_the_runs(key):
    assert parse({key: INFERRED[key]}) == parse({key: "auto"}) == INFERRED
    with pytest.raises(ValueError, match=rf"deepspeed_config\['{key}'\]=5 contradicts .* make it {INFERRED[key]} "):
        parse({key: 5})


def test_a_batch_that_is_not_cut_is_one_microbatch():
    parsed = parse({}, microbatch_size=None)
    assert (parsed["train_micro_batch_size_per_gpu"], parsed["gradient_accumulation_steps"]) == (8, 1)


@pytest.mark.parametrize("size", [3, 16, 0, -2, 1.5])
def test_a_microbatch_that_does_not_divide_the_batch_is_refused(size):
    with pytest.raises(ValueError, match=rf"device_train_microbatch_size={size} does not divide .* batch size of 8"):
        parse({}, microbatch_size=size)


def test_a_microbatch_size_that_is_searched_for_is_refused():
    with pytest.raises(
        ValueError, match=r"device_train_microbatch_size='auto' .* cannot be used with deepspeed_config"
    ):
        parse({}, microbatch_size="auto")


def test_a_dataloader_without_batch_size_is_refused():
    with pytest.raises(RuntimeError, match="neither the dataloader nor its batch_sampler has an attribute batch_size"):
        parse({}, batch_size=None)
    with pytest.raises(RuntimeError, match="on all 4 ranks together, got 30"):
        parse({"train_batch_size": 30}, batch_size=None)


def test_a_dataloader_without_batch_size_has_that_of_the_configuration():
    """Seen before: that the dataloader has no attribute batch_size."""
    parsed = parse({"train_batch_size": 32}, batch_size=None)
    assert (parsed["train_micro_batch_size_per_gpu"], parsed["gradient_accumulation_steps"]) == (2, 4)


@pytest.mark.parametrize(("section", "argument"), [("optimizer", "optimizers"), ("scheduler", "schedulers")])
def test_sections_that_belong_to_the_trainer_are_refused(section, argument):
    with pytest.raises(ValueError, match=f"has a section '{section}'.* pass {argument}= to the Trainer"):
        parse({section: {"type": "Adam"}})


@pytest.mark.parametrize(("section", "precision"), [("fp16", "amp_fp16"), ("bf16", "amp_bf16"), ("amp", "amp_fp16")])
def test_a_section_that_is_enabled_must_be_the_runs_precision(section, precision):
    config = {section: {"enabled": True}}
    assert parse(config, precision=precision) == {**INFERRED, **config}
    with pytest.raises(ValueError, match=rf"\['{section}'\] is enabled, which is precision='{precision}', but"):
        parse(config, precision="fp32")


def test_of_several_sections_the_first_counts():
    config = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(ValueError, match="has precision='amp_bf16'"):
        parse(config, precision="amp_bf16")
    config["fp16"]["enabled"] = False
    assert parse(config, precision=Precision.AMP_BF16) == {**INFERRED, **config}


@pytest.mark.parametrize(("section", "precision"), [("fp16", "amp_fp16"), ("bf16", "amp_bf16")])
def test_a_section_is_filled_in_from_the_runs_precision(section, precision):
    assert parse({}, precision=precision) == {**INFERRED, section: {"enabled": True}}
    assert parse({section: {"enabled": "auto"}}, precision=precision)[section] == {"enabled": True}
    switched_off = {section: {"enabled": False, "loss_scale": 1}}
    assert parse(switched_off, precision=precision) == {**INFERRED, **switched_off}


def test_float8_is_refused():
    with pytest.raises(ValueError, match="precision='amp_fp8' cannot be used"):
        parse({}, precision="amp_fp8")


def test_untested_optimizers_are_always_allowed():
    assert parse({"zero_allow_untested_optimizer": True}) == INFERRED
    with pytest.warns(UserWarning, match=r"\['zero_allow_untested_optimizer'\]=False was set to True") as caught:
        assert parse({"zero_allow_untested_optimizer": False}) == INFERRED
    assert caught[0].filename == __file__


def test_clipping_by_norm_becomes_the_engines():
    assert parse({}, clip=("norm", 0.5)) == {**INFERRED, "gradient_clipping": 0.5}
    assert parse({"gradient_clipping": "auto"}, clip=("norm", 0.5))["gradient_clipping"] == 0.5
    assert parse({"gradient_clipping": "auto"}) == INFERRED
    assert parse({"gradient_clipping": 2.0}) == {**INFERRED, "gradient_clipping": 2.0}


@pytest.mark.parametrize("threshold", [0, -1.0])
def test_a_threshold_that_deepspeed_takes_for_none_is_refused(threshold):
    with pytest.raises(ValueError, match=f"clipping_threshold={threshold} cannot be used"):
        parse({}, clip=("norm", threshold))


def test_two_thresholds_are_refused():
    with pytest.raises(ValueError, match=r"\['gradient_clipping'\]=1.0 contradicts .* make it 0.5"):
        parse({"gradient_clipping": 1.0}, clip=("norm", 0.5))


@pytest.mark.parametrize("clipping_type", ["value", "adaptive"])
def test_other_ways_to_clip_are_refused(clipping_type):
    with pytest.raises(NotImplementedError, match=f"clipping_type='{clipping_type}' cannot be used"):
        parse({}, clip=(clipping_type, 0.5))


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("train_batchsize", "train_batch_size"), ("zero_optimisation", "zero_optimization"), ("BF16", None)],
)
def test_a_misspelt_name_is_refused_with_the_right_one(misspelt, meant):
    if meant is None:
        assert misspelt in parse({misspelt: {}})  # nothing is near enough to be sure
        return
    with pytest.raises(ValueError, match=f"has '{misspelt}', which DeepSpeed does not know. Did you mean {meant}"):
        parse({misspelt: 1})


class OptimizerMonitor:
    reads_gradients = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallelism_config": {"fsdp": {}}}, "deepspeed_config and parallelism_config .* were both given"),
        ({"has_train_dataloader": False}, "needs the train_dataloader when the Trainer is constructed"),
        ({"callbacks": [object(), OptimizerMonitor()]}, "OptimizerMonitor cannot be used with deepspeed_config"),
    ],
)
def test_what_does_not_go_together_with_deepspeed_is_refused(change, message):
    fitting = {"parallelism_config": None, "has_train_dataloader": True, "callbacks": [object()]}
    check_deepspeed_fits(**fitting)
    with pytest.raises(ValueError, match=message):
        check_deepspeed_fits(**{**fitting, **change})


def test_neither_the_configuration_nor_the_strategys_module_needs_the_package():
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "import composer_dist\n"
        "from composer_dist import DeepSpeed, get_device, is_model_deepspeed, parse_deepspeed_config\n"
        "import torch; assert not is_model_deepspeed(torch.nn.Linear(1, 1))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package_the_extra_is_named(monkeypatch):
    from composer_dist import DeepSpeed

    monkeypatch.setattr("composer_dist.deepspeed.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'composer-dist\[deepspeed\]'") as caught:
        DeepSpeed(get_device("cpu"), {})
    assert caught.value.name == "deepspeed"
