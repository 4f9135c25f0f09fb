"""The version of composer-suite that is installed."""

__version__: str


def __getattr__(name: str) -> object:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # reading the metadata costs more than `import composer`

    value = globals()["__version__"] = version("composer-suite")
    return value
