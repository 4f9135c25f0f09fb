"""Addresses of files, here or in a store: their parts, the store they lie in, and the file itself."""

from composer_checkpoint.fetching import create_symlink_file, extract_path_from_symlink, get_file
from composer_checkpoint.stores.addresses import ParsedURI, is_uri, parse_uri
from composer_checkpoint.stores.opening import (
    build_remote_backend,
    list_remote_objects,
    maybe_create_object_store_from_uri,
    validate_credentials,
)

__all__ = [
    "ParsedURI",
    "build_remote_backend",
    "create_symlink_file",
    "extract_path_from_symlink",
    "get_file",
    "is_uri",
    "list_remote_objects",
    "maybe_create_object_store_from_uri",
    "parse_uri",
    "validate_credentials",
]
