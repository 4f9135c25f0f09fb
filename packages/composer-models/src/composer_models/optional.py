"""Error for optional dependencies that are not installed."""

from functools import partial

__all__ = ["MissingConditionalImportError"]


class MissingConditionalImportError(ImportError):
    """A required package is not installed; the message names the extra that provides it.

    Args:
        extra_deps_group: The extra that provides the package, such as `'vision'`.
        conda_package: The package's name, on conda and in the message.
        conda_channel: The conda channel of the package.
        distribution: The distribution that has the extra.

    Example:
        >>> raise MissingConditionalImportError("coco", "pycocotools", distribution="composer-models")
        Traceback (most recent call last):
            ...
        composer_models.optional.MissingConditionalImportError: pycocotools is not installed, and ...
    """

    def __init__(
        self,
        extra_deps_group: str,
        conda_package: str,
        conda_channel: str | None = "conda-forge",
        *,
        distribution: str = "composer-suite",
    ) -> None:
        conda = f" -c {conda_channel}" if conda_channel else ""
        super().__init__(
            f"{conda_package} is not installed, and this feature needs it. It comes with the extra "
            f"{extra_deps_group!r}: run `pip install '{distribution}[{extra_deps_group}]'`, or in a conda environment "
            f"`conda install{conda} {conda_package}`."
        )
        self.extra_deps_group = extra_deps_group
        self.conda_package = conda_package
        self.conda_channel = conda_channel
        self.distribution = distribution

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is pickled as its class with `args`, here only the message; other ranks need all.
        rebuild = partial(MissingConditionalImportError, distribution=self.distribution)
        return rebuild, (self.extra_deps_group, self.conda_package, self.conda_channel)
