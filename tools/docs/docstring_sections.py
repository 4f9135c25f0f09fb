"""Tell the reader of docstrings that our sections `Example:` are what it knows as `Examples:`."""

import re
from typing import Any

import griffe

HEADING = re.compile(r"^Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Renames the sections, so that their doctests are shown as code and not as quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename those of one object."""
        if obj.docstring:
            obj.docstring.value = HEADING.sub("Examples:", obj.docstring.value)
