"""Names of Composer besides the public ones that tests and published projects import, call or replace."""

import atexit
import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Time, Timestamp, Trainer
from composer import functional as cf
from composer.metrics import LanguagePerplexity
from composer.models import ComposerClassifier


@pytest.mark.parametrize("uniform_sampling", [False, True])
def test_a_box_around_a_given_centre_leaves_the_area_that_is_asked_for(uniform_sampling):
    from composer.algorithms.cutmix.cutmix import _adjust_lambda, _rand_bbox

    box = _rand_bbox(W=32, H=64, cutmix_lambda=0.75, cx=16, cy=32, uniform_sampling=uniform_sampling)
    assert box == (8, 16, 24, 48)  # half of each side, W along the last dim but one
    assert _adjust_lambda(torch.empty(2, 3, 32, 64), box) == 0.75


def test_a_box_at_the_edge_is_cut_off_and_counts_less():
    from composer.algorithms.cutmix.cutmix import _adjust_lambda, _rand_bbox

    box = _rand_bbox(W=32, H=32, cutmix_lambda=0.0, cx=0, cy=31)
    assert box == (0, 15, 16, 32)
    assert _adjust_lambda(torch.empty(2, 3, 32, 32), box) == 1 - 16 * 17 / 32**2


def test_boxes_are_drawn_all_over_the_image():
    from composer.algorithms.cutmix.cutmix import _rand_bbox

    torch.manual_seed(0)
    boxes = [_rand_bbox(8, 8, cutmix_lambda=1 - (2 / 8) ** 2) for _ in range(400)]
    covered = {(x, y) for x1, y1, x2, y2 in boxes for x in range(x1, x2) for y in range(y1, y2)}
    # Each pixel but the last row and column, which the centre's half-open range misses by one side, is covered by
    # four of 64 centres: that one stays bare has a probability below 1e-11.
    assert covered >= {(x, y) for x in range(7) for y in range(7)}
    assert all(0 <= x1 <= x2 <= 8 and 0 <= y1 <= y2 <= 8 for x1, y1, x2, y2 in boxes)


def test_the_functions_that_draw_for_cutmix_and_mixup():
    from composer.algorithms.cutmix.cutmix import _gen_cutmix_coef, _gen_indices
    from composer.algorithms.mixup.mixup import _gen_mixing_coef

    torch.manual_seed(0)
    assert sorted(_gen_indices(6).tolist()) == list(range(6))
    assert _gen_cutmix_coef(0) == _gen_mixing_coef(0) == 0
    kept, mixed = ([draw(1.0) for _ in range(500)] for draw in (_gen_cutmix_coef, _gen_mixing_coef))
    # Beta(1, 1) is the uniform distribution, which MixUp folds at its middle; five standard errors of the mean.
    assert abs(sum(kept) / 500 - 0.5) < 5 * math.sqrt(1 / 12 / 500)
    assert abs(sum(mixed) / 500 - 0.25) < 5 * math.sqrt(1 / 48 / 500)
    assert max(mixed) <= 0.5 < max(kept)


@pytest.mark.parametrize(("x", "y", "rows", "columns"), [(5, 4, (2, 6), (3, 7)), (0, 11, (9, 12), (0, 2))])
def test_a_mask_gets_a_square_around_a_point(x, y, rows, columns):
    from composer.algorithms.cutout.cutout import _generate_mask

    mask = _generate_mask(mask=torch.ones(2, 3, 12, 10), width=10, height=12, x=x, y=y, cutout_length=4)
    expected = torch.ones(2, 3, 12, 10)
    expected[:, :, rows[0] : rows[1], columns[0] : columns[1]] = 0
    assert torch.equal(mask, expected)


def test_the_coefficients_of_adaptive_clipping_are_those_of_the_paper():
    from composer.algorithms.gradient_clipping.gradient_clipping import _get_clipped_gradient_coeff, _unitwise_norm

    weights = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    gradient = torch.tensor([[0.6, 0.8], [3.0, 4.0], [0.003, 0.004]])
    assert torch.equal(_unitwise_norm(weights), torch.tensor([[5.0], [0.0], [5.0]]))
    assert _unitwise_norm(torch.tensor([3.0, 4.0])) == 5
    coefficients = _get_clipped_gradient_coeff(weights, gradient)  # 0.01 * 5 / 1; zero weights do not move; at most 1
    torch.testing.assert_close(coefficients, torch.tensor([[0.05], [0.0], [1.0]]))


