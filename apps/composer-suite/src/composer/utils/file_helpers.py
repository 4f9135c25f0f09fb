"""Names of files and runs with placeholders in them."""

from composer_events.formatting import format_name_with_dist, format_name_with_dist_and_time, partial_format

__all__ = ["format_name_with_dist", "format_name_with_dist_and_time", "partial_format"]
