import subprocess
import sys

import pytest
import torch.distributed as tdist

from composer_dist import dist, env
from composer_dist.testing import run_ranks

NUMBERS = {
    "WORLD_SIZE": env.get_world_size,
    "RANK": env.get_global_rank,
    "LOCAL_WORLD_SIZE": env.get_local_world_size,
    "LOCAL_RANK": env.get_local_rank,
    "NODE_RANK": env.get_node_rank,
}


@pytest.mark.parametrize(
    ("variable", "alone"),
    [("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("NODE_RANK", 0)],
)
def test_a_process_that_nobody_launched_is_alone(variable, alone):
    assert NUMBERS[variable]() == alone


@pytest.mark.parametrize("variable", NUMBERS)
def test_the_launchers_variable_gives_the_number(variable, environ):
    environ[variable] = "5"
    assert NUMBERS[variable]() == 5


@pytest.mark.parametrize("variable", NUMBERS)
def test_a_variable_that_is_no_integer_is_named_with_its_value(variable, environ):
    environ[variable] = "two"
    with pytest.raises(ValueError, match=f"{variable}='two' is not an integer"):
        NUMBERS[variable]()


@pytest.mark.parametrize(
    ("settings", "variable", "number"),
    [
        ({"SLURM_NTASKS_PER_NODE": "8"}, "LOCAL_WORLD_SIZE", 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "LOCAL_WORLD_SIZE", 4),
        ({"SLURM_NTASKS_PER_NODE": "8(x2)", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "LOCAL_WORLD_SIZE", 4),
        ({"SLURM_LOCALID": "3"}, "LOCAL_RANK", 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "LOCAL_RANK", 2),
        ({"GROUP_RANK": "6", "SLURM_NODEID": "1"}, "NODE_RANK", 6),
        ({"SLURM_NODEID": "1"}, "NODE_RANK", 1),
        ({"RANK": "7", "LOCAL_WORLD_SIZE": "2"}, "NODE_RANK", 3),
        ({"RANK": "7"}, "NODE_RANK", 0),
        ({"SLURM_LOCALID": "3", "LOCAL_RANK": "1"}, "LOCAL_RANK", 1),
    ],
)
def test_other_launchers_are_asked_where_the_variable_is_missing(settings, variable, number, environ):
    environ.update({"RANK": "0"} | settings)
    assert NUMBERS[variable]() == number


SLURM_OR_OPEN_MPI = {
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "GROUP_RANK": "1",
}


def test_numbers_of_a_process_without_a_rank_do_not_contradict_each_other(environ):
    environ.update(SLURM_OR_OPEN_MPI)
    numbers = {variable: number() for variable, number in NUMBERS.items()}
    assert numbers == {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "NODE_RANK": 0}


def test_other_launchers_are_asked_inside_a_process_group(environ, group_of_one):
    environ.update(SLURM_OR_OPEN_MPI)
    assert (env.get_local_world_size(), env.get_local_rank(), env.get_node_rank()) == (4, 3, 1)


def test_a_process_group_knows_rank_and_world_size_without_variables(group_of_one):
    assert (env.get_global_rank(), env.get_world_size()) == (0, 1)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "RANK"])
def test_a_variable_that_contradicts_the_process_group_is_an_error(variable, environ, group_of_one):
    environ[variable] = "7"
    with pytest.raises(RuntimeError, match=f"{variable}='7' .*contradicts torch.distributed, which says [01]"):
        NUMBERS[variable]()


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"])
def test_a_process_group_needs_somebody_to_tell_the_place_in_the_node(variable, group_of_one):
    with pytest.raises(env.MissingEnvironmentError, match=f"environment variable {variable} is not set.*`composer`"):
        NUMBERS[variable]()


def test_torch_without_its_distributed_package_means_alone(environ, monkeypatch):
    environ["RANK"] = "3"
    monkeypatch.setattr(dist.dist, "is_available", lambda: False)
    assert env.get_global_rank() == 0


def test_rank_numbers_are_known_without_importing_torch():
    code = (
        "import sys, composer_dist; from composer_dist.env import get_world_size\n"
        "assert composer_dist.get_global_rank() == 0 and get_world_size() == 1\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def rank_in_a_group_of_the_second():
    group = tdist.new_group([1])
    return env.get_global_rank(), env.get_global_rank(group), env.get_local_rank(), env.get_node_rank()


def test_ranks_know_their_number_among_all_and_in_a_group(tmp_path):
    assert run_ranks(rank_in_a_group_of_the_second, store=tmp_path / "store") == [(0, -1, 0, 0), (1, 0, 1, 0)]
