"""Ranks, devices, seeds and small helpers."""

from typing import TYPE_CHECKING

from composer._former_modules import GONE, NO_TABLE, ONLY_TORCH_2
from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.utils.collect_env import configure_excepthook as configure_excepthook
    from composer.utils.collect_env import disable_env_report as disable_env_report
    from composer.utils.collect_env import enable_env_report as enable_env_report
    from composer.utils.collect_env import print_env as print_env
    from composer.utils.import_helpers import import_object as import_object
    from composer.utils.inference import ExportFormat as ExportFormat
    from composer.utils.inference import Transform as Transform
    from composer.utils.inference import export_for_inference as export_for_inference
    from composer.utils.inference import export_with_logger as export_with_logger
    from composer.utils.inference import quantize_dynamic as quantize_dynamic
    from composer.utils.notebook import is_notebook as is_notebook
    from composer.utils.object_store.mlflow_object_store import (
        MLFLOW_EXPERIMENT_ID_FORMAT_KEY as MLFLOW_EXPERIMENT_ID_FORMAT_KEY,
    )
    from composer.utils.object_store.mlflow_object_store import MLFLOW_RUN_ID_FORMAT_KEY as MLFLOW_RUN_ID_FORMAT_KEY
    from composer_algorithms import module_surgery as module_surgery
    from composer_algorithms.dataset_transforms import add_vision_dataset_transform as add_vision_dataset_transform
    from composer_checkpoint.files import safe_torch_load as safe_torch_load
    from composer_checkpoint.formats.archives import KNOWN_COMPRESSORS as KNOWN_COMPRESSORS
    from composer_checkpoint.formats.archives import CliCompressor as CliCompressor
    from composer_checkpoint.formats.archives import CompressorNotFound as CompressorNotFound
    from composer_checkpoint.formats.archives import get_compressor as get_compressor
    from composer_checkpoint.formats.archives import is_compressed_pt as is_compressed_pt
    from composer_checkpoint.loader import load_checkpoint as load_checkpoint
    from composer_checkpoint.names import PartialFilePath as PartialFilePath
    from composer_checkpoint.names import is_tar as is_tar
    from composer_checkpoint.remote.fetch import create_symlink_file as create_symlink_file
    from composer_checkpoint.remote.fetch import extract_path_from_symlink as extract_path_from_symlink
    from composer_checkpoint.remote.fetch import get_file as get_file
    from composer_checkpoint.remote.fetch import is_uri as is_uri
    from composer_checkpoint.remote.fetch import list_remote_objects as list_remote_objects
    from composer_checkpoint.remote.fetch import (
        maybe_create_object_store_from_uri as maybe_create_object_store_from_uri,
    )
    from composer_checkpoint.remote.fetch import parse_uri as parse_uri
    from composer_checkpoint.remote.fetch import validate_credentials as validate_credentials
    from composer_checkpoint.remote.logger import (
        maybe_create_remote_uploader_downloader_from_uri as maybe_create_remote_uploader_downloader_from_uri,
    )
    from composer_checkpoint.remote.upload import RemoteFilesExistingCheckStatus as RemoteFilesExistingCheckStatus
    from composer_checkpoint.remote.upload import RemoteUploader as RemoteUploader
    from composer_checkpoint.save_folder import (
        ensure_folder_has_no_conflicting_files as ensure_folder_has_no_conflicting_files,
    )
    from composer_checkpoint.save_folder import ensure_folder_is_empty as ensure_folder_is_empty
    from composer_checkpoint.state import get_save_filename as get_save_filename
    from composer_checkpoint.state import save_checkpoint as save_checkpoint
    from composer_checkpoint.stores import FsspecObjectStore as FsspecObjectStore
    from composer_checkpoint.stores import GCSObjectStore as GCSObjectStore
    from composer_checkpoint.stores import LibcloudObjectStore as LibcloudObjectStore
    from composer_checkpoint.stores import MLFlowObjectStore as MLFlowObjectStore
    from composer_checkpoint.stores import ObjectStore as ObjectStore
    from composer_checkpoint.stores import ObjectStoreTransientError as ObjectStoreTransientError
    from composer_checkpoint.stores import OCIObjectStore as OCIObjectStore
    from composer_checkpoint.stores import S3ObjectStore as S3ObjectStore
    from composer_checkpoint.stores import SFTPObjectStore as SFTPObjectStore
    from composer_checkpoint.stores import UCObjectStore as UCObjectStore
    from composer_checkpoint.stores.base import retry as retry
    from composer_checkpoint.stores.opening import build_remote_backend as build_remote_backend
    from composer_dist import dist as dist
    from composer_dist import reproducibility as reproducibility
    from composer_dist.devices import STR_TO_DTYPE as STR_TO_DTYPE
    from composer_dist.devices import get_device as get_device
    from composer_dist.devices import is_hpu_installed as is_hpu_installed
    from composer_dist.devices import is_xla_installed as is_xla_installed
    from composer_dist.env import get_free_tcp_port as get_free_tcp_port
    from composer_dist.wrapping import is_model_deepspeed as is_model_deepspeed
    from composer_dist.wrapping import is_model_fsdp as is_model_fsdp
    from composer_dist.wrapping import is_model_fsdp2 as is_model_fsdp2
    from composer_events.batches import IteratorFileStream as IteratorFileStream
    from composer_events.batches import batch_get as batch_get
    from composer_events.batches import batch_set as batch_set
    from composer_events.batches import ensure_tuple as ensure_tuple
    from composer_events.batches import map_collection as map_collection
    from composer_events.formatting import format_name_with_dist as format_name_with_dist
    from composer_events.formatting import format_name_with_dist_and_time as format_name_with_dist_and_time
    from composer_events.formatting import partial_format as partial_format
    from composer_events.hparams import convert_flat_dict_to_nested_dict as convert_flat_dict_to_nested_dict
    from composer_events.hparams import convert_nested_dict_to_flat_dict as convert_nested_dict_to_flat_dict
    from composer_events.hparams import extract_hparams as extract_hparams
    from composer_events.hparams import get_composer_env_dict as get_composer_env_dict
    from composer_events.intervals import create_interval_scheduler as create_interval_scheduler
    from composer_events.parallelism import ParallelismType as ParallelismType
    from composer_events.warnings import VersionedDeprecationWarning as VersionedDeprecationWarning
    from composer_fsdp.config import FSDP2Config as FSDP2Config
    from composer_fsdp.config import FSDPConfig as FSDPConfig
    from composer_fsdp.config import ParallelismConfig as ParallelismConfig
    from composer_fsdp.config import TPConfig as TPConfig
    from composer_models import MissingConditionalImportError as MissingConditionalImportError
    from composer_models import model_eval_mode as model_eval_mode
    from composer_time import StringEnum as StringEnum

