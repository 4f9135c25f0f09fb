"""Every import path that Composer's users type leads to the one object, and to nothing before it is asked for."""

import inspect
import subprocess
import sys
import typing
from importlib import import_module, reload
from importlib.util import find_spec

import pytest

SCHEDULERS = (
    "StepScheduler MultiStepScheduler ConstantScheduler LinearScheduler ExponentialScheduler CosineAnnealingScheduler "
    "CosineAnnealingWarmRestartsScheduler PolynomialScheduler MultiStepWithWarmupScheduler "
    "ConstantWithWarmupScheduler LinearWithWarmupScheduler CosineAnnealingWithWarmupScheduler "
    "PolynomialWithWarmupScheduler WarmupStableDecayScheduler InversePowerWithWarmupScheduler "
    "Schedule"
)
PASSES = (
    "sort_to_front sort_to_back sort_selective_backprop_first sort_low_precision_layernorm_last set_filo_order "
    "warn_if_multiple_loss_interpolation sort_fused_layernorm_last"
)
OLD_PICKLES = (
    "InContextLearningMetric InContextLearningQAAccuracy InContextLearningLMAccuracy "
    "InContextLearningMultipleChoiceAccuracy InContextLearningCodeEvalAccuracy "
    "InContextLearningMCExpectedCalibrationError InContextLearningLMExpectedCalibrationError"
)

