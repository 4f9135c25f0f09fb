"""That no block of a document is left out, and that each change is of something that is there."""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def words_of(path):
    return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize("document", sorted(path.stem for path in FOLDER.glob("documents/*.md")))
def test_every_block_is_in_a_test_of_its_document(documents, document):
    words = [words_of(path) for path in FOLDER.glob("*.py")]
    named = set().union(*(some for some in words if document in some))
    assert documents[document]
    assert not documents[document].keys() - named


def test_every_change_has_a_reason_and_something_to_change(documents, changes):
    for change in changes:
        names = [change["document"]] if "document" in change else list(documents)
        assert any(change["printed"] in text for name in names for _, text in documents[name].values()), change
        assert change["kind"] in ("cannot", "left out", "lacks")
        assert change["why"]
