"""`merge` averages weights, one tensor after the other, in whatever formats they are."""

import math

import pytest
import torch

from composer_checkpoint import load_file, save_file, save_sharded


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, generator=generator)
    half = torch.randn(500, generator=generator).bfloat16()
    model = {"weight": weight, "tied": weight, "half": half, "count": torch.tensor(seed)}
    return {"state": {"model": model, "timestamp": {"Timestamp": {"batch": seed}}}}


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Save three checkpoints to the current folder, in two formats, and return their weights."""
    monkeypatch.chdir(tmp_path)
    save_file(state(1), "a.pt")
    save_sharded(state(2), "b")
    save_file(state(3), "c.pt")
    return [state(seed)["state"]["model"] for seed in (1, 2, 3)]


@pytest.mark.parametrize(("more", "shares"), [([], [1 / 3] * 3), (["--weights", "2,1,1"], [0.5, 0.25, 0.25])])
def test_weights_are_averaged_and_rounded_once(more, shares, three, run_json):
    code, told = run_json("merge", "a.pt", "b", "c.pt", "out.pt", *more)
    assert code == 0
    assert [source["weight"] for source in told["sources"]] == shares
    found = load_file("out.pt")["state"]
    assert found.keys() == {"model"}
    for name in ("weight", "half"):
        exact = sum(share * model[name].double() for share, model in zip(shares, three, strict=True))
        rounded = exact.to(three[0][name].dtype)
        # Sums of half precision are rounded to float32 on the way, which a tie in bfloat16 may show.
        torch.testing.assert_close(found["model"][name], rounded, rtol=2**-7 if name == "half" else 2**-23, atol=1e-7)
    assert found["model"]["count"] == 1


def test_what_all_of_them_tie_stays_tied(three, run):
    assert run("merge", "a.pt", "c.pt", "out.pt")[0] == 0
    found = load_file("out.pt")["state"]["model"]
    assert found["weight"].data_ptr() == found["tied"].data_ptr()


def test_options_may_stand_between_the_paths(three, run_json):
    code, told = run_json("merge", "a.pt", "--weights", "3,1", "c.pt", "--overwrite", "out.pt")
    assert code == 0
    assert [source["weight"] for source in told["sources"]] == [0.75, 0.25]


def test_one_of_all_is_that_one(three, run):
    assert run("merge", "a.pt", "b", "out.pt", "--weights", "0,5")[0] == 0
    assert run("diff", "b", "out.pt", "--keys", "*weight*")[0] == 0


def test_an_average_goes_where_a_conversion_goes(three, run):
    assert run("merge", "a.pt", "b", "out", "--to", "dcp", "--world-size", "2")[0] == 0
    assert run("merge", "a.pt", "b", "out.safetensors", "--include", "weight")[0] == 0
    assert run("diff", "out", "out.safetensors", "--keys", "weight")[0] == 0
    assert run("merge", "a.pt", "b", "out.safetensors")[0] == 1
    assert run("merge", "a.pt", "b", "dry.pt", "--dry-run")[0] == 0


def test_checkpoints_of_other_models_are_refused(three, run):
    save_file({"state": {"model": {"weight": torch.ones(4, 3), "more": torch.ones(1), "half": torch.ones(2)}}}, "d.pt")
    code, _, errors = run("merge", "a.pt", "d.pt", "out.pt")
    assert code == 1
    assert "2 only in a.pt: tied, count" in errors
    assert "1 only in d.pt: more" in errors
    assert "1 of another shape: half" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.pt", "out.pt"], "two checkpoints or more"),
        (["a.pt", "b", "out.pt", "--weights", "1"], "1 numbers for 2 checkpoints"),
        (["a.pt", "b", "out.pt", "--weights", "1,x"], "not a list of numbers"),
        (["a.pt", "b", "out.pt", "--weights=-1,2"], "not a list of numbers"),
        (["a.pt", "b", "out.pt", "--weights", f"1,{math.inf}"], "not a list of numbers"),
        (["a.pt", "b", "b", "--to", "dcp", "--overwrite"], "is or contains a source"),
        (["a.pt", "none.pt", "out.pt"], "none.pt"),
        (["a.pt", "b", "out.pt", "--max-shard-size", "5GB"], "--max-shard-size does not apply to DST, which is pt"),
        (["a.pt", "b", "out.pt", "--trust-remote-code"], "--trust-remote-code does not apply to composer and pt"),
    ],
)
def test_arguments_that_do_not_fit_are_usage_errors(arguments, words, three, run):
    code, _, errors = run("merge", *arguments)
    assert code == 2
    assert words in errors
