import pytest
import torch

from composer_checkpoint import CorruptCheckpointError, safe_torch_load, save_file
from composer_dist import dist
from composer_dist.testing import run_ranks


def load_on_rank_0(path):
    found = safe_torch_load(path, load_monolith_rank0_only=True)
    model, optimizers = found["state"]["model"], found["state"]["optimizers"]
    return dist.get_global_rank(), model is None, optimizers is None, found["state"]["run_name"], len(found["rng"])


def test_rank_0_reads_for_all_and_the_others_get_no_weights(tmp_path):
    state = {"state": {"model": {"w": torch.ones(2)}, "optimizers": {}, "run_name": "blue-fox"}, "rng": [{}, {}]}
    save_file(state, tmp_path / "x.pt")
    found = run_ranks(load_on_rank_0, tmp_path / "x.pt", store=tmp_path / "store", world_size=2)
    assert found == [(0, False, False, "blue-fox", 2), (1, True, True, "blue-fox", 2)]


def refusal_of_rank(path):
    with pytest.raises(CorruptCheckpointError) as caught:
        safe_torch_load(path, load_monolith_rank0_only=True)
    return str(caught.value)


def test_a_damaged_file_is_refused_alike_on_every_rank(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"")
    found = run_ranks(refusal_of_rank, tmp_path / "x.pt", store=tmp_path / "store", world_size=2)
    assert found[0] == found[1]
    assert "is empty" in found[0]
