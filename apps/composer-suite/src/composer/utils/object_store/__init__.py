"""Places that hold checkpoints, behind one interface."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_checkpoint.stores import AzureObjectStore as AzureObjectStore
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

__all__ = [
    "ObjectStore",
    "ObjectStoreTransientError",
    "FsspecObjectStore",
    "S3ObjectStore",
    "GCSObjectStore",
    "AzureObjectStore",
    "OCIObjectStore",
    "SFTPObjectStore",
    "LibcloudObjectStore",
    "UCObjectStore",
    "MLFlowObjectStore",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {"composer_checkpoint.stores": __all__},
    submodules=[
        "gcs_object_store",
        "libcloud_object_store",
        "mlflow_object_store",
        "object_store",
        "oci_object_store",
        "s3_object_store",
        "sftp_object_store",
        "uc_object_store",
        "utils",
    ],
)
