"""What an engine says of the order of its algorithms, before any of them acts."""

import logging
import warnings

import pytest

from composer_events import Event, Explanation, NotIntendedUseWarning, Turn

LOG = "composer.core.engine"


@pytest.fixture
def make_declared(make_algorithm):
    """Make an algorithm that acts on the given events and declares that it does."""
    return lambda name, *events, **members: make_algorithm(name, events, acts_on=frozenset(events), **members)


def names(turns):
    return [turn.algorithm for turn in turns]


def test_the_turns_are_what_the_engine_then_does(state, make_engine, make_declared):
    events = (Event.INIT, Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS)
    state.algorithms = [
        make_declared("Wrap", *events),
        make_declared("Smooth", *events, runs_after=frozenset({"Mix"})),
        make_declared("Mix", *events, surgery_rank=1),
        make_declared("Convert", *events, runs_last=True),
        make_declared("Select", *events, runs_first=True),
        make_declared("Other", Event.BATCH_END),
    ]
    engine = make_engine()
    explanation = engine.explain()
    for event in (*events, Event.BATCH_END, Event.FIT_START):
        assert names(explanation.of(event)) == [trace.name for trace in engine.run_event(event).values()], event
        assert [turn.order for turn in explanation.of(event)] == list(range(len(explanation.of(event))))


def test_each_move_names_its_pass_and_what_was_overtaken(state, make_engine, make_declared):
    state.algorithms = [
        make_declared("Convert", Event.INIT, surgery_rank=6),
        make_declared("Smooth", Event.INIT, Event.BEFORE_LOSS, Event.AFTER_LOSS, runs_after=frozenset({"Mix"})),
        make_declared("Mix", Event.BEFORE_LOSS, Event.AFTER_LOSS),
    ]
    explanation = make_engine().explain()
    assert explanation.turns == (
        Turn(Event.INIT, "Smooth", 0, 1, ("sort_by_surgery_rank: before Convert (4 < 6)",)),
        Turn(Event.INIT, "Convert", 1, 0),
        Turn(Event.BEFORE_LOSS, "Mix", 0, 2, ("sort_by_precedence: before Smooth (Smooth.runs_after)",)),
        Turn(Event.BEFORE_LOSS, "Smooth", 1, 1),
        Turn(
            Event.AFTER_LOSS,
            "Smooth",
            0,
            1,
            ("set_filo_order: reversed", "sort_by_precedence: before Mix (Smooth.runs_after)"),
        ),
        Turn(Event.AFTER_LOSS, "Mix", 1, 2, ("set_filo_order: reversed",)),
    )
    assert set(explanation.rules) == {"set_filo_order", "sort_by_precedence", "sort_by_surgery_rank"}
    assert explanation.conflicts == explanation.undeclared == ()


def test_a_pass_of_the_users_own_is_followed_too(state, make_engine, make_declared):
    added = make_declared("Added", Event.BATCH_END)

    def exchange_the_last(algorithms, event):
        """Put something else in the place of the last."""
        return [*algorithms[:-1], added] if event is Event.BATCH_END else algorithms

    state.algorithms = [make_declared("One", Event.BATCH_END), make_declared("Two", Event.BATCH_END)]
    explanation = make_engine(algorithm_passes=exchange_the_last).explain()
    assert explanation.of("batch_end") == (
        Turn(Event.BATCH_END, "One", 0, 0),
        Turn(Event.BATCH_END, "Added", 1, None, ("exchange_the_last: added",)),
        Turn(Event.BATCH_END, "Two", None, 1, ("exchange_the_last: left out",)),
    )
    assert explanation.rules == {"exchange_the_last": "Put something else in the place of the last."}
    assert str(explanation).splitlines()[1:4] == [
        "BATCH_END  1      One        1",
        "           2      Added      added   exchange_the_last: added",
        "           never  Two        2       exchange_the_last: left out",
    ]


def test_a_second_one_of_a_class_is_told_from_the_first(state, make_engine, make_declared):
    state.algorithms = [make_declared("Cut", Event.BATCH_END), make_declared("Cut", Event.BATCH_END)]
    assert names(make_engine().explain().turns) == ["Cut", "Cut#1"]


