"""Collect the examples of the Markdown pages as tests."""

import os
import sys
from typing import Any

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
except ImportError:  # a package that is tested alone does not have it
    pass
else:

    def _remember_environment(namespace: dict[str, Any]) -> None:
        namespace["__environ_before__"] = dict(os.environ)

    def _forget_process(namespace: dict[str, Any]) -> None:
        """Leave to the next page neither a process group nor the variables that tell of one."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        before = namespace.pop("__environ_before__")
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

    _examples = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()],
        patterns=["README.md", "docs/*.md", "docs/algorithms/*.md"],
        setup=_remember_environment,
        teardown=_forget_process,
    )
    pytest_collect_file = _examples.pytest()
