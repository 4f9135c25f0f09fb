"""Names, sources and recommended uses of the methods, read from the table `methods.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Metadata", "all_metadata"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Row of one method in the table of methods.

    Args:
        name: Name of the method in text.
        class_name: Name of its class in `composer_algorithms`.
        functional: Name of its function in `composer_algorithms.functional`, or empty.
        tldr: Description in less than a line.
        attribution: Authors and year, or another source.
        link: URL of a description, or empty.
        domains: `'cv'`, `'nlp'` or both.
        summary: Description in a sentence or two.
        use: When the method helps, recommended settings, and costs.
    """

    name: str
    class_name: str
    functional: str
    tldr: str
    attribution: str
    link: str
    domains: tuple[str, ...]
    summary: str
    use: str


METHODS = {
    key: Metadata(**{**row, "domains": tuple(row["domains"])})
    for key, row in tomllib.loads(Path(__file__).with_name("methods.toml").read_text("utf-8")).items()
}


def all_metadata() -> dict[str, Metadata]:
    """Return the metadata of every method.

    Returns:
        Metadata by the name of the method's page, such as `'mixup'`, in alphabetical order.

    Example:
        >>> all_metadata()["mixup"].functional
        'mixup_batch'
    """
    return dict(METHODS)
