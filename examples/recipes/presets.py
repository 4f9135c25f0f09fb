"""Published recipes as presets: three for ResNet-50 on ImageNet, and MosaicBERT.

Their settings are cited. Nothing that was published about them was measured here.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from composer import Algorithm
from composer.algorithms import (
    EMA,
    SAM,
    Alibi,
    BlurPool,
    ChannelsLast,
    ColOut,
    GatedLinearUnits,
    LabelSmoothing,
    LowPrecisionLayerNorm,
    MixUp,
    ProgressiveResizing,
    RandAugment,
    StochasticDepth,
)
from composer.models import ComposerClassifier, composer_resnet
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledSGDW


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
