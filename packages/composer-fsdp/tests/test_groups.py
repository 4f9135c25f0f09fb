import pytest
import torch.distributed as tdist
from hypothesis import given
from hypothesis import strategies as st

from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_fsdp.groups import GroupCache, ranks_of

sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))
EXPECTED = {
    "self": [[0], [1], [2], [3]],
    "set1": [[0], [1], [2], [3]],
    "node": [[0, 1, 2, 3]] * 4,
    "local_rank_across_nodes": [[0], [1], [2], [3]],
    "set2": [[0, 1], [0, 1], [2, 3], [2, 3]],
    "mod2": [[0, 2], [1, 3], [0, 2], [1, 3]],
    "set4": [[0, 1, 2, 3]] * 4,
    "mod1": [[0, 1, 2, 3]] * 4,
}


@given(kind=st.sampled_from(["set", "mod"]), size=sizes)
def test_named_groups_deal_out_all_ranks(kind, size):
    members, num_groups = size
    world_size = members * num_groups
    name = f"{kind}{members if kind == 'set' else num_groups}"
    groups = {tuple(ranks_of(name, rank, world_size, world_size)) for rank in range(world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(world_size))
    assert {len(group) for group in groups} == {members}


def test_names_of_nodes_follow_the_ranks_of_a_node():
    assert ranks_of("node", 5, 8, 4) == [4, 5, 6, 7]
    assert ranks_of("local_rank_across_nodes", 5, 8, 4) == [1, 5]


def members_of_groups(names):
    cache = GroupCache()
    seen = [sorted(tdist.get_process_group_ranks(cache.get(name))) for name in names]
    own = [0, 3] if dist.get_global_rank() in (0, 3) else [1, 2]
    listed = sorted(tdist.get_process_group_ranks(cache.get(own)))
    is_shared = cache.get("set2") is cache.get("set2") and cache.get(own) is cache.get(own)
    with pytest.raises(ValueError, match="does not fit the other ranks' lists") as refusal:
        cache.get([0, 1])
    return seen, listed, is_shared, str(refusal.value).partition(" on rank")[0]


def test_ranks_meet_in_the_groups_that_the_names_say(tmp_path):
    ranks = run_ranks(members_of_groups, list(EXPECTED), store=tmp_path / "store", world_size=4)
    for rank, (seen, listed, is_shared, _) in enumerate(ranks):
        assert seen == [EXPECTED[name][rank] for name in EXPECTED]
        assert listed == ([0, 3] if rank in (0, 3) else [1, 2])
        assert is_shared
    assert len({refusal for *_, refusal in ranks}) == 1
