"""Algorithms act on the events that they declare, and on no others."""

import pytest

from composer_algorithms import (
    EMA,
    SWA,
    ColOut,
    CutMix,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    LowPrecisionLayerNorm,
    MixUp,
    StochasticDepth,
)
from composer_events import Algorithm, Event

ALGORITHMS = {
    "EMA": lambda: EMA("2ba"),
    "GradientClipping": lambda: GradientClipping("norm", 1.0),
    "LabelSmoothing": LabelSmoothing,
    "LayerFreezing": lambda: LayerFreezing(0.0),
    "MixUp": MixUp,
    "MixUp of batches": lambda: MixUp(draw_per="batch"),
    "MixUp of losses": lambda: MixUp(interpolate_loss=True),
    "SWA": lambda: SWA("0.1dur", "0.9dur", "1ba"),
}


@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_run_has_an_algorithm_act_only_where_it_declares_it(make, make_loop, make_saver, monkeypatch):
    algorithm = make()
    loop = make_loop([algorithm], [make_saver("3ba")], evaluate=lambda state: True, iteration_length="1ep")
    seen = set()
    run_event = loop.engine.run_event

    def run(event):
        traces = run_event(event)
        seen.update([event] if traces else [])
        return traces

    monkeypatch.setattr(loop.engine, "run_event", run)
    loop.fit()
    assert seen
    assert seen <= set(algorithm.acts_on)


@pytest.mark.parametrize(
    ("algorithm", "events"),
    [
        (ColOut(), {Event.AFTER_DATALOADER}),
        (ColOut(batch=False), {Event.FIT_START}),
        (CutMix(), {Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS}),
        (CutMix(interpolate_loss=True), {Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD}),
        (LowPrecisionLayerNorm(Event.AFTER_LOAD), {Event.AFTER_LOAD}),
        (StochasticDepth("ResNetBottleneck"), {Event.INIT}),
        (StochasticDepth("ResNetBottleneck", drop_warmup=0.1), {Event.INIT, Event.BATCH_START}),
    ],
    ids=lambda value: repr(value) if isinstance(value, Algorithm) else "",
)
def test_what_is_declared_follows_the_arguments(algorithm, events):
    assert set(algorithm.acts_on) == events


def test_averages_and_mixtures_that_do_not_go_together_say_so(make_loop):
    explanation = make_loop([EMA(), SWA(), MixUp(), CutMix()]).engine.explain()
    assert [conflict.partition(":")[0] for conflict in explanation.conflicts] == ["EMA and SWA", "MixUp and CutMix"]
    explanation = make_loop([EMA("2ba"), EMA("4ba")]).engine.explain()
    assert [conflict.partition(":")[0] for conflict in explanation.conflicts] == ["EMA and EMA#1"]
