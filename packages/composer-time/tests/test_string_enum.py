import copy
import pickle

import pytest

from composer_time import StringEnum


class Color(StringEnum):
    CRIMSON = "red"
    NAVY = "blue"
    SCARLET = "red"


@pytest.mark.parametrize("spelling", ["CRIMSON", "crimson", "Crimson", "red", "RED", "rEd", Color.CRIMSON])
def test_a_member_its_name_and_its_value_in_any_case_name_the_member(spelling):
    assert Color(spelling) is Color.CRIMSON


def test_an_alias_names_the_member_that_it_stands_for():
    assert Color("scarlet") is Color.CRIMSON
    assert list(Color) == [Color.CRIMSON, Color.NAVY]


def test_an_unknown_string_is_refused_with_every_string_that_is_known():
    with pytest.raises(ValueError, match=r"'green' is not a Color\. .*'red', 'crimson', 'blue', 'navy', 'scarlet'"):
        Color("green")


@pytest.mark.parametrize("value", [None, 1, 1.5, b"red", ["red"]])
def test_anything_but_a_member_or_a_string_is_refused_by_kind(value):
    with pytest.raises(TypeError, match="not a Color"):
        Color(value)


def test_a_member_of_another_enum_is_refused_by_kind():
    class Wine(StringEnum):
        CRIMSON = "red"

    with pytest.raises(TypeError, match="not a Color"):
        Color(Wine.CRIMSON)
    assert Wine.CRIMSON != Color.CRIMSON


def test_a_name_that_is_not_upper_case_fails_with_the_class_body():
    with pytest.raises(ValueError, match=r"Bad\.Crimson: the name 'Crimson' .* 'CRIMSON'"):

        class Bad(StringEnum):
            Crimson = "red"


@pytest.mark.parametrize("bad_value", ["Red", 1])
def test_a_value_that_is_not_a_lower_case_string_fails_with_the_class_body(bad_value):
    with pytest.raises(ValueError, match=r"Bad\.CRIMSON: the value"):

        class Bad(StringEnum):
            CRIMSON = bad_value


def test_a_string_that_could_mean_two_members_fails_with_the_class_body():
    with pytest.raises(ValueError, match="also the name of another member"):

        class Bad(StringEnum):
            NAVY = "blue"
            BLUE = "azure"


@pytest.mark.parametrize("spelling", ["red", "RED", "crimson"])
def test_comparing_with_a_string_works_and_warns(spelling):
    with pytest.warns(UserWarning, match="Detected comparison between a string"):
        assert Color.CRIMSON == spelling  # noqa: SIM300  # the member's own comparison, then the string's
    with pytest.warns(UserWarning, match="Detected comparison between a string"):
        assert spelling == Color.CRIMSON
    with pytest.warns(UserWarning, match="Detected comparison between a string"):
        assert spelling != Color.NAVY


def test_comparing_with_a_string_that_names_no_member_warns_and_is_false():
    with pytest.warns(UserWarning, match="Detected comparison between a string"):
        assert Color.CRIMSON != "green"


def test_the_warning_points_at_the_line_that_compares():
    with pytest.warns(UserWarning, match="Detected comparison") as caught:
        assert Color.CRIMSON == "red"
    assert caught[0].filename == __file__


def test_comparing_members_or_looking_them_up_does_not_warn():
    assert Color.CRIMSON == Color.SCARLET
    assert Color.CRIMSON != Color.NAVY
    assert Color.CRIMSON != 1
    assert {Color.CRIMSON: 1, Color.NAVY: 2}[Color("navy")] == 2


@pytest.mark.parametrize("restored", [copy.copy, copy.deepcopy, lambda member: pickle.loads(pickle.dumps(member))])
def test_a_copied_or_pickled_member_is_the_member_itself(restored):
    assert restored(Color.NAVY) is Color.NAVY


def test_a_subclass_can_accept_further_strings():
    class Speed(StringEnum):
        FAST = "fast"

        @classmethod
        def _missing_(cls, value):
            return cls.FAST if value == "quick" else super()._missing_(value)

    assert Speed("quick") is Speed("FAST") is Speed.FAST
    with pytest.raises(ValueError, match="'slow' is not a Speed"):
        Speed("slow")
