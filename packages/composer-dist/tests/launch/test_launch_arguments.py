import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from composer_dist.launch.args import parse_options
from composer_dist.launch.guardian import new_launch_id
from composer_dist.launch.main import find_command, main
from composer_dist.launch.topology import resolve, resolve_nproc

HERE = "127.0.0.1"
MEET = "--master_addr h --master_port 1"


@pytest.fixture
def place():
    """Return a function that says which ranks a command line and an environment give to this node."""

    def find(arguments, environment="", accelerators=0):
        environ = dict(pair.split("=") for pair in environment.split())
        options = parse_options([*arguments.split(), "script.py"])
        return resolve(options, environ, resolve_nproc(options, environ, lambda: accelerators))

    return find


# Environment, arguments, and (nproc, world size, base rank, node rank, address).
PLACES = [
    ("", "", (1, 1, 0, 0, HERE)),
    ("LOCAL_WORLD_SIZE=4", "", (4, 4, 0, 0, HERE)),
    ("LOCAL_WORLD_SIZE=0", "", (1, 1, 0, 0, HERE)),
    ("LOCAL_WORLD_SIZE=4 WORLD_SIZE=4", "-n 2", (2, 2, 0, 0, HERE)),
    (
        "LOCAL_WORLD_SIZE=4 WORLD_SIZE=8 NODE_RANK=1 MASTER_ADDR=h MASTER_PORT=1",
        "",
        (4, 8, 4, 1, "h"),
    ),
    ("WORLD_SIZE=8 NODE_RANK=3", f"-n 2 {MEET}", (2, 8, 6, 3, "h")),
    ("", f"-n 2 --world_size 6 --base_rank 4 {MEET}", (2, 6, 4, 2, "h")),
    ("", f"-n 2 --world_size 7 --node_rank 1 --base_rank 3 {MEET}", (2, 7, 3, 1, "h")),
    ("", f"-n 2 --node_rank 0 --world_size 4 --base_rank 2 {MEET}", (2, 4, 2, 0, "h")),
    ("BASE_RANK=4", f"-n 2 --world_size 6 {MEET}", (2, 6, 4, 2, "h")),
    ("NODE_RANK=0 BASE_RANK=0", "-n 2", (2, 2, 0, 0, HERE)),
    ("NODE_RANK=1", f"-n 2 --world_size 4 --node_rank 0 {MEET}", (2, 4, 0, 0, "h")),
    ("LOCAL_WORLD_SIZE= WORLD_SIZE=", "-n 2", (2, 2, 0, 0, HERE)),
]

