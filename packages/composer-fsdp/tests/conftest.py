import os

import pytest
from hypothesis import settings

# A deadline would measure how busy the machine is.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


@pytest.fixture(autouse=True)
def environ():
    """An environment that says nothing of sharding, put back afterwards."""
    before = dict(os.environ)
    for variable in ("FSDP_VERSION", "COMPOSER_STRICT_COMPAT"):
        os.environ.pop(variable, None)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)
