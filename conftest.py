"""Collect the examples of the Markdown pages as tests."""

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
except ImportError:  # a package that is tested alone does not have it
    pass
else:
    _examples = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()],
        patterns=["README.md", "docs/*.md", "docs/algorithms/*.md"],
    )
    pytest_collect_file = _examples.pytest()
