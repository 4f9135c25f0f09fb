"""Jobs of `composer submit`, run by a small Slurm of two nodes on this machine, and checked by the clients' models."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from kubeflow_trainer_api import models

from composer.cli.submit import main
from composer_dist import get_free_tcp_port

SCRIPT = Path(__file__).with_name("preempted_script.py")
START_S = 150  # interpreters that import torch on a busy machine
BATCHES = 400  # 20 seconds or more, so that a signal arrives before the last one

# Starts the command on the "nodes" 127.0.0.1 and 127.0.0.2, passes SIGUSR1 on, and ends with the highest status.
SRUN = """
import os, signal, subprocess, sys
place = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_LOCALID": "0"}
command = sys.argv[1:]
while command[0].startswith("--"):
    print("srun", command.pop(0), flush=True)
tasks = []
signal.signal(signal.SIGUSR1, lambda signum, frame: [task.send_signal(signum) for task in tasks])
for node in range(2):
    tasks.append(subprocess.Popen(command, env=os.environ | place | {"SLURM_NODEID": str(node)}))
sys.exit(max(task.wait() for task in tasks))
"""
RECORD = """
import os, sys
with open(os.environ["RECORD"], "a") as file:
    print(os.path.basename(sys.argv[0]), *sys.argv[1:], file=file)
"""


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """Programs with the names of the clusters' clients; return the file that the commands are written to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "sbatch", "scontrol", "kubectl", "sky"):
        program = folder / name
        program.write_text(f"#!{sys.executable}{SRUN if name == 'srun' else RECORD}")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record.txt"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return tmp_path / "record.txt"