@pytest.mark.parametrize(
    ("clipping_type", "replaced", "name"),
    [
        ("norm", "torch.nn.utils.clip_grad_norm_", "max_norm"),
        ("value", "torch.nn.utils.clip_grad_value_", "clip_value"),
        ("adaptive", "composer.algorithms.gradient_clipping.gradient_clipping._apply_agc", "clipping_threshold"),
    ],
)
def test_what_clips_can_be_replaced_for_a_model_that_is_a_mock(monkeypatch, clipping_type, replaced, name):
    import composer.algorithms.gradient_clipping.gradient_clipping  # noqa: F401  # whose name is replaced

    model, clip = Mock(), Mock()
    monkeypatch.setattr(replaced, clip)
    cf.apply_gradient_clipping(model, clipping_type, clipping_threshold=0.5, fsdp_enabled=False)
    clip.assert_called_once_with(model.parameters.return_value, **{name: 0.5})


def test_private_names_that_published_projects_import():
    """llm-foundry and ModernBERT could not be imported: AttributeError for six names."""
    from composer.core.data_spec import _default_split_batch, _split_list
    from composer.loggers.mosaicml_logger import RUN_NAME_ENV_VAR
    from composer.optim.scheduler import (
        _convert_time,
        _raise_if_max_duration_exceeds_t_max,
        _raise_if_warmup_and_max_incompatible,
    )
    from composer.utils.checkpoint import _ensure_valid_checkpoint

    state = SimpleNamespace(max_duration=Time(4, "ep"), dataloader_len=Time(5, "ba"), timestamp=Timestamp())
    assert _convert_time("0.5dur", state) == Time(10, "ba")
    assert _convert_time("2ep", state, ssr=0.5) == Time(5, "ba")
    _raise_if_max_duration_exceeds_t_max("20ba", state)
    with pytest.raises(ValueError, match="greater than or equal to max_duration"):
        _raise_if_max_duration_exceeds_t_max(Time(19, "ba"), state)
    _raise_if_warmup_and_max_incompatible(Time(5, "ba"), Time(20, "ba"))
    with pytest.raises(ValueError, match="different units"):
        _raise_if_warmup_and_max_incompatible(Time(5, "sp"), Time(20, "ba"))
    assert _default_split_batch(torch.arange(3), 2)[1].tolist() == [2]
    assert _split_list([1, 2, 3], 2) == [[1, 2], [3]]
    assert RUN_NAME_ENV_VAR == "RUN_NAME"
    assert _ensure_valid_checkpoint("ep1-ba5.pt") == "ep1-ba5.pt"


def test_a_checkpoint_is_checked_by_the_function_that_the_environment_names(monkeypatch):
    from composer.utils.checkpoint import _ensure_valid_checkpoint

    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "os.path.exists")
    monkeypatch.setattr("os.path.exists", lambda path, specs: False)
    with pytest.raises(ValueError, match=r"ep1-ba5\.pt is refused"):
        _ensure_valid_checkpoint("ep1-ba5.pt")


def test_one_training_after_another_frees_the_state_and_the_engine():
    """The scripts of ModernBERT and MosaicBERT, which train one task after another, died after the first one."""
    model = ComposerClassifier(nn.Linear(2, 2), num_classes=2)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), batch_size=2),
        max_duration="1ba",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    atexit.unregister(trainer.engine._close)
    for key in list(trainer.state.__dict__):
        delattr(trainer.state, key)
    for key in list(trainer.__dict__):
        delattr(trainer, key)


def test_a_vocabulary_size_of_old_scripts_is_ignored():
    """Scripts of 2023 that pass it ended with a TypeError."""
    with pytest.warns(DeprecationWarning, match=r"LanguagePerplexity\(vocab_size=50257\)"):
        metric = LanguagePerplexity(ignore_index=0, vocab_size=50257)
    metric.update(torch.zeros(1, 2, 4), torch.tensor([[1, 0]]))
    assert metric.compute() == pytest.approx(4)
