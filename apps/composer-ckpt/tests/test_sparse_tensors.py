"""No command writes or compares a sparse tensor as what it consists of."""

import pytest
import torch

from composer_checkpoint import load_file

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Validating sparse tensor invariants")


@pytest.fixture
def saved(tmp_path):
    """Write a checkpoint with a sparse tensor, and return its path."""

    def save(name, adj):
        torch.save({"state": {"model": {"adj": adj, "w": torch.ones(2)}}}, tmp_path / name)
        return tmp_path / name

    return save


def test_another_size_is_a_difference(saved, run, run_json):
    adj = torch.eye(4).to_sparse()
    large = torch.sparse_coo_tensor(adj.indices(), adj.values(), (100, 100))
    a, b = saved("a.pt", adj), saved("b.pt", large)
    code, told = run_json("diff", a, b)
    assert code == 1
    assert told["shape"] == [{"name": "adj", "a": [4, 4], "b": [100, 100]}]
    code, out, _ = run("diff", a, a)
    assert (code, out.startswith("equal: 2 tensors")) == (0, True)


def test_values_are_compared_wherever_they_stand(saved, run_json):
    unsorted = torch.sparse_coo_tensor([[1, 0, 0], [1, 0, 0]], [1.0, 0.25, 0.75], (2, 2))
    a, b = saved("a.pt", torch.eye(2).to_sparse()), saved("b.pt", unsorted)
    assert run_json("diff", a, b)[1]["equal"]
    c = saved("c.pt", torch.tensor([[1.0, 3.0], [0.0, 1.0]]).to_sparse())
    code, told = run_json("diff", a, c)
    assert (code, told["value"][0]["max_abs"]) == (1, 3.0)
    d = saved("d.pt", torch.eye(2).to_sparse_csr())
    assert run_json("diff", a, d)[1]["dtype"] == [{"name": "adj", "a": "float32 sparse_coo", "b": "float32 sparse_csr"}]
    assert run_json("diff", d, d)[1]["equal"]
    rows = saved("rows.pt", torch.eye(2).to_sparse(1))
    assert run_json("diff", a, rows)[1]["error"]["message"].startswith("adj is a tensor of layout torch.sparse_coo")
    empty = saved("empty.pt", torch.zeros(2, 2).to_sparse())
    assert run_json("diff", empty, empty)[1]["equal"]
    assert not run_json("diff", empty, a)[1]["equal"]


def test_a_pt_keeps_it(saved, run, tmp_path):
    large = torch.sparse_coo_tensor([[0, 1], [2, 3]], [1.0, 2.0], (100, 100)).coalesce()
    assert run("convert", saved("a.pt", large), tmp_path / "b.pt", "--output-precision", "fp16")[0] == 0
    found = load_file(tmp_path / "b.pt")["state"]["model"]
    assert found.keys() == {"adj", "w"}
    assert (found["adj"].shape, found["adj"].dtype) == ((100, 100), torch.float16)
    assert torch.equal(found["adj"].to_dense(), large.half().to_dense())
    assert run("extract", tmp_path / "b.pt", tmp_path / "c.pt")[0] == 0
    assert torch.equal(load_file(tmp_path / "c.pt")["adj"].to_dense(), large.half().to_dense())


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "a.pt", "x.safetensors"),
        ("convert", "a.pt", "x.safetensors", "--dry-run"),
        ("convert", "a.pt", "x", "--to", "dcp"),
        ("convert", "a.pt", "x_rank{rank}.pt", "--to", "local", "--world-size", "2"),
        ("extract", "a.pt", "x.safetensors"),
        ("merge", "a.pt", "a.pt", "x.pt"),
    ],
)
def test_what_cannot_keep_it_refuses_it_by_its_name(arguments, saved, run, tmp_path, monkeypatch):
    saved("a.pt", torch.eye(4).to_sparse())
    monkeypatch.chdir(tmp_path)
    code, _, errors = run(*arguments)
    assert code == 1
    assert "adj is a tensor of layout torch.sparse_coo, and " in errors
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_it_is_shown_as_one(saved, run, run_json, tmp_path):
    a = saved("a.pt", torch.tensor([[0.0, -2.0], [0.0, 0.0]]).to_sparse())
    told = run_json("inspect", a, "--stats")[1]["tensors"][0]
    assert told["stats"] == {"min": -2.0, "max": 0.0, "mean": -0.5, "nan": 0, "inf": 0}
    assert (told["name"], told["shape"], told["layout"]) == ("state/model/adj", [2, 2], "sparse_coo")
    assert "adj  [2, 2] sparse_coo" in run("inspect", a)[1]
    code, told = run_json("verify", a, "--hash")
    assert (code, set(told["hashes"])) == (0, {"state/model/w"})
    assert "state/model/adj" in next(check["detail"] for check in told["checks"] if check["name"] == "hashed")
    run("extract", a, tmp_path / "a.json")
    assert '"layout": "sparse_coo"' in (tmp_path / "a.json").read_text()
