import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_checkpoint import CorruptCheckpointError, FileEntry, IncompatibleCheckpointError, Manifest, TensorEntry

sizes = st.integers(0, (1 << 63) - 1)
infos = st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.booleans()) | st.none())


def manifests(hash_name, num_digits):
    hashes = st.text("0123456789abcdef", min_size=num_digits, max_size=num_digits)
    tensor_entries = st.builds(TensorEntry, st.text(), st.lists(sizes).map(tuple), sizes, hashes)
    return st.builds(
        Manifest,
        hash_name=st.just(hash_name),
        tensors=st.dictionaries(st.text(), tensor_entries),
        files=st.dictionaries(st.text(), st.builds(FileEntry, sizes, hashes)),
        info=infos,
    )


@given(manifests("xxh3_128", 32) | manifests("blake3", 64))
def test_reading_gives_back_what_was_written(manifest):
    assert Manifest.from_json(manifest.to_json()) == manifest


def good():
    entry = {"size_bytes": 4, "hash": "0" * 64}
    return {
        "format_version": 1,
        "hash_name": "blake3",
        "tensors": {"w": {"dtype": "float32", "shape": [1], **entry}},
        "files": {"a": entry},
        "info": {},
    }


def changed(**changes):
    return json.dumps({**good(), **changes})


DAMAGED = {
    "no JSON": "{",
    "bytes that are no text": b"\xff",
    "a list": "[]",
    "a doubled name": '{"format_version": 1, "format_version": 1}',
    "endless nesting": "[" * 100_000,
    "no version": "{}",
    "version 0": changed(format_version=0),
    "a version that is a text": changed(format_version="1"),
    "a version that is true": changed(format_version=True),
    "tensors that are a list": changed(tensors=[]),
    "a short hash": changed(files={"a": {"size_bytes": 4, "hash": "00"}}),
    "a hash of another kind": changed(hash_name="xxh3_128"),
    "a negative size": changed(files={"a": {"size_bytes": -4, "hash": "0" * 64}}),
    "a size of 2**63": changed(files={"a": {"size_bytes": 1 << 63, "hash": "0" * 64}}),
    "a tensor without a shape": changed(tensors={"w": {"dtype": "f", "size_bytes": 4, "hash": "0" * 64}}),
    "a negative dim": changed(tensors={"w": {"dtype": "f", "shape": [-1], "size_bytes": 4, "hash": "0" * 64}}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_not_a_manifest_is_refused(name):
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        Manifest.from_json(DAMAGED[name])


def test_a_newer_version_is_refused_with_its_writer():
    text = changed(format_version=2, info={"composer_version": "0.9.0"}, something_new=[1])
    with pytest.raises(IncompatibleCheckpointError, match=r"format version 2, written by 0\.9\.0.*up to version 1"):
        Manifest.from_json(text)


@pytest.mark.parametrize("hash_name", ["sha256", None, ["blake3"]])
def test_another_hash_is_refused(hash_name):
    with pytest.raises(IncompatibleCheckpointError, match="knows xxh3_128, blake3"):
        Manifest.from_json(changed(hash_name=hash_name))


def test_notes_that_json_has_no_form_for_are_refused_when_written():
    with pytest.raises(TypeError):
        Manifest(info={"path": object()}).to_json()
    with pytest.raises(ValueError, match="JSON"):
        Manifest(info={"loss": float("nan")}).to_json()
