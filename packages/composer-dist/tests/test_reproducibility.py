import json
import os
import random
import re
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_dist import (
    MAX_SEED,
    configure_deterministic_mode,
    dist,
    get_random_seed,
    get_rng_state,
    load_rng_state,
    seed_all,
    seed_context,
)
from composer_dist.testing import run_ranks


def draws():
    """One draw from each generator that is installed."""
    numbers = [random.random(), torch.rand(()).item()]
    if find_spec("numpy"):
        import numpy  # torch does without it

        numbers.append(numpy.random.rand())
    return numbers


@given(st.integers(0, MAX_SEED))
def test_the_same_seed_gives_the_same_draws(seed):
    seed_all(seed)
    first = draws()
    seed_all(seed)
    assert draws() == first


@pytest.mark.parametrize("seed", [0, MAX_SEED])
def test_the_bounds_are_valid_seeds(seed):
    seed_all(seed)
    assert torch.initial_seed() == seed


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=f"Invalid seed: seed={seed} is not between 0 and 4294967295"):
        seed_all(seed)


@pytest.mark.parametrize("seed", [torch.tensor(5), True])
def test_a_seed_may_be_any_integer(seed):
    seed_all(seed)
    assert torch.initial_seed() == int(seed)


def test_a_seed_may_be_numpys():
    numpy = pytest.importorskip("numpy")
    seed_all(numpy.int64(5))
    first = draws()
    seed_all(5)
    assert draws() == first


@pytest.mark.parametrize("seed", [1.0, "7", None])
def test_a_seed_that_is_no_integer_is_refused(seed):
    kind = type(seed).__name__
    with pytest.raises(TypeError, match=f"seed={seed!r} is a {kind}, not an integer between 0 and 4294967295. Pass"):
        seed_all(seed)


def test_seeding_does_without_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    seed_all(3)
    state = get_rng_state()
    assert state[0].keys() == {"python", "torch"}
    first = torch.rand(3)
    load_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_random_seeds_ignore_the_seed_in_force():
    seeds = set()
    for _ in range(4):
        seed_all(1)
        seeds.add(get_random_seed())
    assert len(seeds) == 4  # fails once in 700 million runs
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_a_random_seed_draws_from_no_generator_of_training():
    seed_all(1)
    expected = draws()
    seed_all(1)
    get_random_seed()
    assert draws() == expected


def test_a_saved_state_repeats_the_draws():
    state = get_rng_state()
    first = draws()
    load_rng_state(state)
    assert draws() == first


def test_a_saved_state_may_have_gone_through_json():
    seed_all(5)
    state = get_rng_state()[0]
    as_json = json.loads(json.dumps({"python": state["python"]}))
    first = draws()
    load_rng_state([{**state, **as_json}])
    assert draws() == first


def test_a_saved_state_may_have_gone_through_a_file_that_holds_no_code(tmp_path):
    state = get_rng_state()
    first = draws()
    torch.save(state, tmp_path / "rng.pt")
    load_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draws() == first


def test_a_numpy_state_as_numpy_gives_it_is_restored_too():
    numpy = pytest.importorskip("numpy")
    state = get_rng_state()[0] | {"numpy": numpy.random.get_state()}
    first = draws()
    load_rng_state([state])
    assert draws() == first


def test_a_list_without_entries_is_refused():
    with pytest.raises(ValueError, match=r"rng_state_dicts=\[\] holds no rank's random state. Pass what get_rng_state"):
        load_rng_state([])


@pytest.mark.parametrize(
    ("keys", "complaint"), [([], "no 'python' and no 'torch', only []"), (["python"], "no 'torch', only ['python']")]
)
def test_an_incomplete_entry_is_refused_before_anything_is_restored(keys, complaint):
    state = get_rng_state()[0]
    random.random()
    before = random.getstate()
    with pytest.raises(ValueError, match=re.escape(f"rng_state_dicts[0] has {complaint}")):
        load_rng_state([{key: state[key] for key in keys}])
    assert random.getstate() == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_seed_context_gives_the_generators_back_as_they_were(fails):
    seed_all(1)
    expected = draws()
    seed_all(1)
    try:
        with seed_context(2):
            inside = draws()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert draws() == expected
    seed_all(2)
    assert draws() == inside


def test_a_longer_list_restores_this_ranks_entry_with_a_warning():
    seed_all(1)
    state = get_rng_state()[0]
    first = draws()
    seed_all(2)
    other = get_rng_state()[0]
    with pytest.warns(UserWarning, match="random state of 2 ranks is loaded into a run of 1") as caught:
        load_rng_state([state, other])
    assert caught[0].filename == __file__
    assert draws() == first


def test_a_rank_beyond_the_list_keeps_its_state(environ):
    state = get_rng_state()[0]
    environ.update(WORLD_SIZE="2", RANK="1")
    seed_all(9)
    first = draws_of_torch_and_python()
    seed_all(9)
    with pytest.warns(UserWarning, match="random state of 1 ranks is loaded into a run of 2.* Ranks 1 and up keep"):
        load_rng_state([state])
    assert draws_of_torch_and_python() == first


def draws_of_torch_and_python():
    return random.random(), torch.rand(()).item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the state would be used")
def test_a_cuda_state_without_cuda_is_pointed_out():
    state = get_rng_state()[0] | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    with pytest.warns(UserWarning, match="saved CUDA random state is not used"):
        load_rng_state([state])


def test_a_numpy_state_without_numpy_is_pointed_out(monkeypatch):
    state = get_rng_state()[0] | {"numpy": ("MT19937", [0] * 624, 0, 0, 0.0)}
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.warns(UserWarning, match="NumPy is not installed"):
        load_rng_state([state])


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_states_are_restored_or_pointed_out():
    torch.cuda.init()
    state = get_rng_state()[0]
    first = torch.rand(3, device="cuda")
    load_rng_state([state])
    assert torch.equal(torch.rand(3, device="cuda"), first)
    load_rng_state([state | {"cuda": torch.cat([torch.zeros(800, dtype=torch.uint8), state["cuda"]])}])
    assert torch.equal(torch.rand(3, device="cuda"), first)
    with pytest.warns(UserWarning, match="of 3 bytes does not fit"):
        load_rng_state([state | {"cuda": torch.zeros(3, dtype=torch.uint8)}])
    with pytest.warns(UserWarning, match="no CUDA random state was saved"):
        load_rng_state([{key: value for key, value in state.items() if key != "cuda"}])


def test_deterministic_mode_is_on_for_the_whole_process(torch_settings):
    configure_deterministic_mode()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def save_draw_and_restore():
    seed_all(10 + dist.get_global_rank())
    state = get_rng_state()
    first = torch.rand(()).item()
    load_rng_state(state)
    return len(state), first, torch.rand(()).item()


def test_every_rank_gets_its_own_state_back(tmp_path):
    for rank, (count, first, again) in enumerate(run_ranks(save_draw_and_restore, store=tmp_path / "store")):
        generator = torch.Generator().manual_seed(10 + rank)
        assert count == 2
        assert first == again == torch.rand((), generator=generator).item()
