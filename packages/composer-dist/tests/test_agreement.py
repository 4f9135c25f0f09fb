import re
import time

import pytest
import torch

from composer_dist import RankDisagreementError, check_agreement, describe_model, dist
from composer_dist.testing import run_ranks


def raised(facts, **options):
    try:
        check_agreement(facts, **options)
    except (RankDisagreementError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def facts_in_several_shapes():
    rank = dist.get_global_rank()
    same = {"seed": 17, "model": describe_model(torch.nn.Linear(2, 1)), "sizes": [1, 2], "none": {}}
    reordered = dict(reversed(same.items()))
    layer = torch.nn.Linear(2 + rank // 2, 1)
    differing = {
        "seed": 17,
        "optimizer": {"lr": 0.01 if rank == 2 else 0.1, "betas": (0.9, 0.99)},
        "model": describe_model(layer),
        **({"checkpoint": "ba5.pt"} if rank == 1 else {}),
        "long": "x" * 10_000 + str(rank),
    }
    many = {f"fact {number}": rank for number in range(100)}
    return raised(same if rank else reordered), raised(differing), raised(many)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(facts_in_several_shapes, store=tmp_path_factory.mktemp("agreement") / "store", world_size=3)


def test_equal_facts_pass_in_any_order(ranks):
    assert [same for same, _, _ in ranks] == [None, None, None]


def test_differing_facts_are_one_error_on_every_rank(ranks):
    (_, first, _), *others = ranks
    assert all(differing == first for _, differing, _ in others)
    kind, text = first
    assert kind == "RankDisagreementError"
    assert "optimizer.lr: 0.1 on ranks 0-1, 0.01 on rank 2" in text
    assert "model.weight: '(1, 2) float32' on ranks 0-1, '(1, 3) float32' on rank 2" in text
    assert "checkpoint: nothing on ranks 0, 2, 'ba5.pt' on rank 1" in text
    assert "seed" not in text
    assert "model.bias" not in text


def test_an_error_has_a_length_that_a_person_can_read(ranks):
    _, (_, differing), (_, many) = ranks[0]
    assert len(differing) < 2000
    assert "fact 19:" in many
    assert "fact 20:" not in many
    assert "and 80 more" in many


def test_a_process_that_is_alone_agrees_with_itself():
    check_agreement({"seed": 1})


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_agrees_with_itself():
    check_agreement({"seed": 1})


def test_the_error_is_a_value_error():
    assert issubclass(RankDisagreementError, ValueError)


def one_rank_stays_away(release):
    if dist.get_global_rank() == 1:
        while not release.exists():  # until rank 0 has given up
            time.sleep(0.01)
        return None
    try:
        return raised({"seed": 1}, timeout_s=0.5)
    finally:
        release.touch()


def test_a_rank_that_does_not_come_is_named(tmp_path):
    (kind, text), _ = run_ranks(one_rank_stays_away, tmp_path / "release", store=tmp_path / "store")
    assert kind == "RuntimeError"
    assert "rank 0 waited 0.5 s for the other ranks" in text
    assert re.search(r"[Rr]anks 1 failed", text)


def test_a_model_is_described_by_everything_but_its_numbers():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.BatchNorm1d(3).half())
    model[0].weight.requires_grad_(False)
    assert describe_model(model) == {
        "0.weight": "(3, 2) float32 frozen",
        "1.weight": "(3,) float16",
        "1.bias": "(3,) float16",
        "1.running_mean": "(3,) float16 buffer",
        "1.running_var": "(3,) float16 buffer",
        "1.num_batches_tracked": "() int64 buffer",
    }


def test_a_layer_that_waits_for_its_first_batch_is_described():
    assert describe_model(torch.nn.LazyLinear(3))["weight"] == "no shape yet float32"
