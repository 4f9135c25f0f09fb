import socket

import pytest


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_is_taken_is_refused_with_its_origin(launch, script, environ, family):
    try:
        taken = socket.create_server(("", 0), family=family)
    except OSError:
        pytest.skip("this machine does not have both kinds of addresses")
    with taken:
        environ["MASTER_PORT"] = str(taken.getsockname()[1])
        status, out, err = launch("-n", 2, script("print('started')"))
    assert status == 2
    assert "started" not in out
    assert f"master_port={environ['MASTER_PORT']} (from MASTER_PORT) is taken" in err


def test_a_port_of_another_host_is_not_looked_at(launch, script):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        places = f"--world_size 2 --node_rank 1 --master_addr 127.0.0.1 --master_port {port} --hang-timeout off"
        status, out, _ = launch("-n", 1, *places.split(), script("print(os.environ['MASTER_PORT'])"))
    assert (status, out.strip()) == (0, str(port))


def test_a_host_without_address_is_refused_with_its_origin(launch, script):
    status, _, err = launch("-n", 2, "--master_addr", "no-such-host.invalid", script(""))
    assert status == 2
    assert "master_addr='no-such-host.invalid' (from --master-addr) cannot be resolved" in err


@pytest.mark.parametrize("variable", ["COMPOSER_MASTER_ADDR", "MASTER_ADDR"])
def test_a_pod_waits_longer_for_the_address_of_the_first_one(launch, script, environ, monkeypatch, variable):
    tries = []

    def getaddrinfo(host, *arguments, **settings):
        tries.append(host)
        if len(tries) < 3:
            raise OSError("not yet")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr("composer_dist.launch.main._RESOLVE_TIMEOUT_S", 0)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    environ |= {"JOB_COMPLETION_INDEX": "1", "COMPOSER_NUM_NODES": "2", "COMPOSER_MASTER_ADDR": "p-0", variable: "p-0"}
    # Without a watch, whose thread would look for the store, and warn, during the next tests.
    status, _, err = launch("-n", 1, "--hang-timeout", "off", script(""))
    if variable == "COMPOSER_MASTER_ADDR":
        assert status == 0, err
        assert len(tries) >= 3
    else:
        assert status == 2
        assert "master_addr='p-0' (from MASTER_ADDR) cannot be resolved" in err


def test_a_rendezvous_at_a_host_without_address_is_refused(launch, script):
    endpoint = ["--rdzv_endpoint", "no-such-host.invalid:29400"]
    status, _, err = launch("-n", 1, "--max_restarts", 1, *endpoint, script(""))
    assert status == 2
    assert "--rdzv-endpoint='no-such-host.invalid:29400' cannot be resolved" in err


def test_a_rendezvous_that_torch_does_not_know_is_refused(launch, script):
    status, _, err = launch("-n", 1, "--nnodes", 1, "--rdzv_backend", "pigeons", script(""))
    assert status == 2
    assert "composer: error: --rdzv-backend='pigeons'" in err


def test_a_host_that_is_not_this_one_is_refused_on_a_single_node(launch, script, environ):
    environ["MASTER_ADDR"] = "192.0.2.7"  # an address of nobody's, RFC 5737
    status, _, err = launch("-n", 2, script(""))
    assert status == 2
    assert "master_addr='192.0.2.7' (from MASTER_ADDR) is not an address of this machine" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "the training script 'missing.py' does not exist"),
        (["-c", "no-such-command"], "the command 'no-such-command' does not exist"),
        (["--python", "/no/python", "x.py"], "--python='/no/python' does not exist"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_starts(launch, arguments, words):
    status, _, err = launch("-n", 2, *arguments)
    assert status == 2
    assert words in err


@pytest.mark.parametrize("option", ["--stdout", "--stderr", "--log-dir"])
def test_a_file_that_cannot_be_opened_is_refused_before_anything_starts(launch, script, tmp_path, option):
    (tmp_path / "file").touch()
    status, out, err = launch("-n", 2, option, tmp_path / "file/in", script("print('started')"))
    assert status == 2
    assert "started" not in out
    assert err.startswith(f"composer: error: {option}='{tmp_path}/file/in'")


def test_a_command_that_the_system_cannot_run_is_refused(launch, tmp_path):
    command = tmp_path / "noshebang.sh"
    command.write_text("echo started")
    command.chmod(0o755)
    status, out, err = launch("-n", 2, "-c", command)
    assert (status, out) == (2, "")
    assert f"composer: error: '{command}' cannot be started" in err


def test_a_free_port_that_is_lost_is_replaced_by_another(script, environ):
    from composer_dist.launch.args import parse_options
    from composer_dist.launch.run import run
    from composer_dist.launch.topology import resolve, resolve_nproc

    options = parse_options(["-n", "1", script("")])
    topology = resolve(options, environ, resolve_nproc(options, environ, lambda: 0))
    with socket.create_server(("", topology.master_port)):
        assert run(options, topology) == 0
