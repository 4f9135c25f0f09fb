"""Wheels that nobody should get are not put into the folder."""

import pytest

FLICKERING = """#!/bin/sh
while [ "$1" != "-o" ]; do shift; done
mkdir -p "$2"
echo same > "$2/plum-1-py3-none-any.whl"
echo "$2" > "$2/pear-1-py3-none-any.whl"
"""


@pytest.fixture
def dist(tool, monkeypatch, root):
    monkeypatch.syspath_prepend(str(root / "tools"))
    return tool("dist")


def test_wheels_that_differ_between_two_builds_are_named(dist, tmp_path):
    uv = tmp_path / "uv"
    uv.write_text(FLICKERING)
    uv.chmod(0o755)
    with pytest.raises(dist.Unfit, match=r"differ in pear-1-py3-none-any\.whl\.$"):
        dist.build(str(uv), tmp_path / "wheels")


def test_the_first_script_of_the_readme_is_its_first_python_block(tool, monkeypatch, root):
    monkeypatch.syspath_prepend(str(root / "tools"))
    alone = tool("alone")
    page = "```sh\nmake\n```\n\n```python\nimport plum\n\nplum.eat()\n```\n\n```python\nplum.grow()\n```\n"
    assert alone.first_script(page) == "import plum\n\nplum.eat()\n"
    assert "trainer.fit()" in alone.first_script((root / "README.md").read_text())
