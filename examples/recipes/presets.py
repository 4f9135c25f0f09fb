"""Published recipes as presets: three for ResNet-50 on ImageNet, MosaicBERT, and two of speed records.

Their settings are cited. Nothing that was published about them was measured here.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer import Algorithm
from composer.algorithms import (
    EMA,
    SAM,
    Alibi,
    AlternatingFlip,
    AttentionWindowWarmup,
    BlurPool,
    ChannelsLast,
    ColOut,
    DiracInit,
    GatedLinearUnits,
    LabelSmoothing,
    LogitSoftcap,
    LowPrecisionLayerNorm,
    MixUp,
    MultiViewEval,
    ProgressiveResizing,
    QKNorm,
    RandAugment,
    SquaredReLU,
    StochasticDepth,
    ValueResidual,
    WhiteningInit,
    ZeroInit,
)
from composer.models import ComposerClassifier, HuggingFaceModel, composer_resnet
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    DecoupledSGDW,
    LinearWithWarmupScheduler,
    Muon,
    WarmupStableDecayScheduler,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetRecipe:
    """Training a ResNet-50 on ImageNet.

    Args:
        label_smoothing: How much of a label's weight goes to all classes.
        initial_scale: Of the sides of images at the beginning.
        delay_fraction: The part of training at that scale.
        mixup_alpha: Of MixUp; `None` for none.
        sam_interval: In batches; `None` for no SAM.
        has_augmentation: Whether there are ColOut, RandAugment and StochasticDepth.
        weight_decay: Of the optimizer.

    Example:
        >>> model = RESNET_MEDIUM.make_model()
        >>> trainer = Trainer(
        ...     model,
        ...     train_dataloader=...,  # crops of train_crop pixels, in batches of batch_size
        ...     max_duration=RESNET_MEDIUM.max_duration,
        ...     scale_schedule_ratio=0.4,  # 36 epochs in place of 90
        ...     algorithms=RESNET_MEDIUM.make_algorithms(),
        ...     optimizers=RESNET_MEDIUM.make_optimizer(model),
        ...     schedulers=RESNET_MEDIUM.make_scheduler(),
        ... )  # doctest: +SKIP

    Reference:
        "Mosaic ResNet", 2022, a blog post of MosaicML.
    """

    label_smoothing: float
    initial_scale: float = 0.5
    delay_fraction: float = 0.4
    mixup_alpha: float | None = None
    sam_interval: int | None = None
    has_augmentation: bool = False
    weight_decay: float = 5e-4
    train_crop: int = 176
    eval_resize: int = 232
    eval_crop: int = 224
    batch_size: int = 2048
    max_duration: str = "90ep"

    def make_algorithms(self) -> list[Algorithm]:
        """Make the algorithms, new ones for each run."""
        algorithms = [
            BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=16),
            ChannelsLast(),
            EMA(half_life="100ba", update_interval="20ba"),
            LabelSmoothing(self.label_smoothing),
            ProgressiveResizing(
                mode="resize",
                initial_scale=self.initial_scale,
                delay_fraction=self.delay_fraction,
                finetune_fraction=0.2,
                size_increment=4,
            ),
        ]
        if self.mixup_alpha is not None:
            algorithms.append(MixUp(alpha=self.mixup_alpha, interpolate_loss=False))
        if self.sam_interval is not None:
            algorithms.append(SAM(rho=0.5, interval=self.sam_interval))
        if self.has_augmentation:
            algorithms += [
                ColOut(p_row=0.05, p_col=0.05, batch=True),
                RandAugment(severity=10, depth=1),
                StochasticDepth("ResNetBottleneck", stochastic_method="sample", drop_rate=0.1),
            ]
        return algorithms

    def make_model(self, num_classes: int = 1000) -> ComposerClassifier:
        """Make a ResNet-50 that is trained with binary cross entropy, every class starting at a low probability."""
        return composer_resnet(
            "resnet50",
            num_classes=num_classes,
            initializers=["linear_log_constant_bias"],
            loss_name="binary_cross_entropy_with_logits",
        )

    def make_optimizer(self, model: nn.Module) -> DecoupledSGDW:
        """Make the optimizer for batches of `batch_size` images."""
        return DecoupledSGDW(model.parameters(), lr=2.048, momentum=0.875, weight_decay=self.weight_decay)

    def make_scheduler(self) -> CosineAnnealingWithWarmupScheduler:
        """Make the schedule: up for 8 epochs, and down to 0 along a cosine."""
        return CosineAnnealingWithWarmupScheduler(t_warmup="8ep")


RESNET_MILD = ResNetRecipe(label_smoothing=0.08)
RESNET_MEDIUM = ResNetRecipe(label_smoothing=0.10, mixup_alpha=0.2, sam_interval=10)
RESNET_HOT = ResNetRecipe(
    label_smoothing=0.13,
    initial_scale=0.6,
    delay_fraction=0.2,
    mixup_alpha=0.25,
    sam_interval=5,
    has_augmentation=True,
    weight_decay=3e-4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicBERT:
    """Pretraining a BERT with masked tokens.

    Of what was published, unpadding is not here: batches keep their padding. Flash attention is that of PyTorch, where
    the device has it.

    Args:
        max_sequence_length: The longest sequence that the model will see.
        masking_rate: How many of the tokens are masked.
        vocabulary: How many tokens the tokenizer has.
        precision: For the Trainer.

    Example:
        >>> MosaicBERT().padded_vocabulary
        30528

    Reference:
        Portes et al., "MosaicBERT: A Bidirectional Encoder Optimized for Fast Pretraining", NeurIPS 2023,
        arXiv:2312.17482.
    """

    max_sequence_length: int = 128
    masking_rate: float = 0.3
    vocabulary: int = 30522
    precision: str = "amp_bf16"

    @property
    def padded_vocabulary(self) -> int:
        """The next multiple of 64, which GPUs multiply fastest by."""
        return -(-self.vocabulary // 64) * 64

    def make_algorithms(self) -> list[Algorithm]:
        """Make the algorithms, new ones for each run."""
        return [
            Alibi(max_sequence_length=self.max_sequence_length, train_sequence_length_scaling=1.0),
            GatedLinearUnits(),
            LowPrecisionLayerNorm(),
        ]

    def make_model(self, **sizes: Any) -> nn.Module:
        """Make a BERT for masked tokens whose attention is torch's, with flash kernels where there are some.

        Args:
            **sizes: Settings of `transformers.BertConfig` that differ from BERT-Base's.
        """
        import transformers  # loads for seconds, and the other recipes do without

        config = transformers.BertConfig(
            vocab_size=self.padded_vocabulary,
            max_position_embeddings=self.max_sequence_length,
            attention_probs_dropout_prob=0.0,
            **sizes,
        )
        config._attn_implementation = "sdpa"
        return transformers.BertForMaskedLM(config)

    def make_collator(self, tokenizer: Any) -> Any:
        """Make what puts samples together and masks their tokens."""
        import transformers

        return transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=self.masking_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModdedNanoGPT:
    """Pretraining a GPT-2 of 124 million weights on FineWeb to a loss of 3.28, as the record of January 4, 2025 did.

    Of what was published, these are not here: value embeddings (`ValueResidual`, from which they came, is), U-net
    connections between layers, norms without weights, and an output layer that starts at zero.

    Args:
        vocabulary: How many tokens the tokenizer has, padded.
        tokens_per_batch: In a step of the optimizer.
        max_duration: For the Trainer.
        precision: For the Trainer.
        lr: Of hidden matrices, by Muon.
        lr_embeddings: By Adam, as are the two below.
        lr_head: Of the output layer.
        lr_vectors: Of norms, and of what `QKNorm` and `ValueResidual` learn.

    Reference:
        Jordan et al., "modded-nanogpt: Speedrunning the NanoGPT baseline", 2024,
        https://github.com/KellerJordan/modded-nanogpt, records/010425_SoftCap.
    """

    vocabulary: int = 50304
    tokens_per_batch: int = 8 * 64 * 1024
    max_duration: str = "1390ba"
    precision: str = "amp_bf16"
    lr: float = 0.05
    lr_embeddings: float = 0.6
    lr_head: float = 0.008
    lr_vectors: float = 0.04

    def make_algorithms(self) -> list[Algorithm]:
        """Make the algorithms, new ones for each run."""
        return [
            ZeroInit(),
            SquaredReLU(),
            QKNorm(),
            ValueResidual(),
            LogitSoftcap(15.0),
            AttentionWindowWarmup("1dur", initial_window=128, final_window=1792, num_windows=14),
        ]

    def make_model(self, **sizes: Any) -> HuggingFaceModel:
        """Make a causal model with rotary embeddings, without biases, and with an output layer of its own.

        Args:
            **sizes: Settings of `transformers.Starcoder2Config` that differ from those of the record.
        """
        import transformers

        of_record: dict[str, Any] = {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
        }
        config = transformers.Starcoder2Config(
            vocab_size=self.vocabulary,
            use_bias=False,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            **of_record | sizes,
        )
        return HuggingFaceModel(transformers.Starcoder2ForCausalLM(config), use_logits=True)

    def make_optimizer(self, model: nn.Module) -> Muon:
        """Make the optimizer."""
        groups = [
            {"params": "*embed_tokens*", "lr": self.lr_embeddings},
            {"params": "*lm_head*", "lr": self.lr_head},
            {"params": "*norm*", "lr": self.lr_vectors},
        ]
        return Muon(model, lr=self.lr, weight_decay=0.0, adjust_lr_fn="original", betas=(0.8, 0.95), groups=groups)

    def make_scheduler(self) -> WarmupStableDecayScheduler:
        """Make the schedule: constant after one batch, and down to 0 along a line in the last 40 %."""
        return WarmupStableDecayScheduler("1ba", t_decay="0.4dur", decay="linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class Airbench94:
    """Training a small network on CIFAR-10 to 94 %.

    Of what was published, lookahead is not here, and the bias of the first layer is trained throughout instead of for
    three epochs. The loader moves images by up to two pixels, and does not flip them. The warm-up starts at 0 instead
    of 0.2.

    Args:
        batch_size: Images in a step.
        max_duration: For the Trainer: 9.9 epochs.
        widths: Channels of the three blocks.
        lr: For 1,024 images, as if there were no momentum.
        momentum: Of the optimizer.
        weight_decay: For 1,024 images, decoupled from the learning rate.
        bias_scaler: Of the learning rate of the biases of batch norms.
        label_smoothing: How much of a label's weight goes to all classes.

    Reference:
        Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498.
    """

    batch_size: int = 1024
    max_duration: str = "476ba"
    widths: tuple[int, int, int] = (64, 256, 256)
    lr: float = 11.5
    momentum: float = 0.85
    weight_decay: float = 0.0153
    bias_scaler: float = 64.0
    label_smoothing: float = 0.2

    def make_algorithms(self, images: Tensor | None = None) -> list[Algorithm]:
        """Make the algorithms, new ones for each run.

        Args:
            images: 5,000 images of the training set, normalized as the model gets them, for the first layer to whiten
                their patches. `None` leaves its random weights.
        """
        return [
            *([] if images is None else [WhiteningInit(images)]),
            ChannelsLast(),
            DiracInit(),
            LabelSmoothing(self.label_smoothing),
            AlternatingFlip(),
            MultiViewEval(shift=1),
        ]

    def make_model(self, num_classes: int = 10) -> ComposerClassifier:
        """Make the network, for images of 32x32 pixels."""
        layers: list[nn.Module] = [nn.Conv2d(3, 24, 2), nn.GELU()]
        channels = 24
        for width in self.widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.MaxPool2d(2), *_norm_and_gelu(width)]
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), *_norm_and_gelu(width)]
            channels = width
        head = nn.Linear(channels, num_classes, bias=False)
        layers += [nn.MaxPool2d(3), nn.Flatten(), head, _Scale(1 / 9)]
        return ComposerClassifier(nn.Sequential(*layers), num_classes=num_classes)

    def make_optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """Make the optimizer for a loss that is the mean of a batch."""
        # A constant gradient moves weights by so many times the learning rate, with Nesterov momentum.
        scale = self.batch_size / 1024 / (1 + 1 / (1 - self.momentum))
        lr, decay = self.lr * scale, self.weight_decay * scale
        norms = [module.bias for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        chosen = {id(bias) for bias in norms}
        others = [param for param in model.parameters() if param.requires_grad and id(param) not in chosen]
        groups = [
            {"params": params, "lr": rate, "weight_decay": decay / rate}
            for params, rate in ((others, lr), (norms, lr * self.bias_scaler))
        ]
        return torch.optim.SGD(groups, momentum=self.momentum, nesterov=True)

    def make_scheduler(self) -> LinearWithWarmupScheduler:
        """Make the schedule: a triangle."""
        return LinearWithWarmupScheduler(t_warmup="0.23dur", alpha_f=0.07)


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _norm_and_gelu(channels: int) -> tuple[nn.Module, nn.Module]:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad = False
    return norm, nn.GELU()