REFUSED = [
    ("WORLD_SIZE=8", f"-n 2 {MEET}", r"world_size=8 \(from WORLD_SIZE\).*Give --node-rank or --base-rank"),
    ("", f"-n 2 --world_size 7 --base_rank 4 {MEET}", "node_rank does not follow from base_rank=4"),
    ("", f"-n 2 --world_size 6 --base_rank 3 {MEET}", "node_rank does not follow from base_rank=3"),
    ("", f"-n 2 --world_size 7 --node_rank 1 {MEET}", "base_rank does not follow from node_rank=1"),
    ("", f"-n 4 --world_size 6 --node_rank 1 --base_rank 4 {MEET}", "last rank of this node would be 7.*rank 5"),
    ("", "-n 2 --world_size 4 --node_rank 1 --master_port 1", "master_addr is not known"),
    ("", "-n 2 --world_size 4 --node_rank 1 --master_addr h", "master_port is not known"),
    ("", "-n 4 --world_size 2", r"world_size=2 \(from --world-size\) is less than the nproc=4"),
    ("", "-n 2 --base_rank 2", r"base_rank=2 \(from --base-rank\)"),
    ("", "-n 2 --node_rank 1", r"node_rank=1 \(from --node-rank\)"),
    ("NODE_RANK=1", "-n 2", r"node_rank=1 \(from NODE_RANK\)"),
    ("", "-n 0", r"nproc=0 \(from --nproc\)"),
    ("", "-n -1", r"nproc=-1 \(from --nproc\)"),
    ("LOCAL_WORLD_SIZE=-1", "", r"nproc=-1 \(from LOCAL_WORLD_SIZE\)"),
    ("LOCAL_WORLD_SIZE=four", "", "LOCAL_WORLD_SIZE='four' is not an integer"),
    ("WORLD_SIZE=4.0", "-n 2", "WORLD_SIZE='4.0' is not an integer"),
    ("MASTER_PORT=http", "-n 2", "MASTER_PORT='http' is not an integer"),
    ("MASTER_PORT=65536", "-n 2", r"master_port=65536 \(from MASTER_PORT\) is not a TCP port"),
    ("", f"-n 2 --world_size 4 --node_rank -1 {MEET}", "node_rank=-1.*below 0"),
    ("", "-m -c", "--module-mode and --command-mode exclude each other"),
    ("", "-n 2 --stdout out_{node}.log", "--stdout='out_{node}.log'.*There are {rank} {local_rank}"),
    ("", "-n 2 --stderr out_{.log", "--stderr='out_{.log'"),
    ("", "-n 2 --log_filter (", "--log-filter='\\(' is not a regular expression"),
    ("", "-n 2 --stdout {rank[0]}", r"--stdout='{rank\[0\]}' is not a file name with placeholders"),
    ("", "-n 2 --stderr=", "--stderr='' names no file"),
    ("", "-n 2 --max_restarts -1", "--max-restarts=-1 is not a number of 0 or more"),
    ("", "-n 2 --shutdown_timeout nan", "--shutdown-timeout=nan is not a number of 0 or more"),
    ("", "-n 2 --monitor_interval 0", "--monitor-interval=0.0 is not a number above 0"),
    ("", "-n 2 --monitor_interval nan", "--monitor-interval=nan is not a number above 0"),
    ("", "-n 2 --nnodes 4:2", "--nnodes='4:2' is not a number of nodes"),
    ("", "-n 2 --nnodes 2 --node_rank 1", "--nnodes and --node-rank exclude each other"),
    ("", "-n 2 --signals_to_handle SIGTREM", "--signals-to-handle='SIGTREM'"),
]


@pytest.mark.parametrize(("environment", "arguments", "expected"), PLACES)
def test_options_and_environment_give_each_node_its_ranks(place, environment, arguments, expected):
    topology = place(arguments, environment)
    found = (topology.nproc, topology.world_size, topology.base_rank, topology.node_rank, topology.master_addr)
    assert found == expected
    assert 0 < topology.master_port < 65536


@pytest.mark.parametrize(("environment", "arguments", "words"), REFUSED)
def test_values_that_do_not_fit_are_refused_with_their_origin(place, environment, arguments, words):
    with pytest.raises(ValueError, match=words):
        place(arguments, environment)


def test_accelerators_count_where_nobody_says_how_many_processes(place):
    assert place("", accelerators=3).nproc == 3
    assert place("", "LOCAL_WORLD_SIZE=2", accelerators=3).nproc == 2


def test_a_port_of_the_environment_holds_on_a_single_node_too(place):
    assert place("-n 2", "MASTER_PORT=77").master_port == 77


def test_each_value_says_where_it_comes_from(place):
    sources = place("--world_size 8", "LOCAL_WORLD_SIZE=2 NODE_RANK=1 MASTER_ADDR=h MASTER_PORT=1").sources
    assert sources == {
        "nproc": "LOCAL_WORLD_SIZE",
        "world_size": "--world-size",
        "base_rank": "NODE_RANK * nproc",
        "node_rank": "NODE_RANK",
        "master_addr": "MASTER_ADDR",
        "master_port": "MASTER_PORT",
    }


