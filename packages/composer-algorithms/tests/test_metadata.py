"""Every method has a row for the table of methods, and the row tells the truth."""

import pytest

import composer_algorithms
from composer_algorithms import functional
from composer_events import Algorithm

METHODS = composer_algorithms.all_metadata()
# A method's second function, and older spellings.
OTHER_FUNCTIONS = {
    "apply_agc",
    "cutmix",
    "multi_token_loss",
    "post_hoc_ema",
    "selective_backprop",
    "should_selective_backprop",
}


@pytest.mark.parametrize("metadata", METHODS.values(), ids=METHODS.keys())
def test_class_and_function_exist_and_the_texts_are_there(metadata):
    assert issubclass(getattr(composer_algorithms, metadata.class_name), Algorithm)
    assert not metadata.functional or callable(getattr(functional, metadata.functional))
    assert metadata.domains
    assert set(metadata.domains) <= {"cv", "nlp"}
    for text in (metadata.name, metadata.tldr, metadata.attribution, metadata.summary, metadata.use):
        assert text


def test_every_algorithm_and_every_function_has_a_row():
    classes = {name for name in composer_algorithms.__all__ if _is_algorithm(getattr(composer_algorithms, name))}
    assert classes == {metadata.class_name for metadata in METHODS.values()}
    functions = {metadata.functional for metadata in METHODS.values() if metadata.functional}
    assert set(functional.__all__) - OTHER_FUNCTIONS == functions


def _is_algorithm(value):
    return isinstance(value, type) and issubclass(value, Algorithm)
