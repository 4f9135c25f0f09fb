"""What does not fit besides the weights: refused, with its name, before anything of the training state is changed."""

import copy

import pytest
import torch

from composer_checkpoint import (
    CheckpointError,
    IncompatibleCheckpointError,
    UnfittingOptimizerError,
    load_checkpoint,
    load_file,
    save_checkpoint,
    save_file,
)


@pytest.fixture
def change(loop, tmp_path):
    """Write a checkpoint of a training run with something else in one place."""
    run = loop(max_duration="2ep")
    run.fit()
    content = load_file(save_checkpoint(run.state, str(tmp_path / "whole.pt")), mmap=False)

    def write(where, value):
        changed = copy.deepcopy(content)
        *parents, name = where.split("/")
        part = changed
        for parent in parents:
            part = part[parent]
        part[name] = value
        save_file(changed, tmp_path / "changed.pt")
        return tmp_path / "changed.pt"

    return write


def everything(run):
    return copy.deepcopy((run.layer.state_dict(), run.state.optimizers[0].state_dict(), run.state.timestamp))


def assert_refused(run, path, error, match):
    before = everything(run)
    with pytest.raises(error, match=match) as caught:
        load_checkpoint(path, run.state, None)
    assert str(path) in str(caught.value)
    torch.testing.assert_close(everything(run)[:2], before[:2], rtol=0, atol=0)
    assert everything(run)[2] == before[2]


OPTIMIZER = "state/optimizers/AdamW"
CLOCK = "state/timestamp/Timestamp"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("state/model", 3),
        ("state/model", ["weight"]),
        ("state/model/weight", "x"),
        ("state/optimizers", 3),
        ("state/optimizers", ["AdamW"]),
        (OPTIMIZER, [1]),
        (f"{OPTIMIZER}/state", [1]),
        (f"{OPTIMIZER}/state", None),
        (f"{OPTIMIZER}/state", {"weight": 3}),
        (f"{OPTIMIZER}/param_groups", None),
        (f"{OPTIMIZER}/param_groups", [3]),
        (f"{OPTIMIZER}/param_groups", [{}]),
        (f"{OPTIMIZER}/param_groups", [{"params": 3}]),
        ("state/algorithms", 3),
        ("state/algorithms", "x"),
        ("state/algorithms", [1]),
        ("state/dataset_state", "x"),
        ("state/timestamp", 3),
        (CLOCK, 3),
        (CLOCK, {}),
        (f"{CLOCK}/batch", "x"),
        (f"{CLOCK}/batch", None),
        (f"{CLOCK}/batch", -1),
        (f"{CLOCK}/epoch", 1e300),
        (f"{CLOCK}/total_wct", "x"),
        (f"{CLOCK}/total_wct", 1e300),
        (f"{CLOCK}/total_wct", float("nan")),
    ],
)
def test_what_is_no_training_state_is_refused_before_anything_is_changed(loop, change, where, value):
    part = where.split("/")[1]
    assert_refused(loop(), change(where, value), IncompatibleCheckpointError, rf"state/{part}|of another model.*weight")


@pytest.mark.parametrize(
    ("where", "value"),
    [(f"{OPTIMIZER}/param_groups", None), (f"{OPTIMIZER}/param_groups", [3]), (f"{OPTIMIZER}/state", {"weight": 3})],
)
def test_the_advice_to_leave_out_a_part_of_an_optimizer_holds(loop, change, where, value):
    """Seen before: the very same advice again."""
    run, path = loop(max_duration="3ep"), change(where, value)
    with pytest.raises(IncompatibleCheckpointError) as caught:
        load_checkpoint(path, run.state, None)
    assert f"load_ignore_keys=['{where}']" in str(caught.value)
    load_checkpoint(path, run.state, None, ignore_keys=[where])
    assert run.state.timestamp.batch == 4
    run.fit()


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["weight"], r"its AdamW has no state of 'bias' \(1 such parameters in all\), which is optimized now"),
        (["weight", "bias", "extra"], r"its AdamW has the parameter 'extra' \(1 in all\), which is not optimized now"),
        ([0, 1, 2], r"its AdamW has groups of \[3\] parameters, and now of \[2\]"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused_before_anything_is_changed(loop, change, names, match):
    path = change(f"{OPTIMIZER}/param_groups", [{"params": names, "lr": 0.1}])
    assert issubclass(UnfittingOptimizerError, CheckpointError)
    assert_refused(loop(), path, UnfittingOptimizerError, match)
    with pytest.raises(KeyError):  # which is what Composer raises
        load_checkpoint(path, loop().state, None)
    load_checkpoint(path, loop().state, None, load_weights_only=True)


def test_parameters_in_another_order_get_their_own_state(loop, tmp_path):
    run = loop(max_duration="2ep")
    run.fit()
    path = save_checkpoint(run.state, str(tmp_path / "x.pt"))
    layer = torch.nn.Linear(2, 1)
    again = loop(model=layer, optimizers=torch.optim.AdamW([layer.bias, layer.weight], lr=0.7))
    load_checkpoint(path, again.state, None)
    for name in ("weight", "bias"):
        expected = run.state.optimizers[0].state[getattr(run.layer, name)]
        torch.testing.assert_close(again.state.optimizers[0].state[getattr(layer, name)], expected, rtol=0, atol=0)