def test_help_spells_options_with_dashes_only(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    help_text = capsys.readouterr().out
    assert "--world-size WORLD_SIZE" in help_text
    assert not re.findall(r"--\w+_\w+", help_text)


def test_options_are_spelled_with_underscores_or_dashes():
    underscores = "--module_mode --world_size 4 --node_rank 1 --master_addr h --master_port 2 --dry_run"
    assert parse_options([*underscores.split(), "s"]) == parse_options([*underscores.replace("_", "-").split(), "s"])


@pytest.mark.parametrize("rest", ["--", "-- --foo", "-- -- x", "x -- y", "s.py -- x"])
def test_two_dashes_after_the_script_are_the_scripts(rest):
    for before in ([], ["--"], ["-n", "2", "--"]):
        assert parse_options([*before, "s.py", *rest.split()]).training_script_args == rest.split()


def test_a_launch_within_a_launch_begins_a_run_of_its_own(place):
    topology = place(
        "", f"COMPOSER_LAUNCH_ID={new_launch_id()} LOCAL_WORLD_SIZE=4 WORLD_SIZE=8 NODE_RANK=1 MASTER_ADDR=h"
    )
    assert (topology.nproc, topology.world_size, topology.master_addr) == (1, 1, HERE)


def test_a_launch_that_left_its_identity_behind_is_no_launch_around_this_one(place):
    several = "LOCAL_WORLD_SIZE=4 WORLD_SIZE=8 NODE_RANK=1 MASTER_ADDR=h MASTER_PORT=1"
    identity, _, start = new_launch_id().rpartition("-")
    assert place("", f"COMPOSER_LAUNCH_ID={identity}-{int(start) + 1} {several}").base_rank == 4
    assert place("", f"COMPOSER_LAUNCH_ID=x {several}").base_rank == 4


def test_what_follows_the_script_is_the_scripts():
    options = parse_options(["-n", "2", "s.py", "-n", "5", "--verbose", "--", "x"])
    assert (options.nproc, options.verbose) == (2, False)
    assert options.training_script_args == ["-n", "5", "--verbose", "--", "x"]


@pytest.mark.parametrize(
    "arguments", ["", "-n two s.py", "--nprocs 2 s.py", "-n 4 --world_size 2 s.py", "-n 2 nowhere.py"]
)
def test_a_command_line_that_cannot_be_followed_ends_with_2_and_a_sentence(arguments, capsys):
    try:
        status = main(arguments.split())
    except SystemExit as exit_request:
        status = exit_request.code
    assert status == 2
    assert "composer: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [("--help", 0, "training_script"), ("--version", 0, "MosaicML Composer "), ("-n 2 --dry_run s.py", 0, "{"),
     ("-n x s.py", 2, ""), ("-n 4 --world_size 2 s.py", 2, "")],
)  # fmt: skip
def test_what_starts_nothing_does_not_wait_for_torch(arguments, status, words):
    program = (
        "import sys\nfrom composer_dist.launch.main import main\ntry:\n    status = main(sys.argv[1:])\n"
        "except SystemExit as request:\n    status = request.code or 0\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)"
    )
    run = subprocess.run([sys.executable, "-c", program, *arguments.split()], capture_output=True, text=True)
    assert run.returncode == status, run.stderr
    assert words in run.stdout


@pytest.fixture
def install_fruits(tmp_path, monkeypatch):
    """Return a function that installs a distribution with the command `plum` and other entry points."""

    def install(code, entry_points):
        (tmp_path / "fruits.py").write_text(code)
        metadata = tmp_path / "fruits-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Name: fruits\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[composer.commands]\nplum = fruits:main\n{entry_points}")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_the_help_lists_the_commands_of_other_distributions_without_importing_them(install_fruits, capsys):
    scripts = "[console_scripts]\ncomposer-pear = orchard:main\npear = fruits:main\n"
    install_fruits('"""The command `composer plum`: count the plums."""\nraise SystemExit\n', scripts)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 0
    assert ["composer", "plum", "count the plums"] in lines
    assert ["composer-pear"] in lines  # its module is missing, so there is no description
    assert not any(line[:1] == ["pear"] for line in lines)