# Names, the module that owns them, and every other module that must give the same objects.
IMPORT_MAP = [
    ("Time Timestamp TimeUnit", "composer_time", "composer composer.core composer.core.time"),
    ("ensure_time", "composer_time", "composer.core composer.core.time"),
    ("Event", "composer_events.event", "composer composer.core composer.core.event"),
    ("Engine", "composer_events.engine", "composer composer.core composer.core.engine"),
    ("Trace", "composer_events.engine", "composer.core composer.core.engine"),
    ("Traces", "composer_events.engine", "composer.core.engine"),
    ("AlgorithmPass", "composer_events.passes", "composer.core composer.core.passes"),
    (PASSES, "composer_events.passes", "composer.core.passes"),
    ("Algorithm", "composer_events.algorithm", "composer composer.core composer.core.algorithm"),
    ("Callback", "composer_events.callback", "composer composer.core composer.core.callback"),
    ("State", "composer_events.state", "composer composer.core composer.core.state"),
    ("DataSpec", "composer_events.data_spec", "composer composer.core composer.core.data_spec"),
    ("ensure_data_spec", "composer_events.data_spec", "composer.core composer.core.data_spec"),
    ("default_split_batch", "composer_events.data_spec", "composer.core.data_spec"),
    ("Evaluator", "composer_events.evaluator", "composer composer.core composer.core.evaluator"),
    ("ensure_evaluator", "composer_events.evaluator", "composer.core composer.core.evaluator"),
    ("evaluate_periodically", "composer_events.intervals", "composer.core composer.core.evaluator"),
    ("validate_eval_automicrobatching", "composer_events.evaluator", "composer.core composer.core.evaluator"),
    ("Precision get_precision_context", "composer_dist.devices", "composer.core composer.core.precision"),
    ("Serializable", "composer_time", "composer_events.serializable composer.core composer.core.serializable"),
    ("Batch JSON Dataset MemoryFormat TrainerMode", "composer_events.types", "composer.core composer.core.types"),
    ("PyTorchScheduler BreakEpochException", "composer_events.types", "composer.core composer.core.types"),
    ("Logger", "composer_events.logger", "composer composer.loggers composer.loggers.logger"),
    ("format_log_data_value", "composer_events.logger_destination", "composer.loggers.logger"),
    (
        "LoggerDestination",
        "composer_events.logger_destination",
        "composer.loggers composer.loggers.logger_destination",
    ),
    ("CometMLLogger", "composer.loggers.cometml_logger", "composer.loggers"),
    ("ConsoleLogger", "composer.loggers.console_logger", "composer.loggers"),
    ("FileLogger", "composer.loggers.file_logger", "composer.loggers"),
    ("InMemoryLogger", "composer.loggers.in_memory_logger", "composer.loggers"),
    ("MLFlowLogger", "composer.loggers.mlflow_logger", "composer.loggers"),
    ("MosaicMLLogger", "composer.loggers.mosaicml_logger", "composer.loggers"),
    ("NeptuneLogger", "composer.loggers.neptune_logger", "composer.loggers"),
    ("SlackLogger", "composer.loggers.slack_logger", "composer.loggers"),
    ("TensorboardLogger", "composer.loggers.tensorboard_logger", "composer.loggers"),
    ("WandBLogger", "composer.loggers.wandb_logger", "composer.loggers"),
    ("ProgressBarLogger", "composer.loggers.progress_bar_logger", "composer.loggers"),
    ("Profiler", "composer.profiler.profiler", "composer.profiler"),
    ("ProfilerAction", "composer_events.event", "composer.profiler composer.profiler.profiler_action"),
    ("cyclic_schedule", "composer.profiler.profiler_schedule", "composer.profiler"),
    ("Marker", "composer.profiler.marker", "composer.profiler"),
    ("TraceHandler", "composer.profiler.trace_handler", "composer.profiler"),
    ("JSONTraceHandler", "composer.profiler.json_trace_handler", "composer.profiler"),
    ("EventRecorder", "composer.profiler.event_recorder", "composer.profiler"),
    ("SystemProfiler", "composer.profiler.system_profiler", "composer.profiler"),
    ("TorchProfiler", "composer.profiler.torch_profiler", "composer.profiler"),
    (
        "ExportFormat Transform export_for_inference export_with_logger quantize_dynamic",
        "composer.utils.inference",
        "composer.utils",
    ),
    ("ComposerModel", "composer_models", "composer composer.models composer.models.base"),
    (
        "ComposerClassifier",
        "composer_models",
        "composer.models composer.models.tasks composer.models.tasks.classification",
    ),
    ("Initializer", "composer_models", "composer.models composer.models.initializers"),
    ("composer_resnet composer_timm mnist_model ComposerGPT", "composer_models", "composer.models"),
    (
        "HuggingFaceModel write_huggingface_pretrained_from_composer_checkpoint",
        "composer_hf",
        "composer.models composer.models.huggingface",
    ),
    (
        "filter_state_dict_peft maybe_get_underlying_model get_hf_config_from_composer_state_dict "
        "get_peft_config_from_composer_state_dict",
        "composer_hf",
        "composer.models.huggingface",
    ),
    ("HuggingFaceCheckpointer", "composer_hf", "composer.callbacks composer.callbacks.hf_checkpointer"),
    ("Trainer", "composer.trainer.trainer", "composer composer.trainer"),
    ("__version__", "composer._version", "composer"),
    (
        "DiceLoss binary_cross_entropy_with_logits soft_cross_entropy loss_registry",
        "composer_models",
        "composer.loss composer.loss.loss",
    ),
    (
        "infer_target_type ensure_targets_one_hot check_for_index_targets",
        "composer_models",
        "composer.loss.utils",
    ),
    ("MIoU Dice CrossEntropy LossMetric", "composer_models", "composer.metrics composer.metrics.metrics"),
    ("MAP", "composer_models", "composer.metrics composer.metrics.map"),
    (
        "BinaryF1Score LanguageCrossEntropy LanguagePerplexity MaskedAccuracy",
        "composer_models",
        "composer.metrics composer.metrics.nlp",
    ),
    (OLD_PICKLES, "composer_models.nlp_metrics", "composer.metrics.nlp"),
    ("DecoupledSGDW DecoupledAdamW", "composer_optim", "composer.optim composer.optim.decoupled_weight_decay"),
    ("Muon", "composer_optim", "composer.optim"),
    (
        f"{SCHEDULERS} ComposerScheduler compile_composer_scheduler",
        "composer_optim",
        "composer.optim composer.optim.scheduler",
    ),
    ("Device", "composer_dist.devices", "composer.devices composer.devices.device"),
    ("DeviceCPU", "composer_dist.devices", "composer.devices composer.devices.device_cpu"),
    ("DeviceGPU", "composer_dist.devices", "composer.devices composer.devices.device_gpu"),
    ("DeviceMPS", "composer_dist.devices", "composer.devices composer.devices.device_mps"),
    ("DeviceTPU", "composer_dist.devices", "composer.devices composer.devices.device_tpu"),
    ("DeviceHPU", "composer_dist.devices", "composer.devices composer.devices.device_hpu"),
    ("DeviceNeuron", "composer_dist.devices", "composer.devices composer.devices.device_neuron"),
    (
        "get_device is_xla_installed is_hpu_installed",
        "composer_dist.devices",
        "composer.utils composer.utils.device",
    ),
    ("batch_get batch_set", "composer_events.batches", "composer.utils composer.utils.batch_helpers"),
    (
        "seed_context configure_deterministic_mode get_random_seed seed_all get_rng_state load_rng_state MAX_SEED",
        "composer_dist.reproducibility",
        "composer.utils.reproducibility",
    ),
    ("StringEnum", "composer_time", "composer.utils composer.utils.string_enum"),
    (
        "ensure_tuple map_collection IteratorFileStream",
        "composer_events.batches",
        "composer.utils composer.utils.iter_helpers",
    ),
    ("iterate_with_callback", "composer_events.batches", "composer.utils.iter_helpers"),
    ("model_eval_mode", "composer_models", "composer.utils composer.utils.misc"),
    ("is_notebook", "composer.utils.notebook", "composer.utils composer.utils.misc"),
    ("ParallelismType", "composer_events.parallelism", "composer_events composer.utils composer.utils.misc"),
    (
        "FSDPConfig FSDP2Config TPConfig ParallelismConfig",
        "composer_fsdp.config",
        "composer_fsdp composer.utils composer.utils.parallelism",
    ),
    (
        "parallelize_composer_model parallelize_model",
        "composer_fsdp.sharding",
        "composer_fsdp composer.distributed composer.distributed.prepare_distributed",
    ),
    (
        "prepare_fsdp_module prepare_tp_module",
        "composer_fsdp.sharding",
        "composer.distributed composer.distributed.dist_strategy composer.distributed.mosaic_parallelism",
    ),
    (
        "BACKWARD_PREFETCH_MAP SHARDING_MAP get_mixed_precision",
        "composer_fsdp.parse",
        "composer.distributed.mosaic_parallelism",
    ),
    ("meta_safe_apply", "composer_fsdp.meta_init", "composer.distributed.meta_safe_apply"),
    ("apply_fully_shard prepare_fully_shard", "composer_fsdp.sharding", "composer.distributed.fsdp2"),
    (
        "get_summon_params_fn",
        "composer_fsdp.summon",
        "composer_fsdp composer.distributed composer.distributed.shared_utils",
    ),
    ("warning_on_one_line", "composer_events.warnings", "composer.utils.misc"),
    ("import_object", "composer.utils.import_helpers", "composer.utils"),
    ("clean_stale_shared_memory", "composer_dist.stale_memory", "composer.datasets"),
    ("retry", "composer_checkpoint.stores.base", "composer.utils composer.utils.retrying"),
    ("CheckpointSaver", "composer_checkpoint.saver", "composer.callbacks composer.callbacks.checkpoint_saver"),
    ("LoadCheckpoint", "composer_checkpoint.loader", "composer.callbacks composer.callbacks.load_checkpoint"),
    ("load_checkpoint", "composer_checkpoint.loader", "composer.utils composer.utils.checkpoint"),
    ("save_checkpoint", "composer_checkpoint.state", "composer.utils composer.utils.checkpoint"),
    ("glob_filter", "composer_checkpoint.ignore_keys", "composer.utils.checkpoint"),
    ("safe_torch_load", "composer_checkpoint.files", "composer.utils.checkpoint"),
    ("PartialFilePath", "composer_checkpoint.names", "composer.utils.checkpoint"),
    ("create_interval_scheduler", "composer_events.intervals", "composer.callbacks.checkpoint_saver"),
    ("is_model_deepspeed", "composer_dist.wrapping", "composer_dist composer.utils composer.utils.misc"),
    (
        "ReplacementFunction replace_module_classes count_module_instances update_params_in_optimizer",
        "composer_algorithms.module_surgery",
        "composer.utils.module_surgery",
    ),
    (
        "DDPSyncStrategy ddp_sync_context prepare_ddp_module",
        "composer_dist",
        "composer.distributed composer.distributed.dist_strategy",
    ),
    ("scale_pytorch_scheduler", "composer_optim", "composer.trainer._scale_schedule"),
    ("create_interval_scheduler", "composer_events.intervals", "composer.utils composer.utils.misc"),
    ("get_free_tcp_port", "composer_dist.env", "composer.utils composer.utils.misc"),
    ("STR_TO_DTYPE", "composer_dist.devices", "composer.utils composer.utils.misc"),
    (
        "partial_format",
        "composer_events.formatting",
        "composer.utils composer.utils.misc composer.utils.file_helpers",
    ),
    (
        "format_name_with_dist format_name_with_dist_and_time",
        "composer_events.formatting",
        "composer.utils composer.utils.file_helpers",
    ),
    ("is_model_ddp", "composer_dist.wrapping", "composer_dist composer.utils.misc"),
    ("is_model_fsdp is_model_fsdp2", "composer_dist.wrapping", "composer_dist composer.utils composer.utils.misc"),
    (
        "extract_hparams convert_nested_dict_to_flat_dict convert_flat_dict_to_nested_dict",
        "composer_events.hparams",
        "composer.utils composer.utils.auto_log_hparams",
    ),
    ("VersionedDeprecationWarning", "composer_events.warnings", "composer.utils composer.utils.warnings"),
    ("MissingConditionalImportError", "composer_models", "composer.utils composer.utils.import_helpers"),
    ("get_global_rank get_world_size get_sampler barrier", "composer_dist.dist", "composer.utils.dist"),
    (
        "EMA",
        "composer_algorithms",
        "composer_algorithms.ema composer.algorithms composer.algorithms.ema composer.algorithms.ema.ema",
    ),
    (
        "compute_ema",
        "composer_algorithms.functional",
        "composer.functional composer.algorithms.ema composer.algorithms.ema.ema",
    ),
    ("EMAParameters get_model_context_manager", "composer_algorithms.ema", "composer.algorithms.ema.ema"),
    ("MuP", "composer_algorithms.mup", "composer_algorithms composer.algorithms"),
    (
        "LogitSoftcap QKNorm SquaredReLU ValueResidual ZeroInit",
        "composer_algorithms.transformer_surgery",
        "composer_algorithms composer.algorithms",
    ),
    (
        "apply_logit_softcap apply_qk_norm apply_squared_relu apply_value_residual apply_zero_init",
        "composer_algorithms.transformer_surgery",
        "composer_algorithms.functional composer.functional",
    ),
    ("AlternatingFlip", "composer_algorithms.alternating_flip", "composer_algorithms composer.algorithms"),
    (
        "alternating_flip_batch",
        "composer_algorithms.alternating_flip",
        "composer_algorithms.functional composer.functional",
    ),
    ("MixUpOrCutMix", "composer_algorithms.cutmix", "composer_algorithms composer.algorithms"),
    (
        "AttentionWindowWarmup",
        "composer_algorithms.attention_window",
        "composer_algorithms composer.algorithms",
    ),
    (
        "attention_window",
        "composer_algorithms.attention_window",
        "composer_algorithms.functional composer.functional",
    ),
    ("MultiViewEval", "composer_algorithms.multi_view_eval", "composer_algorithms composer.algorithms"),
    (
        "multi_view_forward",
        "composer_algorithms.multi_view_eval",
        "composer_algorithms.functional composer.functional",
    ),
    ("FusedCrossEntropy", "composer_algorithms.fused_cross_entropy", "composer_algorithms composer.algorithms"),
    (
        "apply_fused_cross_entropy",
        "composer_algorithms.fused_cross_entropy",
        "composer_algorithms.functional composer.functional",
    ),
    ("DiracInit", "composer_algorithms.dirac_init", "composer_algorithms composer.algorithms"),
    ("apply_dirac_init", "composer_algorithms.dirac_init", "composer_algorithms.functional composer.functional"),
    ("WhiteningInit", "composer_algorithms.whitening_init", "composer_algorithms composer.algorithms"),
    (
        "apply_whitening_init",
        "composer_algorithms.whitening_init",
        "composer_algorithms.functional composer.functional",
    ),
    ("UntiedHead", "composer_algorithms.untied_head", "composer_algorithms composer.algorithms"),
    ("apply_untied_head", "composer_algorithms.untied_head", "composer_algorithms.functional composer.functional"),
    ("ZLoss", "composer_algorithms.z_loss", "composer_algorithms composer.algorithms"),
    ("z_loss", "composer_algorithms.z_loss", "composer_algorithms.functional composer.functional"),
    (
        "MultiTokenPrediction",
        "composer_algorithms.multi_token_prediction",
        "composer_algorithms composer.algorithms",
    ),
    (
        "apply_multi_token_prediction multi_token_loss",
        "composer_algorithms.multi_token_prediction",
        "composer_algorithms.functional composer.functional",
    ),
    ("post_hoc_ema", "composer_algorithms.ema", "composer_algorithms.functional composer.functional"),
    ("apply_mup", "composer_algorithms.mup", "composer_algorithms.functional composer.functional"),
    (
        "MixUp",
        "composer_algorithms",
        "composer_algorithms.mixup composer.algorithms composer.algorithms.mixup composer.algorithms.mixup.mixup",
    ),
    (
        "mixup_batch",
        "composer_algorithms.functional",
        "composer.functional composer.algorithms.mixup composer.algorithms.mixup.mixup",
    ),
    (
        "LabelSmoothing",
        "composer_algorithms",
        "composer_algorithms.label_smoothing composer.algorithms composer.algorithms.label_smoothing "
        "composer.algorithms.label_smoothing.label_smoothing",
    ),
    (
        "smooth_labels",
        "composer_algorithms.functional",
        "composer.functional composer.algorithms.label_smoothing composer.algorithms.label_smoothing.label_smoothing",
    ),
    (
        "AugMix",
        "composer_algorithms.augmix",
        "composer_algorithms composer.algorithms composer.algorithms.augmix composer.algorithms.augmix.augmix",
    ),
    (
        "AugmentAndMixTransform",
        "composer_algorithms.augmix",
        "composer_algorithms composer.algorithms composer.algorithms.augmix composer.algorithms.augmix.augmix",
    ),
    (
        "augmix_image",
        "composer_algorithms.augmix",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.augmix composer.algorithms.augmix.augmix",
    ),
    (
        "ColOut",
        "composer_algorithms.colout",
        "composer_algorithms composer.algorithms composer.algorithms.colout composer.algorithms.colout.colout",
    ),
    (
        "ColOutTransform",
        "composer_algorithms.colout",
        "composer_algorithms composer.algorithms composer.algorithms.colout composer.algorithms.colout.colout",
    ),
    (
        "colout_batch",
        "composer_algorithms.colout",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.colout composer.algorithms.colout.colout",
    ),
    (
        "CutMix",
        "composer_algorithms.cutmix",
        "composer_algorithms composer.algorithms composer.algorithms.cutmix composer.algorithms.cutmix.cutmix",
    ),
    (
        "cutmix_batch",
        "composer_algorithms.cutmix",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.cutmix composer.algorithms.cutmix.cutmix",
    ),
    (
        "CutOut",
        "composer_algorithms.cutout",
        "composer_algorithms composer.algorithms composer.algorithms.cutout composer.algorithms.cutout.cutout",
    ),
    (
        "cutout_batch",
        "composer_algorithms.cutout",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.cutout composer.algorithms.cutout.cutout",
    ),
    (
        "GradientClipping",
        "composer_algorithms.gradient_clipping",
        "composer_algorithms composer.algorithms "
        "composer.algorithms.gradient_clipping composer.algorithms.gradient_clipping.gradient_clipping",
    ),
    (
        "apply_gradient_clipping",
        "composer_algorithms.gradient_clipping",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.gradient_clipping composer.algorithms.gradient_clipping.gradient_clipping",
    ),
    (
        "LayerFreezing",
        "composer_algorithms.layer_freezing",
        "composer_algorithms composer.algorithms "
        "composer.algorithms.layer_freezing composer.algorithms.layer_freezing.layer_freezing",
    ),
    (
        "freeze_layers",
        "composer_algorithms.layer_freezing",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.layer_freezing composer.algorithms.layer_freezing.layer_freezing",
    ),
    (
        "ProgressiveResizing",
        "composer_algorithms.progressive_resizing",
        "composer_algorithms composer.algorithms "
        "composer.algorithms.progressive_resizing composer.algorithms.progressive_resizing.progressive_resizing",
    ),
    (
        "resize_batch",
        "composer_algorithms.progressive_resizing",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.progressive_resizing composer.algorithms.progressive_resizing.progressive_resizing",
    ),
    (
        "RandAugment",
        "composer_algorithms.randaugment",
        "composer_algorithms composer.algorithms "
        "composer.algorithms.randaugment composer.algorithms.randaugment.randaugment",
    ),
    (
        "RandAugmentTransform",
        "composer_algorithms.randaugment",
        "composer_algorithms composer.algorithms "
        "composer.algorithms.randaugment composer.algorithms.randaugment.randaugment",
    ),
    (
        "randaugment_image",
        "composer_algorithms.randaugment",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.randaugment composer.algorithms.randaugment.randaugment",
    ),
    (
        "SAM",
        "composer_algorithms.sam",
        "composer_algorithms composer.algorithms composer.algorithms.sam composer.algorithms.sam.sam",
    ),
    (
        "SAMOptimizer",
        "composer_algorithms.sam",
        "composer.algorithms.sam composer.algorithms.sam.sam",
    ),
    (
        "SelectiveBackprop",
        "composer_algorithms.selective_backprop",
        "composer_algorithms composer.algorithms "
        "composer.algorithms.selective_backprop composer.algorithms.selective_backprop.selective_backprop",
    ),
    (
        "select_using_loss",
        "composer_algorithms.selective_backprop",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.selective_backprop composer.algorithms.selective_backprop.selective_backprop",
    ),
    (
        "should_selective_backprop",
        "composer_algorithms.selective_backprop",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.selective_backprop composer.algorithms.selective_backprop.selective_backprop",
    ),
    (
        "SeqLengthWarmup",
        "composer_algorithms.seq_length_warmup",
        "composer_algorithms composer.algorithms "
        "composer.algorithms.seq_length_warmup composer.algorithms.seq_length_warmup.seq_length_warmup",
    ),
    (
        "set_batch_sequence_length",
        "composer_algorithms.seq_length_warmup",
        "composer_algorithms.functional composer.functional "
        "composer.algorithms.seq_length_warmup composer.algorithms.seq_length_warmup.seq_length_warmup",
    ),
    (
        "SWA",
        "composer_algorithms.swa",
        "composer_algorithms composer.algorithms composer.algorithms.swa composer.algorithms.swa.swa",
    ),
    (
        "AGC",
        "composer_algorithms.gradient_clipping",
        "composer_algorithms composer.algorithms",
    ),
    (
        "apply_agc",
        "composer_algorithms.gradient_clipping",
        "composer_algorithms.functional composer.functional",
    ),
    (
        "cutmix",
        "composer_algorithms.cutmix",
        "composer_algorithms.functional composer.functional",
    ),
    (
        "selective_backprop",
        "composer_algorithms.selective_backprop",
        "composer_algorithms.functional composer.functional",
    ),
    (
        "image_as_type map_pillow_function",
        "composer_algorithms.augmentation",
        "composer.algorithms.utils composer.algorithms.utils.augmentation_common",
    ),
    (
        "augmentation_sets",
        "composer_algorithms.augmentation",
        "composer.algorithms.utils composer.algorithms.utils.augmentation_primitives",
    ),
    (
        "autocontrast brightness brightness_original color color_original contrast contrast_original equalize "
        "posterize rotate sharpness sharpness_original shear_x shear_y solarize translate_x translate_y "
        "AugmentationFunction",
        "composer_algorithms.augmentation",
        "composer.algorithms.utils.augmentation_primitives",
    ),
    (
        "add_vision_dataset_transform",
        "composer_algorithms.dataset_transforms",
        "composer_algorithms composer.utils composer.utils.misc",
    ),
    (
        "get_model_state_dict get_optim_state_dict get_metadata_state_dict get_resumption_state_dict",
        "composer_checkpoint.modular.state_dict",
        "composer_checkpoint.modular composer.checkpoint composer.checkpoint.state_dict",
    ),
    (
        "fsdp_get_optim_state_dict fsdp_state_dict_type_context get_fsdp_full_optim_state_dict "
        "get_fsdp_sharded_optim_state_dict",
        "composer_checkpoint.modular.state_dict_types",
        "composer_checkpoint.modular composer.core.state",
    ),
    (
        "save_checkpoint_to_disk save_model_to_disk save_optim_to_disk save_resumption_state_to_disk "
        "save_composer_metadata_to_disk save_state_dict_to_disk CheckpointSaveOptions",
        "composer_checkpoint.modular.save",
        "composer_checkpoint.modular composer.checkpoint composer.checkpoint.save",
    ),
    (
        "load_checkpoint load_model_checkpoint load_optim_checkpoint load_resumption_checkpoint CheckpointLoadOptions",
        "composer_checkpoint.modular.load",
        "composer_checkpoint.modular composer.checkpoint composer.checkpoint.load",
    ),
    (
        "download_monolithic_checkpoint",
        "composer_checkpoint.remote.fetch",
        "composer_checkpoint.modular composer.checkpoint composer.checkpoint.download",
    ),
    (
        "upload_file",
        "composer_checkpoint.remote.fetch",
        "composer_checkpoint.modular composer.checkpoint composer.checkpoint.upload",
    ),
    (
        "CliCompressor CompressorNotFound KNOWN_COMPRESSORS get_compressor is_compressed_pt",
        "composer_checkpoint.formats.archives",
        "composer.utils composer.utils.compression",
    ),
    (
        "ensure_folder_has_no_conflicting_files ensure_folder_is_empty",
        "composer_checkpoint.save_folder",
        "composer.utils composer.utils.file_helpers",
    ),
    (
        "create_symlink_file extract_path_from_symlink get_file",
        "composer_checkpoint.remote.fetch",
        "composer.utils composer.utils.file_helpers",
    ),
    ("is_uri parse_uri", "composer_checkpoint.stores.base", "composer.utils composer.utils.file_helpers"),
    (
        "list_remote_objects maybe_create_object_store_from_uri validate_credentials",
        "composer_checkpoint.stores.opening",
        "composer.utils composer.utils.file_helpers",
    ),
    ("is_tar", "composer_checkpoint.names", "composer.utils composer.utils.file_helpers"),
    ("PartialFilePath", "composer_checkpoint.names", "composer.utils composer.utils.checkpoint"),
    ("safe_torch_load", "composer_checkpoint.files", "composer.utils composer.utils.checkpoint"),
    (
        "ObjectStore ObjectStoreTransientError",
        "composer_checkpoint.stores.base",
        "composer.utils composer.utils.object_store composer.utils.object_store.object_store",
    ),
    (
        "S3ObjectStore",
        "composer_checkpoint.stores.cloud",
        "composer.utils composer.utils.object_store composer.utils.object_store.s3_object_store "
        "composer.utils.object_store.utils composer.utils.file_helpers",
    ),
    (
        "GCSObjectStore",
        "composer_checkpoint.stores.cloud",
        "composer.utils composer.utils.object_store composer.utils.object_store.gcs_object_store "
        "composer.utils.file_helpers",
    ),
    (
        "OCIObjectStore",
        "composer_checkpoint.stores.cloud",
        "composer.utils composer.utils.object_store composer.utils.object_store.oci_object_store "
        "composer.utils.file_helpers",
    ),
    (
        "SFTPObjectStore",
        "composer_checkpoint.stores.sftp",
        "composer.utils composer.utils.object_store composer.utils.object_store.sftp_object_store",
    ),
    (
        "LibcloudObjectStore",
        "composer_checkpoint.stores.cloud",
        "composer.utils composer.utils.object_store composer.utils.object_store.libcloud_object_store "
        "composer.utils.file_helpers",
    ),
    (
        "MLFlowObjectStore",
        "composer_checkpoint.stores.databricks",
        "composer.utils composer.utils.object_store composer.utils.object_store.mlflow_object_store "
        "composer.utils.file_helpers",
    ),
    (
        "UCObjectStore",
        "composer_checkpoint.stores.databricks",
        "composer.utils composer.utils.object_store composer.utils.object_store.uc_object_store "
        "composer.utils.file_helpers",
    ),
    ("FsspecObjectStore", "composer_checkpoint.stores.fsspec", "composer.utils composer.utils.object_store"),
    ("AzureObjectStore", "composer_checkpoint.stores.cloud", "composer.utils.object_store"),
    (
        "build_remote_backend",
        "composer_checkpoint.stores.opening",
        "composer.utils composer.utils.object_store composer.utils.object_store.utils",
    ),
    ("RemoteUploaderDownloader", "composer_checkpoint.remote.logger", "composer.loggers"),
    (
        "RemoteUploaderDownloader maybe_create_remote_uploader_downloader_from_uri",
        "composer_checkpoint.remote.logger",
        "composer.loggers.remote_uploader_downloader",
    ),
    (
        "maybe_create_remote_uploader_downloader_from_uri",
        "composer_checkpoint.remote.logger",
        "composer.utils composer.utils.file_helpers",
    ),
    ("get_save_filename", "composer_checkpoint.state", "composer.utils composer.utils.checkpoint"),
    ("load_sharded_checkpoint", "composer_checkpoint.loader", "composer.utils.checkpoint"),
    ("download_checkpoint", "composer_checkpoint.resume", "composer.utils.checkpoint"),
    ("download_object_or_file", "composer_checkpoint.remote.fetch", "composer.utils.checkpoint"),
    (
        "dist_cp_load FileSystemReaderWithValidation DistCPObjectStoreReader",
        "composer_checkpoint.sharded.save",
        "composer.utils.checkpoint",
    ),
    (
        "RemoteUploader RemoteFilesExistingCheckStatus",
        "composer_checkpoint.remote.upload",
        "composer.utils composer.utils.remote_uploader",
    ),
    ("NoEffectWarning NotIntendedUseWarning", "composer_events.warnings", "composer.algorithms.warnings"),
    (
        "Alibi",
        "composer_algorithms.alibi",
        "composer_algorithms composer.algorithms composer.algorithms.alibi composer.algorithms.alibi.alibi",
    ),
    (
        "BlurPool",
        "composer_algorithms.blurpool",
        "composer_algorithms composer.algorithms composer.algorithms.blurpool composer.algorithms.blurpool.blurpool",
    ),
    (
        "ChannelsLast",
        "composer_algorithms.channels_last",
        "composer_algorithms composer.algorithms composer.algorithms.channels_last "
        "composer.algorithms.channels_last.channels_last",
    ),
    (
        "Factorize",
        "composer_algorithms.factorize",
        "composer_algorithms composer.algorithms composer.algorithms.factorize composer.algorithms.factorize.factorize",
    ),
    (
        "GatedLinearUnits",
        "composer_algorithms.gated_linear_units",
        "composer_algorithms composer.algorithms composer.algorithms.gated_linear_units "
        "composer.algorithms.gated_linear_units.gated_linear_units",
    ),
    (
        "GhostBatchNorm",
        "composer_algorithms.ghost_batchnorm",
        "composer_algorithms composer.algorithms composer.algorithms.ghost_batchnorm "
        "composer.algorithms.ghost_batchnorm.ghost_batchnorm",
    ),
    (
        "GyroDropout",
        "composer_algorithms.gyro_dropout",
        "composer_algorithms composer.algorithms composer.algorithms.gyro_dropout "
        "composer.algorithms.gyro_dropout.gyro_dropout",
    ),
    (
        "LowPrecisionGroupNorm",
        "composer_algorithms.low_precision_groupnorm",
        "composer_algorithms composer.algorithms composer.algorithms.low_precision_groupnorm "
        "composer.algorithms.low_precision_groupnorm.low_precision_groupnorm",
    ),
    (
        "LowPrecisionLayerNorm",
        "composer_algorithms.low_precision_layernorm",
        "composer_algorithms composer.algorithms composer.algorithms.low_precision_layernorm "
        "composer.algorithms.low_precision_layernorm.low_precision_layernorm",
    ),
    (
        "NoOpModel",
        "composer_algorithms.no_op_model",
        "composer_algorithms composer.algorithms composer.algorithms.no_op_model "
        "composer.algorithms.no_op_model.no_op_model",
    ),
    (
        "SqueezeExcite",
        "composer_algorithms.squeeze_excite",
        "composer_algorithms composer.algorithms composer.algorithms.squeeze_excite "
        "composer.algorithms.squeeze_excite.squeeze_excite",
    ),
    (
        "SqueezeExcite2d SqueezeExciteConv2d",
        "composer_algorithms.squeeze_excite",
        "composer.algorithms composer.algorithms.squeeze_excite composer.algorithms.squeeze_excite.squeeze_excite",
    ),
    (
        "StochasticDepth",
        "composer_algorithms.stochastic_depth",
        "composer_algorithms composer.algorithms composer.algorithms.stochastic_depth "
        "composer.algorithms.stochastic_depth.stochastic_depth",
    ),
    (
        "WeightStandardization",
        "composer_algorithms.weight_standardization",
        "composer_algorithms composer.algorithms composer.algorithms.weight_standardization "
        "composer.algorithms.weight_standardization.weight_standardization",
    ),
    (
        "apply_alibi",
        "composer_algorithms.alibi",
        "composer_algorithms.functional composer.functional composer.algorithms.alibi composer.algorithms.alibi.alibi",
    ),
    (
        "apply_blurpool",
        "composer_algorithms.blurpool",
        "composer_algorithms.functional composer.functional composer.algorithms.blurpool "
        "composer.algorithms.blurpool.blurpool",
    ),
    (
        "apply_channels_last",
        "composer_algorithms.channels_last",
        "composer_algorithms.functional composer.functional composer.algorithms.channels_last "
        "composer.algorithms.channels_last.channels_last",
    ),
    (
        "apply_factorization",
        "composer_algorithms.factorize",
        "composer_algorithms.functional composer.functional composer.algorithms.factorize "
        "composer.algorithms.factorize.factorize",
    ),
    (
        "apply_gated_linear_units",
        "composer_algorithms.gated_linear_units",
        "composer_algorithms.functional composer.functional composer.algorithms.gated_linear_units "
        "composer.algorithms.gated_linear_units.gated_linear_units",
    ),
    (
        "apply_ghost_batchnorm",
        "composer_algorithms.ghost_batchnorm",
        "composer_algorithms.functional composer.functional composer.algorithms.ghost_batchnorm "
        "composer.algorithms.ghost_batchnorm.ghost_batchnorm",
    ),
    (
        "apply_gyro_dropout",
        "composer_algorithms.gyro_dropout",
        "composer_algorithms.functional composer.functional composer.algorithms.gyro_dropout "
        "composer.algorithms.gyro_dropout.gyro_dropout",
    ),
    (
        "apply_low_precision_groupnorm",
        "composer_algorithms.low_precision_groupnorm",
        "composer_algorithms.functional composer.functional composer.algorithms.low_precision_groupnorm "
        "composer.algorithms.low_precision_groupnorm.low_precision_groupnorm",
    ),
    (
        "apply_low_precision_layernorm",
        "composer_algorithms.low_precision_layernorm",
        "composer_algorithms.functional composer.functional composer.algorithms.low_precision_layernorm "
        "composer.algorithms.low_precision_layernorm.low_precision_layernorm",
    ),
    (
        "apply_squeeze_excite",
        "composer_algorithms.squeeze_excite",
        "composer_algorithms.functional composer.functional composer.algorithms.squeeze_excite "
        "composer.algorithms.squeeze_excite.squeeze_excite",
    ),
    (
        "apply_stochastic_depth",
        "composer_algorithms.stochastic_depth",
        "composer_algorithms.functional composer.functional composer.algorithms.stochastic_depth "
        "composer.algorithms.stochastic_depth.stochastic_depth",
    ),
    (
        "apply_weight_standardization",
        "composer_algorithms.weight_standardization",
        "composer_algorithms.functional composer.functional composer.algorithms.weight_standardization "
        "composer.algorithms.weight_standardization.weight_standardization",
    ),
    (
        "BlurConv2d BlurMaxPool2d BlurPool2d blur_2d blurmax_pool2d",
        "composer_algorithms.blurpool",
        "composer.algorithms.blurpool composer.algorithms.blurpool.blurpool_layers",
    ),
    (
        "LowRankSolution factorize_conv2d factorize_matrix",
        "composer_algorithms.factorize",
        "composer.algorithms.factorize composer.algorithms.factorize.factorize_core",
    ),
    (
        "FactorizedConv2d FactorizedLinear factorizing_could_speedup",
        "composer_algorithms.factorize",
        "composer.algorithms.factorize composer.algorithms.factorize.factorize_modules",
    ),
    (
        "LOG_NUM_CONV2D_REPLACEMENTS_KEY LOG_NUM_LINEAR_REPLACEMENTS_KEY",
        "composer_algorithms.factorize",
        "composer.algorithms.factorize composer.algorithms.factorize.factorize",
    ),
    (
        "BERTGatedFFOutput",
        "composer_algorithms.gated_linear_units",
        "composer.algorithms.gated_linear_units.gated_linear_unit_layers",
    ),
    (
        "GhostBatchNorm1d GhostBatchNorm2d GhostBatchNorm3d",
        "composer_algorithms.ghost_batchnorm",
        "composer.algorithms.ghost_batchnorm.ghost_batchnorm",
    ),
    (
        "GyroDropoutLayer",
        "composer_algorithms.gyro_dropout",
        "composer.algorithms.gyro_dropout composer.algorithms.gyro_dropout.gyro_dropout",
    ),
    (
        "LPLayerNorm",
        "composer_algorithms.low_precision_layernorm",
        "composer.algorithms.low_precision_layernorm.low_precision_layernorm",
    ),
    (
        "LPGroupNorm",
        "composer_algorithms.low_precision_groupnorm",
        "composer.algorithms.low_precision_groupnorm.low_precision_groupnorm",
    ),
    (
        "NoOpModelClass",
        "composer_algorithms.no_op_model",
        "composer.algorithms.no_op_model composer.algorithms.no_op_model.no_op_model",
    ),
    (
        "BlockStochasticModule make_resnet_bottleneck_stochastic",
        "composer_algorithms.stochastic_depth",
        "composer.algorithms.stochastic_depth.stochastic_layers",
    ),
    (
        "policy_registry",
        "composer_algorithms.alibi.attention_surgery_functions",
        "composer.algorithms.alibi.attention_surgery_functions "
        "composer.algorithms.alibi.attention_surgery_functions.utils",
    ),
    (
        "PolicyRegistry AlibiReplacementFunction",
        "composer_algorithms.alibi.attention_surgery_functions",
        "composer.algorithms.alibi.attention_surgery_functions.utils",
    ),
    (
        "register_alibi",
        "composer_algorithms.alibi.attention",
        "composer.algorithms.alibi.attention_surgery_functions.utils",
    ),
    (
        "zero_and_freeze_expand_position_embeddings",
        "composer_algorithms.alibi.attention",
        "composer.algorithms.alibi.attention_surgery_functions.utils",
    ),
    ("enlarge_mask _attn", "composer_algorithms.alibi.surgery", "composer.algorithms.alibi.gpt2_alibi"),
    (
        "configure_excepthook disable_env_report enable_env_report print_env",
        "composer.utils.collect_env",
        "composer.utils",
    ),
    ("describe_environment main", "composer.utils.collect_env", "composer.cli.collect_env"),
    ("get_composer_env_dict", "composer_events.hparams", "composer.utils composer.utils.collect_env"),
    (
        "MLFLOW_EXPERIMENT_ID_FORMAT_KEY MLFLOW_RUN_ID_FORMAT_KEY",
        "composer.utils.object_store.mlflow_object_store",
        "composer.utils composer.utils.object_store",
    ),
    ("LoggerDestination", "composer_events.logger_destination", "composer.loggers.logger"),
    ("add_vision_dataset_transform", "composer_algorithms.dataset_transforms", "composer.datasets.utils"),
    (
        "ReplacementFunction count_module_instances replace_module_classes update_params_in_optimizer",
        "composer_algorithms.module_surgery",
        "composer.utils.module_surgery",
    ),
]


