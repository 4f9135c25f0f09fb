"""What is no number, no tensor or no model is refused by the name of its argument, before training begins."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import composer_algorithms
import composer_algorithms.functional as cf
from composer_algorithms.module_surgery import replace_module_classes

NUMBERS = {
    "Alibi": ["train_sequence_length_scaling"],
    "AugMix": ["severity", "alpha"],
    "BlurPool": ["min_channels"],
    "ColOut": ["p_row", "p_col"],
    "CutMix": ["alpha"],
    "CutOut": ["length"],
    "Factorize": ["min_channels", "latent_channels", "min_features", "latent_features"],
    "GradientClipping": ["clipping_threshold", "eps"],
    "GyroDropout": ["p"],
    "LabelSmoothing": ["smoothing"],
    "LayerFreezing": ["freeze_start", "freeze_level"],
    "FusedCrossEntropy": ["label_smoothing"],
    "LogitSoftcap": ["cap"],
    "MixUp": ["alpha"],
    "MixUpOrCutMix": ["mixup_alpha", "cutmix_alpha", "switch_prob"],
    "ProgressiveResizing": ["initial_scale", "finetune_fraction", "delay_fraction"],
    "RandAugment": ["severity"],
    "SAM": ["rho", "epsilon"],
    "SelectiveBackprop": ["start", "end", "keep", "scale_factor"],
    "SeqLengthWarmup": ["duration"],
    "SqueezeExcite": ["latent_channels", "min_channels"],
    "StochasticDepth": ["drop_rate"],
    "ZLoss": ["coefficient"],
}
COUNTS = {
    "Alibi": ["max_sequence_length"],
    "AttentionWindowWarmup": ["initial_window", "final_window", "num_windows"],
    "AugMix": ["width"],
    "CutOut": ["num_holes"],
    "GhostBatchNorm": ["ghost_batch_size"],
    "GyroDropout": ["sigma", "tau"],
    "MuP": ["base_width"],
    "MultiViewEval": ["shift"],
    "ProgressiveResizing": ["size_increment"],
    "RandAugment": ["depth"],
    "SAM": ["interval"],
    "SelectiveBackprop": ["interrupt"],
    "SeqLengthWarmup": ["min_seq_length", "max_seq_length", "step_size"],
    "SWA": ["anneal_steps"],
    "WeightStandardization": ["n_last_layers_ignore"],
}
NEEDED = {
    "Alibi": {"max_sequence_length": 16},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "MuP": {"base_width": 16},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck"},
}
IMAGES, LABELS = torch.zeros(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])


def each(arguments):
    return [(name, argument) for name, listed in arguments.items() for argument in listed]


def make(name, **arguments):
    return getattr(composer_algorithms, name)(**NEEDED.get(name, {}) | arguments)


@pytest.mark.parametrize(("name", "argument"), each(NUMBERS) + each(COUNTS))
@pytest.mark.parametrize("value", ["0.5", None, True, [1]], ids=repr)
def test_what_is_no_number_is_refused_by_name(name, argument, value):
    with pytest.raises(TypeError) as refusal:
        make(name, **{argument: value})
    assert str(refusal.value).startswith(f"{argument}={value!r} is not a number: pass ")


@pytest.mark.parametrize(("name", "argument"), each(COUNTS))
def test_counts_are_whole_numbers(name, argument):
    with pytest.raises(ValueError, match=f"{argument}=-1"):
        make(name, **{argument: -1})
    with pytest.raises(ValueError, match=f"{argument}=nan"):
        make(name, **{argument: float("nan")})
    with pytest.raises(TypeError, match=rf"{argument}=2048\.5 is not a whole number"):
        make(name, **{argument: 2048.5})


@pytest.mark.parametrize(
    ("name", "argument"), [("AugMix", "alpha"), *each({name: NUMBERS[name] for name in ("SAM", "LabelSmoothing")})]
)
def test_numbers_are_finite(name, argument):
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"{argument}={value}"):
            make(name, **{argument: value})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: make("AugMix", depth=1.5), TypeError, r"depth=1\.5 is not a whole number"),
        (lambda: make("EMA", half_life=None, smoothing="0.9"), TypeError, "smoothing='0.9' is not a number"),
        (lambda: make("EMA", half_life="long"), ValueError, "half_life='long' is not a time: Invalid time string"),
        (lambda: make("EMA", ema_start="soon"), ValueError, "ema_start='soon' is not a time"),
        (lambda: make("SelectiveBackprop", start=0.9, end=0.5), ValueError, r"start=0\.9 is after end=0\.5"),
        (lambda: make("StochasticDepth", drop_warmup="soon"), ValueError, "drop_warmup='soon' is not a time"),
        (lambda: make("StochasticDepth", drop_warmup=None), RuntimeError, "drop_warmup=None is not a time"),
        (lambda: make("StochasticDepth", drop_warmup=-0.1), ValueError, r"drop_warmup=-0\.1 must be 0 or more"),
        (lambda: make("StochasticDepth", rescale="never"), ValueError, "rescale='never' is unknown"),
        (lambda: make("SWA", swa_start=0.7), TypeError, r"swa_start=0\.7 has no unit"),
        (lambda: make("SWA", update_interval="often"), ValueError, "update_interval='often' is not a time"),
        (lambda: make("SWA", anneal_strategy=None), ValueError, "anneal_strategy=None is unknown"),
        (lambda: make("SWA", schedule_swa_lr=True, swa_lr=-1.0), ValueError, r"swa_lr=-1\.0 is not in \[0, inf"),
        (lambda: cf.mixup_batch([1], LABELS), TypeError, "input is a list"),
        (lambda: cf.mixup_batch(IMAGES, None), TypeError, "target is a NoneType"),
        (lambda: cf.mixup_batch(IMAGES, LABELS, mixing="0.5"), TypeError, "mixing='0.5' is not a number"),
        (lambda: cf.mixup_batch(IMAGES, LABELS, indices=[1, 0, 3, 2]), TypeError, "not a tensor of integers"),
        (lambda: cf.cutmix_batch(IMAGES, LABELS, indices=torch.arange(3)), ValueError, r"indices of shape \(3,\)"),
        (lambda: cf.cutmix_batch(IMAGES, LABELS, length="half"), TypeError, "length='half' is not a number"),
        (
            lambda: cf.cutmix_batch(IMAGES, LABELS, bbox=(0, 0, 4)),
            ValueError,
            r"bbox=\(0, 0, 4\) does not lie in images",
        ),
        (lambda: cf.smooth_labels(torch.zeros(4, 3), [0, 1, 2, 1]), TypeError, "target is a list"),
        (lambda: cf.smooth_labels(torch.zeros(4, 3), LABELS[:2]), RuntimeError, r"target of shape \(2,\)"),
        (lambda: cf.resize_batch([1], None, 0.5), TypeError, "input is a list"),
        (lambda: cf.resize_batch(IMAGES, None, "half"), TypeError, "scale_factor='half' is not a number"),
        (lambda: cf.resize_batch(IMAGES.long(), None, 0.5), TypeError, "images of dtype torch.int64"),
        (lambda: cf.select_using_loss(IMAGES, LABELS, nn.Flatten(), nn.CrossEntropyLoss()), TypeError, "`reduction`"),
        (
            lambda: cf.select_using_loss(IMAGES, LABELS[:3], nn.Flatten(), F.cross_entropy),
            ValueError,
            r"target of shape \(3,\)",
        ),
        (
            lambda: cf.select_using_loss(IMAGES.long(), LABELS, nn.Flatten(), F.cross_entropy, scale_factor=0.5),
            TypeError,
            "floating point inputs",
        ),
        (lambda: cf.set_batch_sequence_length({"input_ids": LABELS}, 2.5), TypeError, r"curr_seq_len=2\.5"),
        (lambda: cf.freeze_layers(nn.Linear(1, 1), [], "late"), TypeError, "current_duration='late'"),
        (lambda: cf.compute_ema(nn.Linear(3, 3), nn.Linear(3, 4)), ValueError, r"weight has the shape \(3, 3\)"),
        (lambda: cf.compute_ema(nn.Linear(3, 3), nn.Linear(3, 3), "0.9"), TypeError, "smoothing='0.9'"),
        (lambda: cf.apply_gradient_clipping(None, "norm", 1.0), TypeError, "not iterable"),
        (
            lambda: cf.apply_gradient_clipping([], "adaptive", 1.0, eps=-1.0),
            ValueError,
            r"eps=-1\.0 is not in \[0, inf",
        ),
        (lambda: cf.apply_blurpool(None), AttributeError, "no attribute"),
        (lambda: cf.apply_channels_last(None), AttributeError, "no attribute"),
        (lambda: cf.apply_factorization(None), AttributeError, "no attribute"),
        (lambda: cf.apply_stochastic_depth(None, "ResNetBottleneck"), AttributeError, "no attribute"),
        (lambda: cf.apply_weight_standardization(None), AttributeError, "no attribute"),
        (lambda: cf.freeze_layers(None, [], 0.5), AttributeError, "no attribute"),
        (lambda: cf.compute_ema(None, nn.Linear(3, 3)), AttributeError, "no attribute"),
    ],
)
def test_bad_input_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("pick", [lambda layer: layer, lambda layer: [layer], lambda layer: layer.parameters()])
def test_surgery_refuses_what_is_no_optimizer_before_it_changes_the_model(pick):
    layer = nn.Linear(3, 3)
    model = nn.Sequential(nn.MaxPool2d(2))
    with pytest.raises(TypeError, match=r"optimizers holds an object of type .* not a torch\.optim\.Optimizer: pass"):
        cf.apply_blurpool(model, optimizers=pick(layer))
    assert type(model[0]) is nn.MaxPool2d


def test_one_name_of_what_is_no_sequence_is_one_name():
    assert make("SeqLengthWarmup", non_sequence_keys="weights").non_sequence_keys == ("weights",)


def test_an_error_about_a_module_says_where_in_the_model_it_is():
    def refuse(module, index):
        raise ValueError("not this one")

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="not this one") as refusal:
        replace_module_classes(model, {nn.ReLU: refuse})
    assert refusal.value.__notes__ == ["raised for the module '1.0', a ReLU"]