def test_a_folder_that_is_not_a_script_does_not_hide_a_command(install_fruits, tmp_path, monkeypatch, capsys):
    code = "def main(arguments):\n    return 40 + len(arguments)\n"
    install_fruits(code, "[composer.scripts]\nripen = fruits_ripen\n")
    monkeypatch.chdir(tmp_path)
    for name in ("plum", "ripen"):
        Path(name).mkdir()
    assert main(["plum", "a", "b"]) == 42
    assert main(["-n", "1", "--dry_run", "ripen"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["argv"][-2:] == ["-m", "fruits_ripen"]
    for name in ("plum", "ripen"):
        Path(name, "__main__.py").touch()
        assert main(["-n", "1", "--dry_run", name]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"][0]["argv"][-1:] == [name]
    assert find_command(["plum"]) is None


def test_a_dry_run_prints_ranks_commands_variables_and_their_sources(capsys, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    assert main(["-n", "2", "--python", "/py", "--stdout", "o{rank}", "--explain", "-m", "mod", "$RANK/$NOPE"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["topology"]["master_port"] == {"value": 1234, "source": "MASTER_PORT"}
    assert plan["topology"]["world_size"]["source"] == "nproc"
    first, second = plan["ranks"]
    assert second["argv"] == ["/py", "-m", "mod", "1/$NOPE"]
    assert (first["stdout"], second["stdout"]) == ("console", "o1")
    expected = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert expected.items() <= second["env"].items()


@pytest.mark.parametrize("elastic", [[], ["--max_restarts", "1"]])
def test_all_ranks_are_told_where_runs_leave_their_folders(elastic, capsys):
    assert main(["-n", "2", *elastic, "--runs", "runs", "--dry_run", "s.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [rank["env"]["COMPOSER_RUNS"] for rank in plan["ranks"]] == ["runs", "runs"]


def told(plan):
    return [rank["env"].get("COMPOSER_RUNS") for rank in plan["ranks"]]


@pytest.mark.parametrize(
    ("options", "variable", "expected"),
    [
        ([], None, "runs"),
        ([], "", None),  # as it is in the launcher's own environment
        ([], "elsewhere", None),
        (["--runs", "there"], "elsewhere", "there"),
        (["--no_runs"], None, ""),
        (["--no-runs"], "elsewhere", ""),
    ],
)
def test_runs_leave_their_folders_unless_an_option_or_an_empty_variable_says_no(
    options, variable, expected, environ, capsys
):
    if variable is not None:
        environ["COMPOSER_RUNS"] = variable
    assert main(["-n", "2", *options, "--dry_run", "s.py"]) == 0
    assert told(json.loads(capsys.readouterr().out)) == [expected, expected]


def test_a_dry_run_of_an_elastic_launch_prints_where_the_nodes_would_meet(capsys):
    arguments = "-n 2 --nnodes 1:4 --rdzv_endpoint h:29400 --rdzv_id job --rdzv_conf join_timeout=9 --dry_run s.py"
    assert main(arguments.split()) == 0
    rendezvous = json.loads(capsys.readouterr().out)["rendezvous"]
    assert rendezvous["config"] == {"join_timeout": "9"}
    assert (rendezvous["min_nodes"], rendezvous["max_nodes"], rendezvous["endpoint"]) == (1, 4, "h:29400")


def test_a_dry_run_with_restarts_on_one_node_prints_the_ranks_too(capsys):
    assert main(["-n", "2", "--max_restarts", "3", "--master_port", "29511", "--dry_run", "s.py", "$RANK"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rendezvous"]["endpoint"] == "127.0.0.1:29511"
    assert plan["topology"]["world_size"] == {"value": 2, "source": "nproc"}
    assert [rank["argv"][1:] for rank in plan["ranks"]] == [["s.py", "0"], ["s.py", "1"]]
    env = plan["ranks"][1]["env"]
    assert (env["RANK"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "3")
    assert not env.keys() & {"MASTER_ADDR", "MASTER_PORT"}  # known when the nodes have met


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-n 2 --nnodes 2", "Give --rdzv-endpoint HOST:PORT"),
        ("-n 2 --runs r --no_runs", "--runs='r' and --no-runs exclude each other"),
        ("-n 2 --rdzv_endpoint h:1", "--rdzv-endpoint='h:1' is for runs with a rendezvous"),
        ("-n 2 --rdzv_id job", "--rdzv-id='job' is for runs with a rendezvous"),
        ("-n 2 --nnodes 1 --master_port 1", "--master-port=1 and --nnodes exclude each other"),
        ("-n 2 --max_restarts 1 --rdzv_endpoint h:1 --master_addr h", "--master-addr='h' and --rdzv-endpoint exclude"),
        ("-n 2 --nnodes 1 --rdzv_conf join_timeout", "'join_timeout' is not KEY=VALUE"),
        (
            "-n 2 --max_restarts 1 --world_size 3 --node_rank 0 --base_rank 0 --master_addr h --master_port 1",
            "--nnodes",
        ),
    ],
)
def test_a_rendezvous_that_cannot_be_is_refused(arguments, words, capsys):
    assert main([*arguments.split(), "s.py"]) == 2
    assert words in capsys.readouterr().err
