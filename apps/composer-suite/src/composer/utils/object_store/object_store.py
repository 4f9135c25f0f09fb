"""What every store can do."""

from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError

__all__ = ["ObjectStore", "ObjectStoreTransientError"]
