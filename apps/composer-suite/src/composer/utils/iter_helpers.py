"""Small functions over iterables."""

from composer_events.batches import IteratorFileStream, ensure_tuple, iterate_with_callback, map_collection

__all__ = ["ensure_tuple", "map_collection", "IteratorFileStream", "iterate_with_callback"]
