import subprocess
import sys
from importlib.metadata import version

import pytest

import composer_time


def test_the_public_names_are_these():
    names = ["Time", "TimeUnit", "Timestamp", "ensure_time", "StringEnum", "Serializable"]
    assert composer_time.__all__ == [*names, "__version__"]
    assert all(getattr(composer_time, name).__name__ == name for name in names)


def test_the_names_are_those_of_their_modules():
    from composer_time import serializable, string_enum, time, timestamp

    assert (time.Time, time.ensure_time, time.TimeUnit) == (
        composer_time.Time,
        composer_time.ensure_time,
        composer_time.TimeUnit,
    )
    assert timestamp.Timestamp is composer_time.Timestamp
    assert string_enum.StringEnum is composer_time.StringEnum
    assert serializable.Serializable is composer_time.Serializable


def test_the_version_is_that_of_the_distribution():
    assert composer_time.__version__ == version("composer-time")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Tiem'"):
        composer_time.Tiem  # noqa: B018


def test_importing_loads_only_the_standard_library_and_little_of_it():
    script = (
        "import sys; before = set(sys.modules); import composer_time; composer_time.Timestamp;"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before} - {'composer_time'};"
        "slow = {'typing', 're', 'inspect', 'importlib', 'dataclasses'};"
        "print(sorted(loaded - set(sys.stdlib_module_names)), sorted(loaded & slow))"
    )
    # -S: what the site's own start-up files load is not ours.
    paths = f"import sys; sys.path[:] = {sys.path!r};"
    result = subprocess.run([sys.executable, "-S", "-c", paths + script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] []"
