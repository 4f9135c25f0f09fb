import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_dist.launch.args import CLUSTERS
from composer_dist.launch.main import main
from composer_dist.launch.topology import expand_nodelist, infer

SLURM = {
    "SLURM_JOB_ID": "41234",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "n[03-05],m7",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "COMPOSER_NUM_NODES": "4", "COMPOSER_MASTER_ADDR": "train-0.train"}
OPERATOR = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "train-master-0",
    "PET_MASTER_PORT": "23456",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "2"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "4",
    "SKYPILOT_NODE_RANK": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.3\n10.0.0.9\n10.0.0.4",
}
ADDRESS = {"MASTER_ADDR": "h", "MASTER_PORT": "7"}

# Variables, then address and port of rank 0. 20000 + 41234 mod 20000 = 21234.
SYSTEMS = [
    (SLURM | {"SLURM_GPUS_ON_NODE": "8"}, "n03", 21234),
    (KUBERNETES | {"LOCAL_WORLD_SIZE": "8"}, "train-0.train", 29500),
    (OPERATOR, "train-master-0", 23456),
    (SKYPILOT, "10.0.0.7", 29500),
    (OPEN_MPI | ADDRESS | {"LOCAL_WORLD_SIZE": "8"}, "h", 7),
    (PMI | ADDRESS | {"LOCAL_WORLD_SIZE": "8"}, "h", 7),
]

hosts = st.lists(
    st.tuples(st.from_regex(r"[a-z]{1,3}", fullmatch=True), st.integers(0, 999), st.integers(1, 4)),
    min_size=1,
    max_size=5,
)


@pytest.fixture
def dry_run(environ, capsys):
    """Return a function that says what a command line would do in an environment."""

    def run(variables, arguments=""):
        environ.update(variables)
        status = main([*arguments.split(), "--dry_run", "s.py"])
        said = capsys.readouterr()
        return json.loads(said.out) if status == 0 else said.err

    return run


@pytest.mark.parametrize(("variables", "addr", "port"), SYSTEMS)
def test_a_clusters_variables_give_this_node_its_ranks(dry_run, variables, addr, port):
    topology = {name: entry["value"] for name, entry in dry_run(variables)["topology"].items()}
    expected = {"nproc": 8, "world_size": 32, "base_rank": 16, "node_rank": 2, "master_addr": addr, "master_port": port}
    assert topology == expected


def test_options_and_classic_variables_come_before_the_cluster(dry_run):
    classic = {"MASTER_ADDR": "other", "NODE_RANK": "0"}
    topology = dry_run(SLURM | classic, "-n 2 --world_size 6 --master_port 9")["topology"]
    assert [entry["value"] for entry in topology.values()] == [2, 6, 0, 0, "other", 9]
    assert topology["node_rank"]["source"] == "NODE_RANK"


def test_a_clusters_variables_are_read_only_for_what_is_not_known(dry_run):
    broken = {"SLURM_JOB_NODELIST": "n[1-", "SLURM_NODEID": "two", "SLURM_LOCALID": "1"}
    everything = "-n 2 --world_size 4 --node_rank 1 --master_addr h --master_port 9"
    assert dry_run(SLURM | broken, everything)["topology"]["base_rank"]["value"] == 2
    known = {"WORLD_SIZE": "8", "NODE_RANK": "1", "MASTER_ADDR": "h"}
    broken = {"SLURM_JOB_NODELIST": "n[1-", "SLURM_NODEID": "two", "SLURM_LOCALID": "0"}
    topology = dry_run(SLURM | broken | known, "-n 2")["topology"]
    assert [entry["value"] for entry in topology.values()] == [2, 8, 2, 1, "h", 21234]


def test_a_step_may_have_fewer_nodes_than_its_job(dry_run):
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[04-05]", "SLURM_NODEID": "1"}
    topology = dry_run(SLURM | step, "-n 2")["topology"]
    assert topology["world_size"]["value"] == 4
    assert topology["master_addr"]["value"] == "n04"


def test_a_cluster_of_one_node_is_a_single_node(dry_run):
    topology = dry_run({"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n1"}, "-n 2")["topology"]
    assert topology["master_addr"]["value"] == "127.0.0.1"


@pytest.mark.parametrize("arguments", ["-n 2 --cluster none", "-n 2 --world_size 2"])
def test_a_run_on_one_node_of_a_cluster_stays_possible(dry_run, arguments):
    assert dry_run(SLURM, arguments)["topology"]["world_size"]["value"] == 2


@pytest.mark.parametrize("word", ["auto", "gpu"])
def test_an_operator_that_leaves_the_number_of_processes_open_is_followed(word):
    assert infer("auto", OPERATOR | {"PET_NPROC_PER_NODE": word}).nproc() is None


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_named_cluster_whose_variables_are_missing_is_an_error(cluster):
    with pytest.raises(ValueError, match=f"--cluster='{cluster}' needs the environment variables"):
        infer(cluster, {})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (SLURM | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID='1': several launchers were started on this node"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, "mpirun --map-by ppr:1:node"),
        (PMI | {"MPI_LOCALRANKID": "1"}, "several launchers"),
        (SLURM | {"SLURM_NODEID": "two"}, "SLURM_NODEID='two' is not an integer"),
        (OPEN_MPI, "master_addr is not known"),
        (SLURM | {"SLURM_JOB_NODELIST": "n[1-"}, r"the list of nodes 'n\[1-'"),
    ],
)
def test_variables_that_cannot_be_followed_are_named(dry_run, variables, words):
    assert words.replace("\\", "") in dry_run(variables, "-n 2")


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("n1", ["n1"]),
        ("n[01-04,7],m3", ["n01", "n02", "n03", "n04", "n7", "m3"]),
        ("rack[1-2]n[8-10]", ["rack1n8", "rack1n9", "rack1n10", "rack2n8", "rack2n9", "rack2n10"]),
        ("a-[098-101]x,b", ["a-098x", "a-099x", "a-100x", "a-101x", "b"]),
    ],
)
def test_slurms_short_form_of_a_list_is_written_out(nodelist, expected):
    assert expand_nodelist(nodelist) == expected


@given(hosts)
def test_a_list_without_ranges_is_itself(entries):
    names = [f"{name}{number:0{width}d}" for name, number, width in entries]
    assert expand_nodelist(",".join(names)) == names
    assert expand_nodelist(",".join(f"{name}[{number:0{width}d}]" for name, number, width in entries)) == names


@given(st.from_regex(r"[a-z]{1,3}", fullmatch=True), st.integers(0, 120), st.integers(0, 30), st.integers(1, 4))
def test_a_range_is_every_number_of_it_with_the_zeros_of_the_first(name, low, more, width):
    expected = [f"{name}{number:0{width}d}" for number in range(low, low + more + 1)]
    assert expand_nodelist(f"{name}[{low:0{width}d}-{low + more}]") == expected


@pytest.mark.parametrize("nodelist", ["", "n[1-", "n[1]]", "n[a-b]", "n 1", "n[-3]", "n[1,,2]", ","])
def test_a_list_that_slurm_would_not_write_is_refused(nodelist):
    with pytest.raises(ValueError, match="the list of nodes"):
        expand_nodelist(nodelist)