def is_installed(owner):
    return find_spec(owner.partition(".")[0]) is not None


PATHS = [
    pytest.param(
        owner,
        f"{module}:{name}",
        id=f"{module}.{name}",
        marks=pytest.mark.skipif(not is_installed(owner), reason=f"{owner} comes with an extra"),
    )
    for names, owner, modules in IMPORT_MAP
    for name in names.split()
    for module in modules.split()
]
LAZY_FACES = [
    "composer",
    "composer.algorithms",
    "composer.checkpoint",
    "composer.core",
    "composer.core.state",
    "composer.core.types",
    "composer.devices",
    "composer.distributed",
    "composer.functional",
    "composer.loggers",
    "composer.loss",
    "composer.metrics",
    "composer.models",
    "composer.optim",
    "composer.utils",
    "composer.utils.object_store",
]


def in_a_fresh_interpreter(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(("owner", "path"), PATHS)
def test_each_import_path_gives_the_owners_object(owner, path):
    module, name = path.split(":")
    given = {}
    exec(f"from {module} import {name}", given)
    assert given[name] is getattr(import_module(owner), name)


@pytest.mark.parametrize(
    ("package", "name"),
    [("composer_dist", "dist"), ("composer_dist", "reproducibility"), ("composer_algorithms", "module_surgery")],
)
def test_a_module_that_users_patch_is_the_owners_module(package, name, monkeypatch):
    owner = import_module(f"{package}.{name}")
    given = {}
    exec(f"from composer.utils import {name} as a\nimport composer.utils.{name} as b", given)
    assert given["a"] is owner
    assert given["b"] is owner
    monkeypatch.setattr(f"composer.utils.{name}.something_new", 1, raising=False)
    assert owner.something_new == 1


@pytest.mark.parametrize("face", ["composer.utils.file_helpers", "composer.utils.object_store.utils"])
def test_a_store_that_is_patched_in_a_face_is_the_one_that_is_opened(face, monkeypatch):
    from composer.utils import build_remote_backend, maybe_create_object_store_from_uri

    import_module(face)
    with monkeypatch.context() as patched:
        patched.setattr(f"{face}.S3ObjectStore", dict)
        assert maybe_create_object_store_from_uri("s3://bucket/file") == {"bucket": "bucket"}
        assert build_remote_backend("s3", {"bucket": "other"}) == {"bucket": "other"}
    assert import_module("composer_checkpoint.stores.opening").S3ObjectStore.__name__ == "S3ObjectStore"


def test_what_uploads_use_is_patched_through_its_face(monkeypatch):
    uploads = import_module("composer.utils.remote_uploader")
    monkeypatch.setattr("composer.utils.remote_uploader.validate_credentials", len)
    assert uploads is import_module("composer_checkpoint.remote.upload")
    assert uploads.validate_credentials is len
    assert uploads.multiprocessing.get_context


def test_composer_exports_exactly_its_public_names():
    import composer

    assert sorted(composer.__all__) == [
        *["Algorithm", "Callback", "ComposerModel", "DataSpec", "Engine", "Evaluator", "Event", "Logger", "State"],
        *["Time", "TimeUnit", "Timestamp", "Trainer", "__version__"],
    ]


@pytest.mark.parametrize("face", LAZY_FACES)
def test_a_star_import_brings_every_public_name(face):
    given = {}
    exec(f"from {face} import *", given)
    assert set(import_module(face).__all__) == set(given) - {"__builtins__"}


@pytest.mark.parametrize("face", LAZY_FACES)
def test_a_face_has_no_public_name_that_the_import_map_lacks(face):
    rows = [(names, modules) for names, owner, modules in IMPORT_MAP if is_installed(owner)]
    mapped = {name for names, modules in rows for name in names.split() if face in modules.split()}
    whole_modules = {"dist", "module_surgery", "reproducibility"} if face == "composer.utils" else set()
    assert set(import_module(face).__all__) == mapped | whole_modules


def test_dir_lists_the_public_names_before_they_are_loaded():
    code = (
        "from importlib import import_module\n"
        f"for face in map(import_module, {LAZY_FACES!r}):\n"
        "    missing = set(face.__all__) - set(dir(face))\n"
        "    assert not missing, (face, missing)\n"
    )
    assert in_a_fresh_interpreter(code) == ""


@pytest.mark.parametrize("face", LAZY_FACES)
def test_a_script_that_looks_through_a_package_finds_its_names(face):
    """`vars(composer.callbacks)` had no class in it before one was used."""
    module = import_module(face)
    assert set(module.__all__) <= vars(module).keys()


PACKAGES = ["composer_time", "composer_events", "composer_dist", "composer_models", "composer_optim", "composer_fsdp"]
PACKAGES += ["composer_algorithms", "composer_checkpoint", "composer_hf"]


@pytest.mark.parametrize("name", [*LAZY_FACES, *PACKAGES])
def test_the_type_hints_of_public_classes_resolve(name):
    """`typing.get_type_hints(Trainer.__init__)`, as llm-foundry builds objects by, was a NameError."""
    module = pytest.importorskip(name)
    public = [getattr(module, each) for each in module.__all__]
    for each in public:
        if inspect.isclass(each) and each.__module__.startswith("composer"):
            typing.get_type_hints(each.__init__)


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    import composer

    assert composer.__version__ == version("composer-suite")


def test_submodules_are_reached_through_the_package_alone():
    code = "import composer; print(composer.core.event.Event.INIT.value, composer.utils.iter_helpers.ensure_tuple(1))"
    assert in_a_fresh_interpreter(code) == "init (1,)"


def test_every_module_is_an_attribute_of_the_package():
    code = (
        "import composer, pkgutil; modules = {one.name for one in pkgutil.iter_modules(composer.__path__)}; "
        "print([name for name in modules if not name.startswith('_') and not hasattr(composer, name)])"
    )
    assert in_a_fresh_interpreter(code) == "[]"


@pytest.mark.parametrize("name", ["composer.models.HuggingFaceModel", "composer.callbacks.HuggingFaceCheckpointer"])
def test_without_composer_hf_its_names_say_which_extra_brings_it(name):
    module, _, name = name.rpartition(".")
    code = (
        "import sys; sys.modules['composer_hf'] = None  # as if it were not there\n"
        f"try:\n    from {module} import {name}\nexcept ImportError as error:\n    print(error)"
    )
    assert "pip install 'composer-suite[hf]'" in in_a_fresh_interpreter(code)


def test_a_loaded_name_is_kept_in_the_module():
    import composer.core

    event = composer.core.Event
    assert vars(composer.core)["Event"] is event


def test_a_reloaded_face_gives_the_same_objects():
    import composer.core.engine

    before = composer.core.engine.Engine
    assert reload(composer.core.engine).Engine is before


def test_an_unknown_name_is_no_attribute():
    import composer.core

    with pytest.raises(AttributeError, match=r"module 'composer\.core' has no attribute 'Algoritm'"):
        _ = composer.core.Algoritm


def test_an_unknown_name_cannot_be_imported():
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from composer import Nothing")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("create_gpt2", "AutoModelForCausalLM"),
        ("GPT2Model", "AutoModelForCausalLM"),
        ("ComposerBERT", "AutoModelForMaskedLM"),
        ("BERTForClassification", "AutoModelForSequenceClassification"),
        ("ComposerResNet", "composer_resnet"),
        ("MNIST_Classifier", "mnist_model"),
        ("ComposerDeepLabV3", "torchvision"),
    ],
)
def test_a_model_of_the_former_zoo_says_what_to_use_now(name, hint):
    with pytest.raises(ImportError, match=rf"{name} is gone: .*{hint}"):
        exec(f"from composer.models import {name}")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("composer.metrics", "CrossEntropyLoss", "composer.metrics.CrossEntropy"),
        ("composer.metrics", "HFCrossEntropy", "composer.metrics.LanguageCrossEntropy"),
        ("composer.metrics", "Perplexity", "composer.metrics.LanguagePerplexity"),
        ("composer.metrics.metrics", "CrossEntropyLoss", "composer.metrics.CrossEntropy"),
        ("composer.metrics.nlp", "HFCrossEntropy", "composer.metrics.LanguageCrossEntropy"),
        ("composer.metrics.nlp", "Perplexity", "composer.metrics.LanguagePerplexity"),
        ("composer.loggers", "TQDMLogger", "composer.loggers.ProgressBarLogger"),
        ("composer.loggers", "ObjectStoreLogger", "composer.loggers.RemoteUploaderDownloader"),
        ("composer.algorithms", "FusedLayerNorm", "composer_algorithms.LowPrecisionLayerNorm"),
        (
            "composer.functional",
            "apply_fused_layernorm",
            "composer_algorithms.functional.apply_low_precision_layernorm",
        ),
        (
            "composer.algorithms.fused_layernorm",
            "apply_fused_layernorm",
            "composer_algorithms.functional.apply_low_precision_layernorm",
        ),
        ("composer.utils", "is_tpu_installed", "composer.utils.is_xla_installed"),
        ("composer.utils.device", "is_tpu_installed", "composer.utils.is_xla_installed"),
        (
            "composer.distributed.mosaic_parallelism",
            "backward_prefetch_map",
            "composer.distributed.mosaic_parallelism.BACKWARD_PREFETCH_MAP",
        ),
        (
            "composer.distributed.mosaic_parallelism",
            "sharding_map",
            "composer.distributed.mosaic_parallelism.SHARDING_MAP",
        ),
        ("composer.models.loss", "DiceLoss", "composer.loss.DiceLoss"),
        ("composer.models.loss", "binary_cross_entropy_with_logits", "composer.loss.binary_cross_entropy_with_logits"),
        ("composer.models.loss", "soft_cross_entropy", "composer.loss.soft_cross_entropy"),
        ("composer.models.loss", "loss_registry", "composer.loss.loss_registry"),
        ("composer.models.loss", "infer_target_type", "composer.loss.utils.infer_target_type"),
        ("composer.models.loss", "ensure_targets_one_hot", "composer.loss.utils.ensure_targets_one_hot"),
        ("composer.models.loss", "check_for_index_targets", "composer.loss.utils.check_for_index_targets"),
    ],
)
def test_an_old_name_warns_once_where_it_is_used_and_is_the_same_object(module, old, new):
    vars(import_module(module)).pop(old, None)  # as if nobody had asked for it yet
    new_module, _, new_name = new.rpartition(".")
    given = {}
    with pytest.warns(DeprecationWarning, match=rf"{module}.{old} is now called {new};") as caught:
        exec(f"from {module} import {old}\nfrom {module} import {old}", given)
    assert given[old] is getattr(import_module(new_module), new_name)
    assert [warning.filename for warning in caught] == ["<string>"]


