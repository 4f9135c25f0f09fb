"""What a warning that names a version says."""

import copy
import pickle
import warnings

import pytest

from composer_events import VersionedDeprecationWarning


def test_a_versioned_deprecation_says_its_message_and_when_the_thing_goes():
    with pytest.warns(VersionedDeprecationWarning) as caught:
        warnings.warn(VersionedDeprecationWarning("Use b.", remove_version="0.4.0"), stacklevel=1)
    assert str(caught[0].message) == "Use b. It will be removed in version 0.4.0."


def test_filters_for_deprecations_cover_it():
    with pytest.warns(DeprecationWarning, match=r"^Use b\. .*0\.4\.0"):
        warnings.warn(VersionedDeprecationWarning("Use b.", "0.4.0"), stacklevel=1)


@pytest.mark.parametrize("duplicate", [copy.copy, lambda warning: pickle.loads(pickle.dumps(warning))])
def test_it_survives_the_way_to_another_process(duplicate):
    warning = VersionedDeprecationWarning("Use b.", "0.4.0")
    other = duplicate(warning)
    assert (type(other), str(other)) == (VersionedDeprecationWarning, str(warning))
    assert (other.message, other.remove_version) == ("Use b.", "0.4.0")
