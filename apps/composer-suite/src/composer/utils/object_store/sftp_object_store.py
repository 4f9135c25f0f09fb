"""A machine reached over SFTP."""

from composer_checkpoint.stores.sftp import SFTPObjectStore

__all__ = ["SFTPObjectStore"]
