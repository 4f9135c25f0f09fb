"""Names with placeholders."""

from datetime import timedelta
from pathlib import Path
from string import ascii_letters

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_events import format_name_with_dist, format_name_with_dist_and_time, partial_format
from composer_events.formatting import OF_TIME, check_placeholders
from composer_time import Timestamp

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
ALL_RANKS = "{rank}/{world_size} {local_rank}/{local_world_size} {node_rank}"

texts = st.text(st.characters(exclude_characters="{}"))
names = st.text(ascii_letters, min_size=1)


@pytest.fixture
def launch(monkeypatch):
    """Pretend that a launcher set these variables, and no other ones."""
    launchers = ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS_PER_NODE")
    for name in (*VARIABLES, *launchers, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.mark.parametrize(
    ("template", "args", "kwargs", "expected"),
    [
        ("{foo} {}", (), {}, "{foo} {}"),
        ("{foo} {}", ("World",), {}, "{foo} World"),
        ("{foo} {}", (), {"foo": "Hello"}, "Hello {}"),
        ("{foo} {}", ("World",), {"foo": "Hello"}, "Hello World"),
        ("{foo} {}", ("World", "more"), {"foo": "Hello", "bar": "more"}, "Hello World"),
        ("{1}-{0}-{2}", ("a", "b"), {}, "b-a-{2}"),
        ("{}-{}-{}", ("a", "b"), {}, "a-b-{}"),
        ("{n:03d} {m:03d}", (), {"n": 7}, "007 {m:03d}"),
        ("{n!r} {m!r:>4}", (), {"n": "x"}, "'x' {m!r:>4}"),
        ("{n:04d} {n!x} {m:d}", (), {"n": "x", "m": 1.5}, "{n:04d} {n!x} {m:d}"),
        ("{n:{width}}|", (), {"n": "x", "width": 3}, "x  |"),
        ("{t.year} {x.year}", (), {"t": type("T", (), {"year": 9})}, "9 {x.year}"),
        ("{a[0]} {b[0]}", (), {"a": [5]}, "5 {b[0]}"),
        ("{[0]} {[0]}", ([5],), {}, "5 {[0]}"),
        ("{{literal}} {x}", (), {"x": 1}, "{literal} 1"),
        ("", (), {}, ""),
    ],
)
def test_known_placeholders_are_filled_in_and_others_stay(template, args, kwargs, expected):
    assert partial_format(template, *args, **kwargs) == expected


@given(st.lists(st.tuples(texts, names, texts)))
def test_with_every_value_known_it_is_str_format(pieces):
    template = "".join(f"{text}{{{name}}}" for text, name, _ in pieces)
    values = {name: value for _, name, value in pieces}
    assert partial_format(template, **values) == template.format(**values)


@given(st.lists(st.tuples(texts, names)))
def test_with_no_value_known_nothing_changes(pieces):
    template = "".join(f"{text}{{{name}}}" for text, name in pieces)
    assert partial_format(template) == template


@given(texts)
def test_braces_in_a_value_are_not_looked_into(value):
    assert partial_format("{a}{b}", a=f"{{b}}{value}") == f"{{b}}{value}{{b}}"


@pytest.mark.parametrize("template", ["{", "}", "{a", "a}"])
def test_a_single_brace_is_refused(template):
    with pytest.raises(ValueError, match=r"format string|expected '}'"):
        partial_format(template, a=1)


def test_a_template_of_absurd_length_is_refused():
    assert partial_format("{}" * 10_000, *range(10_000)).endswith("9999")
    with pytest.raises(RuntimeError, match="more than 10000 placeholders"):
        partial_format("{}" * 10_001)


def test_a_process_alone_is_rank_zero_of_one(launch):
    launch()
    assert format_name_with_dist(f"{{run_name}} {ALL_RANKS}", "plum") == "plum 0/1 0/1 0"


def test_the_launchers_numbers_are_filled_in(launch):
    launch(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, NODE_RANK=1)
    assert format_name_with_dist(ALL_RANKS, "plum") == "5/8 1/4 1"


@pytest.mark.parametrize("variables", [{"GROUP_RANK": 1}, {}])
def test_the_node_is_known_under_torchrun(launch, variables):
    launch(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, **variables)
    assert format_name_with_dist("{node_rank}", "plum") == "1"


def test_a_number_that_nobody_tells_stays_a_placeholder(launch):
    launch(RANK=1, WORLD_SIZE=2)
    assert format_name_with_dist(ALL_RANKS, "plum") == "1/2 {local_rank}/{local_world_size} {node_rank}"


def test_a_number_in_another_form_is_not_guessed_at(launch):
    launch(RANK=1, WORLD_SIZE=2, SLURM_NTASKS_PER_NODE="2(x4)", SLURM_LOCALID=1)
    assert format_name_with_dist("{local_rank} {local_world_size}", "plum") == "1 {local_world_size}"


def test_further_values_are_filled_in(launch):
    launch()
    assert format_name_with_dist("{run_name}-{kind}-{batch}", "plum", kind="best") == "plum-best-{batch}"


def test_counters_are_whole_numbers_and_clocks_are_seconds(launch):
    launch()
    timestamp = Timestamp(
        epoch=1,
        batch=2,
        batch_in_epoch=3,
        sample=4,
        sample_in_epoch=5,
        token=6,
        token_in_epoch=7,
        total_wct=timedelta(hours=10),
        epoch_wct=timedelta(seconds=8.5),
        batch_wct=timedelta(),
    )
    template = (
        "{run_name} {epoch} {batch} {batch_in_epoch} {sample} {sample_in_epoch} {token} {token_in_epoch} "
        "{total_wct} {epoch_wct} {batch_wct} {rank} {batch:04d} {unknown}"
    )
    expected = "plum 1 2 3 4 5 6 7 36000.0 8.5 0.0 0 0002 {unknown}"
    assert format_name_with_dist_and_time(template, "plum", timestamp) == expected


def test_a_placeholder_that_nothing_fills_in_is_told_with_those_that_there_are():
    with pytest.warns(UserWarning, match=r"has the placeholder \{zz\}, .* There are .*rank, run_name"):
        check_placeholders(folder=Path("runs/{zz}"))
    with pytest.warns(UserWarning, match=r"filename='\{batch\}' has the placeholder \{batch\}"):
        check_placeholders(folder=None, filename="{batch}")


def test_a_name_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match=r"folder='runs/\{rank' is malformed"):
        check_placeholders(folder="runs/{rank")


@pytest.mark.filterwarnings("error")
def test_placeholders_that_are_filled_in_are_not_told():
    check_placeholders(folder="{run_name}/{rank:03d}-{world_size}/{local_rank}{local_world_size}{node_rank}/{{zz}}")
    check_placeholders(OF_TIME, name="ep{epoch:04d}-ba{batch}-{total_wct}-{run_name!r}")
    check_placeholders(OF_TIME, name="{batch.real}")