@pytest.mark.parametrize(
    "statement",
    [
        "import composer",
        "import composer.core",
        "from composer.core import Algorithm, Callback, DataSpec, Evaluator, Event, State, Time, TrainerMode",
        "from composer import Engine, Logger",
        "from composer.core.types import JSON",
        "from composer.loggers import LoggerDestination",
        "import composer.algorithms, composer.functional, composer.metrics, composer.models, composer.optim",
    ],
)
def test_torch_is_not_imported_before_something_needs_it(statement):
    assert in_a_fresh_interpreter(f"{statement}\nimport sys; print('torch' in sys.modules)") == "False"


def test_importing_composer_loads_no_other_library_of_the_family():
    code = "import composer, sys; print(sorted(m for m in sys.modules if m.startswith('composer')))"
    assert in_a_fresh_interpreter(code) == "['composer', 'composer._former_modules', 'composer._lazy']"


def test_the_trainer_loads_no_library_that_is_slow_to_load_and_perhaps_not_needed():
    slow = "{'torchmetrics', 'torchvision', 'torch._dynamo', 'sympy', 'scipy'}"
    code = f"from composer import Trainer; import sys; print(sorted({slow} & set(sys.modules)))"
    assert in_a_fresh_interpreter(code) == "[]"


def test_a_notebook_is_a_kernel_and_a_terminal_is_none(monkeypatch):
    from types import SimpleNamespace

    from composer.utils import is_notebook

    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_notebook()
    for shell, expected in ((SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True), (None, False)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert is_notebook() is expected


def test_an_object_is_imported_by_its_name():
    from collections import OrderedDict

    from composer.utils import import_object

    assert import_object("collections:OrderedDict") is OrderedDict
    with pytest.raises(ValueError, match=r"name='collections\.OrderedDict' does not say what to import"):
        import_object("collections.OrderedDict")
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        import_object("collections:Nothing")


def test_warnings_can_be_written_on_one_line():
    from composer.utils.misc import warning_on_one_line

    code = f"import warnings; from {warning_on_one_line.__module__} import warning_on_one_line as one\n"
    code += "warnings.formatwarning = one; warnings.warn_explicit('It is late.', UserWarning, 'clock.py', 12)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr
    assert shown == "UserWarning: It is late. (source: clock.py:12)\n"