def test_conflicts_are_what_classes_declare_and_what_passes_warn_of_or_refuse(state, make_engine, make_declared):
    state.algorithms = [
        make_declared("SWA", Event.BATCH_END),
        make_declared("EMA", Event.BATCH_END, conflicts_with={"SWA": "Use one."}),
        make_declared("MixUp", Event.BEFORE_BACKWARD, interpolate_loss=True),
        make_declared("CutMix", Event.BEFORE_BACKWARD, interpolate_loss=True),
        make_declared("Hen", Event.BATCH_START, runs_before=frozenset({"Egg"})),
        make_declared("Egg", Event.BATCH_START, runs_before=frozenset({"Hen"})),
    ]
    engine = make_engine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        declared, refused, warned = engine.explain().conflicts
    assert declared == "SWA and EMA: Use one."
    assert refused.startswith("The algorithms Hen, Egg cannot be put in order on Event.BATCH_START")
    assert warned.startswith("MixUp and CutMix all have interpolate_loss=True on Event.BEFORE_BACKWARD")
    with pytest.warns(NotIntendedUseWarning, match="interpolate_loss"):  # as it would without the explanation
        engine.run_event("before_backward")


def test_what_declares_nothing_is_asked_in_a_copy(state, make_engine, make_algorithm):
    def match(self, event, state):
        self.num_asked = getattr(self, "num_asked", 0) + 1
        if event is Event.FIT_START:
            raise TypeError("no dataset yet")
        return event is Event.BATCH_END

    asking = make_algorithm("Asking")
    type(asking).match = match
    state.algorithms = [asking]
    explanation = make_engine().explain()
    assert explanation.turns == (Turn(Event.BATCH_END, "Asking", 0, 0),)
    assert explanation.undeclared == ("Asking",)
    assert not hasattr(asking, "num_asked")


def test_a_subclass_with_another_match_does_not_inherit_what_was_declared(state, make_engine, make_declared):
    parent = type(make_declared("Parent", Event.BATCH_END))
    child = type("Child", (parent,), {"match": lambda self, event, state: event is Event.BATCH_START})
    state.algorithms = [child()]
    assert make_engine().explain().turns == (Turn(Event.BATCH_START, "Child", 0, 0),)


def test_init_logs_the_table_and_warns_of_conflicts(state, make_engine, make_declared, caplog):
    state.algorithms = [
        make_declared("SWA", Event.BATCH_END),
        make_declared("EMA", Event.BATCH_END, conflicts_with={"SWA": "Use one."}),
    ]
    engine = make_engine()
    with caplog.at_level(logging.INFO, LOG):
        engine.run_event(Event.INIT)
        reported = list(caplog.record_tuples)
        engine.run_event(Event.BATCH_END)
    assert reported == [
        (LOG, logging.WARNING, "Algorithms conflict: SWA and EMA: Use one."),
        (LOG, logging.INFO, f"The order of algorithms:\n{engine.explain()}"),
    ]
    assert caplog.record_tuples == reported


def test_init_asks_no_algorithm_about_another_event(state, make_engine, make_algorithm, diary, caplog):
    state.algorithms = [make_algorithm("Asking", [Event.INIT])]
    with caplog.at_level(logging.INFO, LOG):
        make_engine().run_event(Event.INIT)
    assert diary == ["match Asking", "Asking"]
    assert not caplog.records


def test_without_algorithms_there_is_nothing_to_say(make_engine, caplog):
    engine = make_engine()
    with caplog.at_level(logging.DEBUG, LOG):
        engine.run_event(Event.INIT)
    assert not caplog.records
    assert engine.explain() == Explanation()
    assert str(engine.explain()) == "No algorithms."


def test_the_text_names_who_acts_alone_and_who_declares_nothing(state, make_engine, make_declared, make_algorithm):
    state.algorithms = [
        make_declared("Cut", Event.BATCH_END, Event.BATCH_START),
        make_algorithm("Free", [Event.FIT_END]),
    ]
    assert str(make_engine().explain()) == (
        "Alone on their events:\n  Cut: BATCH_START, BATCH_END\n  Free: FIT_END\n\n"
        "Only match knows when these act:\n  Free"
    )
