"""The cards of the methods agree with the methods: names, papers, defaults, events and the index."""

import inspect
import re

import pytest
import torch

import composer_algorithms
from composer import functional
from composer_algorithms import Metadata, all_metadata
from composer_events import Event

METHODS = all_metadata()
SECTIONS = [
    "When it helps, and what it costs",
    "Hyperparameters",
    "As a function, and in the Trainer",
]
# What a constructor cannot do without; the rows of the index are about algorithms made so.
NEEDED = {
    "alibi": {"max_sequence_length": 128},
    "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "mup": {"base_width": 64},
    "whitening_init": {"images": torch.zeros(2, 3, 4, 4)},
    "stochastic_depth": {"target_layer_name": "ResNetBasicBlock"},
}
EACH = pytest.mark.parametrize("key", METHODS)


@pytest.fixture
def pages(root):
    return root / "docs" / "algorithms"


@pytest.fixture
def card(pages, key):
    return (pages / f"{key}.md").read_text()


@pytest.fixture
def rows(pages):
    """The cells of each row of the index, by the name of its card."""
    table = [line for line in (pages / "README.md").read_text().splitlines() if line.startswith("| [")]
    cells = [line.strip("| ").split(" | ") for line in table]
    return {re.fullmatch(r"\[.+\]\((\w+)\.md\)", row[0])[1]: row for row in cells}


def method_class(key):
    return getattr(composer_algorithms, METHODS[key].class_name)


def reference(text):
    """What a docstring names as its source, that of the function where it refers to that one."""
    _, found, source = inspect.cleandoc(text or "").partition("Reference:\n")
    if other := re.search(r"See `(\w+)`", source):
        return reference(getattr(functional, other[1]).__doc__)
    return " ".join(source.split()) if found else ""


def paragraph(page):
    return " ".join(page.split())


def section(page, title):
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_each_method_has_a_card_and_each_card_a_method(pages):
    assert {path.stem for path in pages.glob("*.md")} - {"README"} == set(METHODS)


@EACH
def test_a_card_has_its_name_its_sections_and_its_cost(key, card):
    assert card.startswith(f"# {METHODS[key].name}\n\n")
    assert re.findall("^## (.+)$", card, re.MULTILINE) == SECTIONS
    assert re.search(r"takes \d+\.\d\d times the processor time", paragraph(section(card, SECTIONS[0])))


@EACH
def test_a_card_cites_what_the_docstring_cites(key, card):
    source = reference(method_class(key).__doc__)
    # Titles may be broken over lines on either side.
    cited = {" ".join(title.split()) for title in re.findall(r'"([^"]+)"', source)}
    assert [title for title in cited if title.rstrip(",") not in paragraph(card)] == []
    numbers = re.findall(r"arXiv:(\d{4}\.\d{4,5})", source)
    assert [number for number in numbers if f"https://arxiv.org/abs/{number}" not in card] == []
    links = re.findall(r"\[arXiv:(.+?)\]\(https://arxiv\.org/abs/(.+?)\)", card)
    assert all(shown == linked for shown, linked in links)
    assert links or "no paper" in card.lower() or "no single paper" in card.lower() or "not on arXiv" in card


@EACH
def test_a_card_has_every_hyperparameter_with_its_default(key, card):
    listed = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", section(card, SECTIONS[1]), re.MULTILINE)
    parameters = inspect.signature(method_class(key)).parameters.values()
    expected = [
        (one.name, "required" if one.default is one.empty else f"`{shown(one.default)}`")
        for one in parameters
        if one.kind is not one.VAR_KEYWORD
    ]
    assert listed == expected


def shown(default):
    return str(default) if isinstance(default, Event) else repr(default)


@EACH
def test_a_card_shows_both_forms(key, card):
    blocks = re.findall(r"```python\n(.*?)```", section(card, SECTIONS[2]), re.DOTALL)
    own, trainer = blocks
    if METHODS[key].functional:
        assert re.search(rf"cf\.\w*{METHODS[key].functional}\(", own)
    assert f"{METHODS[key].class_name}(" in trainer
    assert "trainer.fit()" in trainer


@EACH
def test_a_card_says_what_the_method_conflicts_with(key, card):
    for other in set(method_class(key).conflicts_with) - {METHODS[key].class_name}:
        assert f"conflicts with {other}" in paragraph(card)


@EACH
def test_the_index_has_the_method_as_it_is(key, card, rows):
    name, what, acts_on, data, cost = rows[key]
    method: Metadata = METHODS[key]
    assert (name, what) == (f"[{method.name}]({key}.md)", method.tldr)
    events = [event for event in Event if event in method_class(key)(**NEEDED.get(key, {})).acts_on]
    assert acts_on.partition(" and ")[0].split(", ") == [event.name for event in events[:3]]
    assert int((re.search(r" and (\d+) more", acts_on) or [0, 0])[1]) == max(len(events) - 3, 0)
    assert {"images": "cv", "text": "nlp"}.keys() >= set(data.split(", "))
    assert sorted(data.split(", ")) == sorted({"cv": "images", "nlp": "text"}[domain] for domain in method.domains)
    assert f"takes {cost} times the processor time" in paragraph(card)


def test_the_index_lists_each_method_once(rows):
    assert list(rows) == list(METHODS)
