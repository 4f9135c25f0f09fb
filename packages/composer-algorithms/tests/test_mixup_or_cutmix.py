"""`MixUpOrCutMix` is one of its two methods in each batch, and at probabilities 0 and 1 always the same one."""

import pytest
import torch
from torch import nn

from composer_algorithms import CutMix, LabelSmoothing, MixUp, MixUpOrCutMix
from composer_events import Engine, Event


@pytest.mark.parametrize("settings", [{}, {"interpolate_loss": True}, {"draw_per": "batch"}], ids=str)
@pytest.mark.parametrize(("switch_prob", "alone"), [(0, MixUp), (1, CutMix)])
def test_at_probability_0_or_1_it_is_the_one_or_the_other(state, settings, switch_prob, alone):
    # Draws are named by the class, so this class makes those of the other one.
    same_draws = type("SameDraws", (MixUpOrCutMix,), {"__qualname__": alone.__name__})
    both = same_draws(0.7, 0.7, switch_prob, **settings)
    generator = torch.Generator().manual_seed(0)
    images, labels, logits = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 1]), torch.randn(4, 3, generator=generator)
    seen = []
    for algorithm in (alone(0.7, **settings), both):
        state.set_dataloader([0], "train")
        state.algorithms = [LabelSmoothing(), algorithm]
        engine, found = Engine(state), []
        for _ in range(3):
            state.batch, state.outputs = (images, labels), logits
            for event in (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.BEFORE_LOSS):
                engine.run_event(event)
            state.loss = nn.functional.cross_entropy(logits, state.batch[1])
            for event in (Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
                engine.run_event(event)
            found += [state.batch[0], state.loss]
            assert state.batch[1] is labels
        seen.append(found)
    assert all(map(torch.equal, *seen))
    assert not torch.equal(seen[0][2], images)


def test_each_batch_is_drawn_and_a_resume_goes_on(state):
    images = torch.rand(4, 3, 8, 8)

    def train(algorithm, number):
        kinds = ""
        state.set_dataloader([0], "train")
        state.algorithms = [algorithm]
        for _ in range(number):
            state.batch, state.outputs = (images, images), images  # targets with a value for each pixel
            Engine(state).run_event(Event.BEFORE_FORWARD)
            Engine(state).run_event(Event.BEFORE_LOSS)
            torch.testing.assert_close(state.batch[1], state.batch[0])
            has_unmixed_pixels = (state.batch[0][:, None] == images[None]).any(dim=1).all()
            kinds += "C" if has_unmixed_pixels else "M"
        return kinds

    whole = MixUpOrCutMix(switch_prob=0.25)
    kinds = train(whole, 200)
    assert 25 <= kinds.count("C") <= 75  # 50 are expected, with a standard deviation of 6
    first, second = MixUpOrCutMix(switch_prob=0.25), MixUpOrCutMix(switch_prob=0.25)
    begun = train(first, 7)
    second.load_state_dict(first.state_dict())
    assert begun + train(second, 20) == kinds[:27]


def test_a_second_mixture_is_a_conflict(make_loop):
    explanation = make_loop([MixUpOrCutMix(), MixUp(), LabelSmoothing()]).engine.explain()
    assert [conflict.partition(":")[0] for conflict in explanation.conflicts] == ["MixUpOrCutMix and MixUp"]
    assert [turn.algorithm for turn in explanation.of("before_loss")][-1] == "LabelSmoothing"


@pytest.mark.parametrize("arguments", [{"switch_prob": 1.5}, {"mixup_alpha": -1.0}, {"cutmix_alpha": -1.0}], ids=str)
def test_arguments_out_of_range_are_refused_by_name(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value} is not in"):
        MixUpOrCutMix(**arguments)
