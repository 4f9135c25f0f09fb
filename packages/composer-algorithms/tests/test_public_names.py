"""The names that users may import; a change here is a change to the interface."""

import subprocess
import sys

import pytest

import composer_algorithms
from composer_algorithms import (
    alibi,
    alternating_flip,
    attention_window,
    augmentation,
    augmix,
    blurpool,
    channels_last,
    colout,
    cutmix,
    cutout,
    dataset_transforms,
    dirac_init,
    ema,
    factorize,
    functional,
    fused_cross_entropy,
    gated_linear_units,
    ghost_batchnorm,
    gradient_clipping,
    gyro_dropout,
    label_smoothing,
    layer_freezing,
    low_precision_groupnorm,
    low_precision_layernorm,
    mixup,
    module_surgery,
    multi_token_prediction,
    multi_view_eval,
    mup,
    no_op_model,
    progressive_resizing,
    randaugment,
    sam,
    selective_backprop,
    seq_length_warmup,
    squeeze_excite,
    stochastic_depth,
    swa,
    transformer_surgery,
    untied_head,
    weight_standardization,
    whitening_init,
    z_loss,
)

OF_THE_PACKAGE = (
    "AGC Alibi AlternatingFlip AttentionWindowWarmup AugMix AugmentAndMixTransform BlurPool ChannelsLast ColOut "
    "ColOutTransform CutMix CutOut CutOutTransform DiracInit EMA Factorize FusedCrossEntropy GatedLinearUnits "
    "GhostBatchNorm GradientClipping GyroDropout LabelSmoothing LayerFreezing LogitSoftcap LowPrecisionGroupNorm "
    "LowPrecisionLayerNorm Metadata MixUp MixUpOrCutMix MultiTokenPrediction MultiViewEval MuP NoOpModel "
    "ProgressiveResizing QKNorm RandAugment RandAugmentTransform SAM SAMOptimizer SWA SelectiveBackprop "
    "SeqLengthWarmup SquaredReLU SqueezeExcite StochasticDepth UntiedHead ValueResidual WeightStandardization "
    "WhiteningInit ZLoss ZeroInit __version__ add_vision_dataset_transform all_metadata coord_check"
)
FUNCTIONS = (
    "alternating_flip_batch apply_agc apply_alibi apply_blurpool apply_channels_last apply_dirac_init "
    "apply_factorization apply_fused_cross_entropy apply_gated_linear_units apply_ghost_batchnorm "
    "apply_gradient_clipping apply_gyro_dropout apply_logit_softcap apply_low_precision_groupnorm "
    "apply_low_precision_layernorm apply_mup apply_qk_norm apply_multi_token_prediction apply_whitening_init "
    "multi_token_loss apply_squared_relu apply_squeeze_excite apply_stochastic_depth apply_untied_head "
    "apply_value_residual apply_weight_standardization apply_zero_init attention_window augmix_image colout_batch "
    "compute_ema cutmix cutmix_batch cutout_batch freeze_layers mixup_batch multi_view_forward post_hoc_ema "
    "randaugment_image resize_batch select_using_loss selective_backprop set_batch_sequence_length "
    "should_selective_backprop smooth_labels z_loss"
)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (composer_algorithms, OF_THE_PACKAGE),
        (functional, FUNCTIONS),
        (alternating_flip, "AlternatingFlip AlternatingFlipDataset METADATA alternating_flip_batch"),
        (attention_window, "AttentionWindowWarmup METADATA attention_window"),
        (augmentation, "AugmentationFunction augmentation_sets image_as_type map_pillow_function"),
        (augmix, "AugMix AugmentAndMixTransform augmix_image METADATA"),
        (colout, "ColOut ColOutTransform colout_batch METADATA"),
        (cutmix, "CutMix MixUpOrCutMix cutmix cutmix_batch METADATA"),
        (cutout, "CutOut CutOutTransform cutout_batch METADATA"),
        (dataset_transforms, "TransformedDatasets add_vision_dataset_transform"),
        (dirac_init, "DiracInit METADATA apply_dirac_init"),
        (ema, "EMA EMAParameters compute_ema get_model_context_manager post_hoc_ema METADATA"),
        (gradient_clipping, "AGC GradientClipping apply_agc apply_gradient_clipping METADATA"),
        (label_smoothing, "LabelSmoothing smooth_labels METADATA"),
        (layer_freezing, "LayerFreezing freeze_layers METADATA"),
        (mixup, "MixUp mixup_batch METADATA"),
        (multi_view_eval, "METADATA MultiViewEval multi_view_forward"),
        (mup, "CoordCheck MuP apply_mup coord_check METADATA"),
        (progressive_resizing, "ProgressiveResizing resize_batch METADATA"),
        (randaugment, "RandAugment RandAugmentTransform randaugment_image METADATA"),
        (sam, "SAM SAMOptimizer METADATA"),
        (
            selective_backprop,
            "SelectiveBackprop select_using_loss selective_backprop should_selective_backprop METADATA",
        ),
        (seq_length_warmup, "SeqLengthWarmup set_batch_sequence_length METADATA"),
        (alibi, "Alibi apply_alibi METADATA"),
        (
            blurpool,
            "BlurPool apply_blurpool BlurConv2d BlurMaxPool2d BlurPool2d blur_2d blurmax_pool2d METADATA",
        ),
        (channels_last, "ChannelsLast apply_channels_last METADATA"),
        (
            factorize,
            "Factorize apply_factorization FactorizedConv2d FactorizedLinear factorizing_could_speedup "
            "LowRankSolution factorize_conv2d factorize_matrix LOG_NUM_CONV2D_REPLACEMENTS_KEY "
            "LOG_NUM_LINEAR_REPLACEMENTS_KEY METADATA",
        ),
        (fused_cross_entropy, "FusedCrossEntropy apply_fused_cross_entropy METADATA"),
        (gated_linear_units, "BERTGatedFFOutput GatedLinearUnits apply_gated_linear_units METADATA"),
        (
            ghost_batchnorm,
            "GhostBatchNorm GhostBatchNorm1d GhostBatchNorm2d GhostBatchNorm3d apply_ghost_batchnorm METADATA",
        ),
        (gyro_dropout, "GyroDropout GyroDropoutLayer apply_gyro_dropout METADATA"),
        (low_precision_groupnorm, "LPGroupNorm LowPrecisionGroupNorm apply_low_precision_groupnorm METADATA"),
        (low_precision_layernorm, "LPLayerNorm LowPrecisionLayerNorm apply_low_precision_layernorm METADATA"),
        (
            module_surgery,
            "ReplacementFunction count_module_instances replace_module_classes update_params_in_optimizer",
        ),
        (
            multi_token_prediction,
            "METADATA MultiTokenHeads MultiTokenPrediction apply_multi_token_prediction multi_token_loss",
        ),
        (no_op_model, "NoOpModel NoOpModelClass METADATA"),
        (squeeze_excite, "SqueezeExcite SqueezeExcite2d SqueezeExciteConv2d apply_squeeze_excite METADATA"),
        (
            stochastic_depth,
            "StochasticDepth apply_stochastic_depth BlockStochasticModule make_resnet_basic_block_stochastic "
            "make_resnet_bottleneck_stochastic METADATA",
        ),
        (weight_standardization, "WeightStandardization apply_weight_standardization METADATA"),
        (swa, "SWA METADATA"),
        (untied_head, "METADATA UntiedHead apply_untied_head"),
        (whitening_init, "METADATA WhiteningInit apply_whitening_init"),
        (z_loss, "METADATA ZLoss z_loss"),
        (
            transformer_surgery,
            "LogitSoftcap QKNorm SquaredReLU ValueResidual ZeroInit apply_logit_softcap apply_qk_norm "
            "apply_squared_relu apply_value_residual apply_zero_init",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_public_names_are_these(module, names):
    assert set(module.__all__) == set(names.split())
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'MixDown'"):
        composer_algorithms.MixDown  # noqa: B018  # the look-up is the test


def test_importing_the_package_does_not_import_torch():
    code = "import sys, composer_algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
