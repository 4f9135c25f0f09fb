import pytest


@pytest.fixture(scope="module")
def ranges(tool):
    return tool("ranges")


def project(name, version="0.1.0", *requirements, **extras):
    return {"name": name, "version": version, "dependencies": list(requirements), "optional-dependencies": extras}


def test_the_ranges_of_this_workspace_fit(ranges):
    assert list(ranges.misfits(ranges.members())) == []


@pytest.mark.parametrize(
    ("version", "asked", "said"),
    [
        ("0.2.0", ">=0.1,<0.2", "but a is 0.2.0"),
        ("0.1.0", ">=0.1", "admits the breaking release 0.2"),
        ("0.1.0", ">=0.1,<0.3", "admits the breaking release 0.2"),
        ("1.4.0", ">=1.1,<3", "admits the breaking release 2.0"),
    ],
)
def test_a_range_that_does_not_fit_is_named(ranges, version, asked, said):
    projects = {"a": project("a", version), "b": project("b", "0.1.0", f"a{asked}")}
    (sentence,) = ranges.misfits(projects)
    assert sentence.startswith("b asks for a")
    assert said in sentence


def test_the_ranges_inside_extras_count_too(ranges):
    projects = {"a": project("a", "0.2.0"), "b": project("b", more=["a>=0.1,<0.2"])}
    assert len(list(ranges.misfits(projects))) == 1
