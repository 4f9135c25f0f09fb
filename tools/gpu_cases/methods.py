"""The speed-up methods on the device: as functions they agree with the CPU, as Algorithms they train."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import composer_algorithms.functional as cf
from composer import algorithms
from composer.core import Algorithm, Callback
from composer_algorithms.ema import EMAParameters
from gpu_cases.subjects import (
    LENGTH,
    NUM_CLASSES,
    Losses,
    make_convolutional,
    make_gpt,
    make_images,
    make_sentences,
    make_trainer,
)

# Each with the settings that make it act on so small a network.
IMAGE_METHODS: Mapping[str, Callable[[], Algorithm]] = {
    "BlurPool": algorithms.BlurPool,
    "ColOut": algorithms.ColOut,
    "CutMix": algorithms.CutMix,
    "CutOut": algorithms.CutOut,
    "EMA": lambda: algorithms.EMA(half_life="5ba"),
    "GhostBatchNorm": lambda: algorithms.GhostBatchNorm(ghost_batch_size=16),
    "GradientClipping": lambda: algorithms.GradientClipping("adaptive", 0.1),
    "LabelSmoothing": algorithms.LabelSmoothing,
    "MixUp": algorithms.MixUp,
    "ProgressiveResizing": algorithms.ProgressiveResizing,
    "SAM": algorithms.SAM,
    "SelectiveBackprop": algorithms.SelectiveBackprop,
    "SqueezeExcite": lambda: algorithms.SqueezeExcite(min_channels=16),
    "WeightStandardization": algorithms.WeightStandardization,
}


def functions(device: str) -> str:
    """Methods as functions give on the device what they give on the CPU, on which everything is drawn."""
    for name, function in FUNCTIONS.items():
        torch.manual_seed(5)
        result = function(device)
        torch.manual_seed(5)
        expected = function("cpu")
        assert result.device.type == device, f"{name} has left its result on {result.device}"
        torch.testing.assert_close(
            result.cpu(), expected, rtol=1e-5, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )
    return f"{len(FUNCTIONS)} functions as on the CPU"


def image_algorithms(device: str) -> str:
    """Each method for images trains in bfloat16; and SAM in float16, where the scaler has to follow its closure."""
    for name, make in IMAGE_METHODS.items():
        _train(name, make_convolutional(), make_images(12), device, make(), "amp_bf16")
    if device == "cuda":
        _train("SAM", make_convolutional(), make_images(12), device, algorithms.SAM(), "amp_fp16")
    return f"{len(IMAGE_METHODS)} methods"


def text_algorithms(device: str) -> str:
    """Methods for text train in bfloat16, and low precision layer norms give bfloat16."""
    warmup, norms = algorithms.SeqLengthWarmup(max_seq_length=LENGTH), NormDtypes()
    _train("SeqLengthWarmup", make_gpt(), make_sentences(12), device, warmup, "amp_bf16")
    low = algorithms.LowPrecisionLayerNorm()
    _train("LowPrecisionLayerNorm", make_gpt(), make_sentences(12), device, low, "amp_bf16", norms)
    assert norms.seen == {torch.bfloat16}, f"layer norms gave {norms.seen}"
    return "2 methods"


class NormDtypes(Callback):
    """See what the layer norms give, once methods have put in their own."""

    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()

    def fit_start(self, state: Any, logger: Any) -> None:
        """Begin to look."""
        for module in state.model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(lambda module, inputs, output: self.seen.add(output.dtype))


def _train(
    name: str, model: nn.Module, batches: list[Any], device: str, method: Algorithm, precision: str, *watchers: Callback
) -> None:
    """Train with one method, and raise if a loss is not finite, or nothing moved."""
    losses = Losses()
    settings = {"algorithms": method, "precision": precision, "callbacks": [losses, *watchers]}
    try:
        with make_trainer(model, batches, device, **settings) as trainer:
            trainer.fit()
            parameters = list(trainer.state.model.parameters())
    except Exception as error:
        raise AssertionError(f"{name} in {precision}: {type(error).__name__}: {error}") from error
    devices = {parameter.device.type for parameter in parameters}
    assert devices == {device}, f"{name} has left parameters on {devices}"
    assert torch.stack(losses.losses).isfinite().all(), f"{name} in {precision}: a loss is not finite"
    assert len({float(loss) for loss in losses.losses}) > 1, f"{name} in {precision}: nothing is learned"


def _images(device: str) -> tuple[Tensor, Tensor]:
    images, labels = make_images(1, 16)[0]
    return images.to(device), labels.to(device)


def _permuted(device: str) -> Tensor:
    return torch.arange(16).roll(3).to(device)


def _mixup(device: str) -> Tensor:
    images, labels = _images(device)
    return cf.mixup_batch(images, labels, mixing=0.3, indices=_permuted(device))[0]


def _cutmix(device: str) -> Tensor:
    images, labels = _images(device)
    return cf.cutmix_batch(images, labels, bbox=(4, 6, 20, 28), indices=_permuted(device))[0]


def _cutout(device: str) -> Tensor:
    return cf.cutout_batch(_images(device)[0], num_holes=2, length=0.5)


def _colout(device: str) -> Tensor:
    return cf.colout_batch(_images(device)[0], p_row=0.2, p_col=0.2)


def _smoothed(device: str) -> Tensor:
    return cf.smooth_labels(torch.zeros(16, NUM_CLASSES, device=device), _images(device)[1], smoothing=0.1)


def _randaugment(device: str) -> Tensor:
    images = (_images(device)[0].clamp(0, 1) * 255).to(torch.uint8)
    return cf.randaugment_image(images, severity=5, depth=2)


def _averaged(device: str) -> Tensor:
    model = nn.Linear(8, 8).to(device)
    average = EMAParameters(model)
    with torch.no_grad():
        model.weight += 1
    cf.compute_ema(model, average, smoothing=0.9)
    return dict(average.named_parameters())["weight"].detach()


FUNCTIONS: Mapping[str, Callable[[str], Tensor]] = {
    "mixup_batch": _mixup,
    "cutmix_batch": _cutmix,
    "cutout_batch": _cutout,
    "colout_batch": _colout,
    "smooth_labels": _smoothed,
    "randaugment_image": _randaugment,
    "compute_ema": _averaged,
}
