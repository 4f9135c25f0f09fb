import collections
import datetime

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from composer_checkpoint import UnsafeCheckpointError, load_file, safe_torch_load


def composer_file(**state):
    """The layout that Composer 0.10 to 0.32 wrote, with the objects that were in it."""
    model = collections.OrderedDict({"module.weight": torch.ones(2, 3), "module.bias": torch.zeros(2)})
    model._metadata = collections.OrderedDict({"": {"version": 1}})
    return {
        "state": {
            "model": model,
            "optimizers": {
                "DecoupledAdamW": {
                    "state": {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
                    "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": ["weight", "bias"]}],
                }
            },
            "algorithms": [("EMA", {"repr": "EMA(half_life='10ba')", "ema_started": True})],
            "timestamp": {"Timestamp": {"epoch": 1, "batch": 7, "total_wct": datetime.timedelta(seconds=12.5)}},
            "rank_zero_seed": 17,
            "metadata": {"torch_version": TorchVersion("2.1.0"), "world_size": 8},
            **state,
        },
        "rng": [{"python": (3, (1, 2), None), "numpy": np.random.RandomState(0).get_state()}],
    }


LAYOUTS = {
    "0.10": composer_file(),
    "0.14, metrics as arrays": composer_file(
        train_metrics={
            "Accuracy": {"state_dict": {"correct": np.array([3]), "total": np.float64(4)}, "_computed": None}
        }
    ),
    "0.16, arrays of other orders and bytes": composer_file(
        eval_metrics={"eval": {"A": {"t": np.asfortranarray(np.ones((2, 3))), "b": np.arange(3, dtype=">i4")}}}
    ),
    "0.22, counters and sets": composer_file(dataset_state={"train": {"seen": {1, 2}, "c": collections.Counter("ab")}}),
    "0.32": composer_file(dataset_state={"train": None, "eval": {}}, callbacks={"LRMonitor": {}}),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("version", LAYOUTS)
def test_a_file_in_the_layout_of_composer_loads(tmp_path, version, legacy):
    path = tmp_path / "ep1-ba7-rank0.pt"
    torch.save(LAYOUTS[version], path, _use_new_zipfile_serialization=not legacy)
    found = safe_torch_load(path)
    assert found["state"]["timestamp"]["Timestamp"]["total_wct"] == datetime.timedelta(seconds=12.5)
    assert found["state"]["metadata"]["torch_version"] == "2.1.0"
    assert torch.equal(found["state"]["model"]["module.weight"], torch.ones(2, 3))
    assert found["state"]["model"]._metadata[""] == {"version": 1}
    assert found["state"].keys() == LAYOUTS[version]["state"].keys()
    np.testing.assert_array_equal(found["rng"][0]["numpy"][1], np.random.RandomState(0).get_state()[1])


def test_the_arrays_of_old_metrics_have_their_values(tmp_path):
    torch.save(LAYOUTS["0.16, arrays of other orders and bytes"], tmp_path / "x.pt")
    metrics = load_file(tmp_path / "x.pt")["state"]["eval_metrics"]["eval"]["A"]
    np.testing.assert_array_equal(metrics["t"], np.ones((2, 3)))
    assert metrics["b"].tolist() == [0, 1, 2]


def test_metrics_as_objects_are_refused_with_the_name_of_their_class(tmp_path):
    torch.save(composer_file(train_metrics={"Accuracy": collections.UserDict()}), tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"asks for collections\.UserDict"):
        load_file(tmp_path / "x.pt")
    assert load_file(tmp_path / "x.pt", trusted=True)["state"]["train_metrics"]["Accuracy"] == {}


@pytest.mark.parametrize("part", range(40))
def test_a_file_of_torch_before_1_6_that_is_cut_is_refused(tmp_path, part):
    torch.save(LAYOUTS["0.10"], tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(whole[: 1 + part * len(whole) // 41])
    with pytest.raises(Exception, match=r"x\.pt: .*Load another checkpoint|x\.pt.*trusted"):
        load_file(tmp_path / "x.pt")