def submit(*arguments, command="composer -N 2 -n 1 train.py"):
    return main([*map(str, arguments), "--", *shlex.split(command)])


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A folder with a training script, to submit from."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def start(job, number):
    return subprocess.Popen(
        ["bash", job], env=os.environ | {"SLURM_JOB_ID": str(number)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def losses(folder):
    return [(folder / f"losses-rank{rank}.txt").read_text().splitlines() for rank in range(2)]


def wait_for_batches(folder, process):
    deadline = time.monotonic() + START_S
    path = folder / "losses-rank0.txt"
    while not path.exists() or len(path.read_text().splitlines()) < 3:
        assert process.poll() is None, process.stdout.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_job_that_reaches_its_limit_is_requeued_and_ends_with_the_weights_of_one_that_does_not(clients, tmp_path):
    while (number := get_free_tcp_port()) >= 40000:  # as the launcher computes the port
        pass
    runs = {}
    for name in ("whole", "cut"):
        folder = runs[name] = tmp_path / name
        folder.mkdir()
        command = f"composer -N 2 -n 1 {SCRIPT} {folder} {BATCHES}"
        arguments = ["--to", "slurm", "--name", name, "--output", folder, "--gpus-per-node", 0]
        assert submit(*arguments, command=command) == 0
    (runs["whole"] / "fast").touch()
    whole = start(runs["whole"] / "whole.sbatch", number)
    out = whole.communicate(timeout=4 * START_S)[0].decode()
    assert whole.returncode == 0, out
    cut = start(runs["cut"] / "cut.sbatch", number)
    wait_for_batches(runs["cut"], cut)
    cut.send_signal(signal.SIGUSR1)  # as Slurm does, with --signal=B:USR1@...
    out = cut.communicate(timeout=START_S)[0].decode()
    assert clients.read_text().splitlines()[2:] == [f"scontrol requeue {number}"], out
    assert 3 <= len(losses(runs["cut"])[0]) < BATCHES
    (runs["cut"] / "fast").touch()
    again = start(runs["cut"] / "cut.sbatch", number)
    out = again.communicate(timeout=4 * START_S)[0].decode()
    assert again.returncode == 0, out
    assert len(clients.read_text().splitlines()) == 3  # a run that ends is not requeued
    assert losses(runs["cut"]) == losses(runs["whole"])
    saved = [torch.load(folder / "checkpoints" / f"ba{BATCHES}.pt") for folder in runs.values()]
    for weights, others in zip(*(each["state"]["model"].values() for each in saved), strict=True):
        torch.testing.assert_close(weights, others, rtol=0, atol=0)


def test_a_failed_step_is_not_requeued(clients, script, tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    assert submit("--to", "slurm", "--gpus-per-node", 0) == 0
    job = start(tmp_path / "train.sbatch", 1)
    job.communicate(timeout=START_S)
    assert job.returncode == 3
    assert clients.read_text() == f"sbatch {tmp_path}/train.sbatch\n"


@pytest.mark.parametrize("command", ["composer -N 2 -n 4 doctor --port 29500", "composer -N 2 -n 4 recipe.yaml lr=1"])
def test_a_job_may_run_what_the_launcher_runs_besides_scripts(script, tmp_path, capsys, command):
    (tmp_path / "recipe.yaml").touch()
    assert submit("--to", "slurm", "--dry-run", command=command) == 0
    written = capsys.readouterr().out
    assert f"composer --shutdown-timeout=110 {command.removeprefix('composer -N 2 ')} &" in written
    assert f"--job-name={Path(shlex.split(command)[5]).stem}\n" in written


def test_options_of_slurm_are_directives(clients, script, capsys):
    options = "--time 04:00:00 --partition long --account team --gpu-type h100 --image a/b:1 --cpus-per-node 32"
    assert submit("--to", "slurm", *options.split(), "--env", "A=b c", "--grace", 60, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    directives = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    expected = "job-name=train nodes=2 ntasks-per-node=1 gpus-per-node=h100:1 cpus-per-task=32 time=04:00:00"
    expected += " partition=long account=team signal=B:USR1@60 open-mode=append requeue"
    assert {*expected.split()} == {*directives} - {f"output={os.getcwd()}/%x-%j.log"}
    assert "export A='b c'" in lines
    step = next(line for line in lines if line.startswith("srun"))
    assert "--cpus-per-task=32 --container-image=a/b:1" in step
    assert step.endswith("composer --shutdown-timeout=50 -n 1 train.py &")
    assert not clients.exists()  # a dry run


@pytest.mark.parametrize(
    ("kind", "model"),
    [("jobset", models.JobsetV1alpha2JobSet), ("trainjob", models.TrainerV1alpha1TrainJob)],
)
def test_manifests_have_the_fields_that_the_clients_know(clients, script, tmp_path, kind, model):
    command = "composer --nnodes=4 -n 8 --tee train.py -N $(A)"
    options = ["--image", "a/b:1", "--kind", kind, "--namespace", "ml", "--env", "A=$(b)"]
    assert submit("--to", "kubernetes", *options, command=command) == 0
    manifest = yaml.safe_load((tmp_path / "train.yaml").read_text())
    # What the model does not know is not in its result, and a wrong type is an error.
    assert model.from_dict(manifest).to_dict() == manifest
    assert clients.read_text() == f"kubectl create -f {tmp_path}/train.yaml\n"
    if kind == "jobset":
        job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert job["completions"] == job["parallelism"] == 4
        container = job["template"]["spec"]["containers"][0]
        gpus = container["resources"]["limits"]
    else:
        container = manifest["spec"]["trainer"]
        assert container["numNodes"] == 4
        gpus = container["resourcesPerNode"]["limits"]
    assert gpus == {"nvidia.com/gpu": 8}
    assert container["command"] == ["composer", "--shutdown-timeout=110", "-n", "8", "--tee", "train.py", "-N", "$$(A)"]
    assert {"name": "A", "value": "$$(b)"} in container["env"]  # Kubernetes takes $(b) for a variable
    assert (tmp_path / "train.yaml").stat().st_mode & 0o077 == 0  # it may hold secrets


def test_a_task_of_skypilot_starts_the_launcher_on_each_node(clients, script, tmp_path):
    assert submit("--to", "skypilot", "--gpu-type", "H100", "--image", "a/b:1") == 0
    task = yaml.safe_load((tmp_path / "train.yaml").read_text())
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:1"
    assert task["resources"]["image_id"] == "docker:a/b:1"
    assert task["run"].splitlines()[-1] == "exec composer --shutdown-timeout=110 -n 1 train.py"
    assert clients.read_text() == f"sky jobs launch --yes {tmp_path}/train.yaml\n"


def test_a_job_is_written_and_not_overwritten_where_there_is_no_client(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert submit("--to", "slurm") == submit("--to", "slurm") == 0
    assert f"run: sbatch {tmp_path}/train.sbatch" in capsys.readouterr().out
    before = (tmp_path / "train.sbatch").read_text()
    assert submit("--to", "slurm", "--partition", "short") == 2
    assert "exists and differs" in capsys.readouterr().err
    assert (tmp_path / "train.sbatch").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "command", "said"),
    [
        ("--to slurm", "python train.py", "must be composer"),
        ("--to slurm", "composer missing.py", "does not exist"),
        ("--to slurm", "composer -N 2:4 train.py", "must be a number of nodes"),
        ("--to slurm", "composer --node-rank 1 train.py", "--node-rank cannot be combined"),
        ("--to slurm --namespace ml", "composer train.py", "--namespace cannot be combined with --to slurm"),
        ("--to slurm --grace 5", "composer train.py", "must be 20 seconds or more"),
        ("--to slurm --name Big_Run", "composer -n 1 train.py", "lowercase"),
        ("--to slurm --gpus-per-node -3", "composer train.py", "must be 0 or more"),
        ("--to slurm --env A", "composer -n 1 train.py", "NAME=VALUE"),
        ("--to kubernetes", "composer train.py", "--image"),
        ("--to skypilot", "composer -n 8 train.py", "--gpu-type"),
        ("--to slurm", "composer -N 2 train.py", "`-n` or `--gpus-per-node` must be given"),
        ("--to kubernetes --image a/b:1", "composer train.py", "`-n` or `--gpus-per-node` must be given"),
        ("--to skypilot --gpu-type H100", "composer train.py", "`-n` or `--gpus-per-node` must be given"),
    ],
)
def test_what_would_fail_on_the_cluster_is_refused_here(script, capsys, arguments, command, said):
    assert submit(*arguments.split(), "--dry-run", command=command) == 2
    assert said in capsys.readouterr().err
