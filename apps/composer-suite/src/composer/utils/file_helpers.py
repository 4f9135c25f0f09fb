"""Files here and in stores: their names, their addresses, and getting them."""

from composer._former_modules import NO_TABLE
from composer._lazy import lazy_face, share_patches
from composer_checkpoint.names import is_tar
from composer_checkpoint.remote.fetch import (
    create_symlink_file,
    extract_path_from_symlink,
    get_file,
    is_uri,
    list_remote_objects,
    maybe_create_object_store_from_uri,
    parse_uri,
    validate_credentials,
)
from composer_checkpoint.remote.logger import maybe_create_remote_uploader_downloader_from_uri
from composer_checkpoint.save_folder import ensure_folder_has_no_conflicting_files, ensure_folder_is_empty
from composer_checkpoint.stores import (
    GCSObjectStore,
    LibcloudObjectStore,
    MLFlowObjectStore,
    ObjectStore,
    OCIObjectStore,
    S3ObjectStore,
    UCObjectStore,
)
from composer_events.formatting import format_name_with_dist, format_name_with_dist_and_time, partial_format

__all__ = [
    "GCSObjectStore",
    "LibcloudObjectStore",
    "MLFlowObjectStore",
    "OCIObjectStore",
    "ObjectStore",
    "S3ObjectStore",
    "UCObjectStore",
    "create_symlink_file",
    "ensure_folder_has_no_conflicting_files",
    "ensure_folder_is_empty",
    "extract_path_from_symlink",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_file",
    "is_tar",
    "is_uri",
    "list_remote_objects",
    "maybe_create_object_store_from_uri",
    "maybe_create_remote_uploader_downloader_from_uri",
    "parse_uri",
    "partial_format",
    "validate_credentials",
]

# `maybe_create_object_store_from_uri` makes the stores where it is defined.
share_patches(
    __name__,
    "composer_checkpoint.stores.opening",
    [name for name in __all__ if name.endswith("ObjectStore") and name != "ObjectStore"],
)

__getattr__, __dir__ = lazy_face(
    __name__,
    {},
    removed={
        "FORMAT_NAME_WITH_DIST_TABLE": NO_TABLE,
        "FORMAT_NAME_WITH_DIST_AND_TIME_TABLE": NO_TABLE,
        "validate_remote_path": "composer.cli.validate_remote_path.validate_remote_path does it, and the command "
        "composer_validate_remote_path.",
    },
)
