"""What the tests share: how many examples hypothesis tries, and on how many threads."""

import pytest
import torch
from hypothesis import settings

# The time of one example says more about the machine's load than about the code.
settings.register_profile("models", deadline=None, max_examples=30)
settings.load_profile("models")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Keep the threads of tiny tensors from waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