__all__ = [
    "dist",
    "module_surgery",
    "reproducibility",
    "get_device",
    "is_xla_installed",
    "is_hpu_installed",
    "batch_get",
    "batch_set",
    "StringEnum",
    "ensure_tuple",
    "map_collection",
    "IteratorFileStream",
    "is_notebook",
    "is_model_deepspeed",
    "is_model_fsdp",
    "is_model_fsdp2",
    "model_eval_mode",
    "add_vision_dataset_transform",
    "create_interval_scheduler",
    "partial_format",
    "get_free_tcp_port",
    "STR_TO_DTYPE",
    "ParallelismType",
    "FSDPConfig",
    "FSDP2Config",
    "TPConfig",
    "ParallelismConfig",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "MissingConditionalImportError",
    "import_object",
    "retry",
    "load_checkpoint",
    "save_checkpoint",
    "get_save_filename",
    "CliCompressor",
    "CompressorNotFound",
    "KNOWN_COMPRESSORS",
    "get_compressor",
    "is_compressed_pt",
    "ensure_folder_has_no_conflicting_files",
    "ensure_folder_is_empty",
    "safe_torch_load",
    "PartialFilePath",
    "is_tar",
    "FsspecObjectStore",
    "GCSObjectStore",
    "LibcloudObjectStore",
    "MLFlowObjectStore",
    "OCIObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "S3ObjectStore",
    "SFTPObjectStore",
    "UCObjectStore",
    "build_remote_backend",
    "RemoteFilesExistingCheckStatus",
    "RemoteUploader",
    "create_symlink_file",
    "extract_path_from_symlink",
    "get_file",
    "is_uri",
    "list_remote_objects",
    "maybe_create_object_store_from_uri",
    "maybe_create_remote_uploader_downloader_from_uri",
    "parse_uri",
    "validate_credentials",
    "ExportFormat",
    "Transform",
    "export_for_inference",
    "export_with_logger",
    "quantize_dynamic",
    "extract_hparams",
    "convert_nested_dict_to_flat_dict",
    "convert_flat_dict_to_nested_dict",
    "VersionedDeprecationWarning",
    "MLFLOW_EXPERIMENT_ID_FORMAT_KEY",
    "MLFLOW_RUN_ID_FORMAT_KEY",
    "configure_excepthook",
    "enable_env_report",
    "disable_env_report",
    "print_env",
    "get_composer_env_dict",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer.utils.collect_env": [
            "configure_excepthook",
            "disable_env_report",
            "enable_env_report",
            "print_env",
        ],
        "composer.utils.import_helpers": ["import_object"],
        "composer.utils.inference": [
            "ExportFormat",
            "Transform",
            "export_for_inference",
            "export_with_logger",
            "quantize_dynamic",
        ],
        "composer.utils.notebook": ["is_notebook"],
        "composer.utils.object_store.mlflow_object_store": [
            "MLFLOW_EXPERIMENT_ID_FORMAT_KEY",
            "MLFLOW_RUN_ID_FORMAT_KEY",
        ],
        "composer_algorithms.dataset_transforms": ["add_vision_dataset_transform"],
        "composer_checkpoint.formats.archives": [
            "CliCompressor",
            "CompressorNotFound",
            "KNOWN_COMPRESSORS",
            "get_compressor",
            "is_compressed_pt",
        ],
        "composer_checkpoint.save_folder": ["ensure_folder_has_no_conflicting_files", "ensure_folder_is_empty"],
        "composer_checkpoint.files": ["safe_torch_load"],
        "composer_checkpoint.names": ["PartialFilePath", "is_tar"],
        "composer_checkpoint.stores": [
            "FsspecObjectStore",
            "GCSObjectStore",
            "LibcloudObjectStore",
            "MLFlowObjectStore",
            "OCIObjectStore",
            "ObjectStore",
            "ObjectStoreTransientError",
            "S3ObjectStore",
            "SFTPObjectStore",
            "UCObjectStore",
        ],
        "composer_checkpoint.stores.opening": ["build_remote_backend"],
        "composer_checkpoint.remote.upload": ["RemoteFilesExistingCheckStatus", "RemoteUploader"],
        "composer_checkpoint.remote.fetch": [
            "create_symlink_file",
            "extract_path_from_symlink",
            "get_file",
            "is_uri",
            "list_remote_objects",
            "maybe_create_object_store_from_uri",
            "parse_uri",
            "validate_credentials",
        ],
        "composer_checkpoint.loader": ["load_checkpoint"],
        "composer_checkpoint.remote.logger": ["maybe_create_remote_uploader_downloader_from_uri"],
        "composer_checkpoint.stores.base": ["retry"],
        "composer_checkpoint.state": ["get_save_filename", "save_checkpoint"],
        "composer_dist.devices": ["get_device", "is_xla_installed", "is_hpu_installed", "STR_TO_DTYPE"],
        "composer_dist.env": ["get_free_tcp_port"],
        "composer_dist.wrapping": ["is_model_deepspeed", "is_model_fsdp", "is_model_fsdp2"],
        "composer_events.batches": ["batch_get", "batch_set", "ensure_tuple", "map_collection", "IteratorFileStream"],
        "composer_events.hparams": [
            "get_composer_env_dict",
            "extract_hparams",
            "convert_nested_dict_to_flat_dict",
            "convert_flat_dict_to_nested_dict",
        ],
        "composer_events.formatting": ["format_name_with_dist", "format_name_with_dist_and_time", "partial_format"],
        "composer_events.intervals": ["create_interval_scheduler"],
        "composer_events.parallelism": ["ParallelismType"],
        "composer_events.warnings": ["VersionedDeprecationWarning"],
        "composer_fsdp.config": ["FSDPConfig", "FSDP2Config", "TPConfig", "ParallelismConfig"],
        "composer_models": ["MissingConditionalImportError", "model_eval_mode"],
        "composer_time": ["StringEnum"],
    },
    submodules=[
        "auto_log_hparams",
        "batch_helpers",
        "checkpoint",
        "collect_env",
        "compression",
        "device",
        "dist",
        "file_helpers",
        "import_helpers",
        "inference",
        "iter_helpers",
        "misc",
        "module_surgery",
        "notebook",
        "object_store",
        "parallelism",
        "remote_uploader",
        "reproducibility",
        "retrying",
        "string_enum",
        "warnings",
    ],
    renamed={"is_tpu_installed": "composer.utils.is_xla_installed"},
    removed={
        "FORMAT_NAME_WITH_DIST_TABLE": NO_TABLE,
        "FORMAT_NAME_WITH_DIST_AND_TIME_TABLE": NO_TABLE,
        **dict.fromkeys(
            ["EvalClient", "LambdaEvalClient", "LocalEvalClient", "MosaicMLLambdaEvalClient"],
            GONE["composer.utils.eval_client"],
        ),
        "using_torch_2": ONLY_TORCH_2,
    },
)
