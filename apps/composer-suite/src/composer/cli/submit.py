"""The command `composer submit`: write the job of a cluster for a launch, and submit it."""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from composer_dist.launch.args import Options, option, parse_options
from composer_dist.launch.main import check_command, find_interpreter

__all__ = ["main"]

_CLIENTS = {
    "slurm": ["sbatch"],
    "kubernetes": ["kubectl", "create", "-f"],
    "skypilot": ["sky", "jobs", "launch", "--yes"],
}
_ONLY = {"slurm": ("time", "partition", "account", "cpus_per_node"), "kubernetes": ("kind", "namespace")}
# What the cluster gives to each launcher.
_PLACES = ("world_size", "base_rank", "node_rank", "master_addr", "master_port", "rdzv_endpoint")
_MIN_GRACE_S = 20
_END_S = 10  # of the grace period, for what follows the last checkpoint
_STOPPED = 143  # the launcher's exit status if all ranks have stopped together after a signal
_MAX_RESTARTS = 3  # of a JobSet after failures; interruptions do not count
_CONTAINER = "node"  # also the name of Kubeflow's replicated job


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A launch on a cluster."""

    name: str
    num_nodes: int
    num_gpus: int
    command: Sequence[str]
    env: Mapping[str, str]
    image: str | None
    grace_s: int
    asked: argparse.Namespace


def main(arguments: Sequence[str] | None = None) -> int:
    """Write and submit the job on the command line, and return the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        job = _make_job(asked)
        text = {"slurm": _slurm, "kubernetes": _kubernetes, "skypilot": _skypilot}[asked.to](job)
        if asked.dry_run:
            sys.stdout.write(text)
            return 0
        return _submit(job, text)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"composer submit: error: {error}\n")
        return 2


def _make_job(asked: argparse.Namespace) -> _Job:
    _check_options(asked)
    arguments = asked.command[asked.command[:1] == ["--"] :]
    if not arguments or Path(arguments[0]).name != "composer":
        raise ValueError(f"the command {arguments[:1]} must be composer, as in `... -- composer -N 2 train.py`.")
    program, *arguments = arguments
    launch = parse_options(arguments)
    _check_launch(launch)
    if asked.to != "kubernetes":  # its image has files of its own
        ran = copy(launch)
        find_interpreter(ran)
        check_command(ran)
    num_gpus = launch.nproc if asked.gpus_per_node is None else asked.gpus_per_node
    if num_gpus is None:  # without a GPU, the cluster would train on the CPU
        raise ValueError(
            "`-n` or `--gpus-per-node` must be given: the processes or the GPUs of each node. Give "
            "`--gpus-per-node 0` for a job on CPUs."
        )
    if asked.to == "skypilot" and num_gpus and asked.gpu_type is None:
        raise ValueError(
            f"{num_gpus} GPUs per node need a --gpu-type for SkyPilot, such as H100, or --gpus-per-node 0."
        )
    timeout = [f"--shutdown-timeout={asked.grace - _END_S}"] if launch.shutdown_timeout is None else []
    return _Job(
        name=_name(asked.name, launch.training_script),
        num_nodes=int(launch.nnodes or 1),
        num_gpus=num_gpus,
        command=[program, *timeout, *_without_nodes(arguments, len(launch.training_script_args))],
        env=dict(_variable(text) for text in asked.env),
        image=asked.image,
        grace_s=asked.grace,
        asked=asked,
    )


def _check_options(asked: argparse.Namespace) -> None:
    for system, names in _ONLY.items():
        for name in names:
            if asked.to != system and getattr(asked, name) is not None:
                raise ValueError(f"{option(name)} cannot be combined with --to {asked.to}: it is for {system}.")
    if (asked.gpus_per_node or 0) < 0:
        raise ValueError(f"--gpus-per-node={asked.gpus_per_node} must be 0 or more.")
    if asked.to == "kubernetes" and asked.image is None:
        raise ValueError(
            "--to kubernetes needs the image of the containers. Give --image, such as one of Containerfile."
        )
    if asked.to == "kubernetes" and asked.gpu_type is not None:
        raise ValueError("--gpu-type cannot be combined with --to kubernetes. Add a nodeSelector to the manifest.")
    if asked.grace < _MIN_GRACE_S:
        raise ValueError(f"--grace={asked.grace!r} must be {_MIN_GRACE_S} seconds or more, to save a checkpoint.")


def _check_launch(launch: Options) -> None:
    for name in _PLACES:
        if getattr(launch, name) not in (None, ""):
            raise ValueError(f"{option(name)} cannot be combined with composer submit: the cluster gives it.")
    if not (launch.nnodes or "1").isdecimal():
        raise ValueError(f"--nnodes={launch.nnodes!r} must be a number of nodes, since the job asks for them.")


def _name(given: str | None, script: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()) if given is None else given
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ValueError(
            f"--name={name!r} must be 1 to 40 lowercase letters, digits and hyphens, and begin with a letter. Give one."
        )
    return name


def _without_nodes(arguments: Sequence[str], num_of_script: int) -> list[str]:
    split = len(arguments) - num_of_script - 1
    nodes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    nodes.add_argument("-N", "--nnodes")
    _, kept = nodes.parse_known_args(arguments[:split])
    return [*kept, *arguments[split:]]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(f"--env={text!r} must be NAME=VALUE.")
    return name, value


def _submit(job: _Job, text: str) -> int:
    asked = job.asked
    folder = Path(asked.output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job.name}.{'sbatch' if asked.to == 'slurm' else 'yaml'}"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise FileExistsError(f"{path} exists and differs. Delete it, or give another --name or --output.")
    path.touch(mode=0o600)  # variables may hold secrets
    path.write_text(text, encoding="utf-8")
    client = [*_CLIENTS[asked.to], str(path)]
    if shutil.which(client[0]) is None:
        sys.stdout.write(f"{client[0]} is not installed here. To submit the job, run: {shlex.join(client)}\n")
        return 0
    sys.stdout.write(f"{shlex.join(client)}\n")
    sys.stdout.flush()  # before the output of the client
    return subprocess.run(client, check=False).returncode


_SBATCH = """\
#!/bin/bash
{directives}

export COMPOSER_RUN_NAME="${{COMPOSER_RUN_NAME:-{name}-$SLURM_JOB_ID}}"
{exports}
# Slurm sends SIGUSR1 to this shell before the time limit. The ranks then save a checkpoint and stop.
is_interrupted= is_woken=
trap 'is_interrupted=1 is_woken=1; kill -USR1 "$step"' USR1
{srun} &
step=$!
while :; do
    is_woken=
    wait "$step"
    status=$?
    [[ $is_woken ]] || break  # otherwise the signal has ended the wait, not the step
done
# 138: a launcher was stopped by SIGUSR1; 143: its ranks stopped first, since others were told to.
if [[ $is_interrupted && ( $status == 138 || $status == 143 ) ]]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def _slurm(job: _Job) -> str:
    asked = job.asked
    gpus = f"{asked.gpu_type}:{job.num_gpus}" if asked.gpu_type else job.num_gpus
    settings = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,  # the launcher, which starts the ranks
        "gpus-per-node": gpus if job.num_gpus else None,
        "cpus-per-task": asked.cpus_per_node,
        "time": asked.time,
        "partition": asked.partition,
        "account": asked.account,
        "signal": f"B:USR1@{job.grace_s}",
        "open-mode": "append",  # a requeued job has the same log
        "output": f"{Path(asked.output).absolute()}/%x-%j.log",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in settings.items() if value is not None]
    srun = ["srun", "--ntasks-per-node=1"]
    if asked.cpus_per_node is None:  # one launcher would get one core otherwise
        lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
        srun.append("--cpu-bind=none")
    else:
        srun.append(f"--cpus-per-task={asked.cpus_per_node}")
    lines.append("#SBATCH --requeue")
    command = shlex.join(srun)
    if job.image is not None:  # by Pyxis
        command += (
            f' --container-image={shlex.quote(job.image)} --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'
        )
    return _SBATCH.format(
        directives="\n".join(lines),
        name=job.name,
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.env.items()),
        srun=f"{command} {shlex.join(job.command)}",
    )


# Without it, worker processes of a DataLoader have 64 MB to share.
_SHM = {"name": "shm", "emptyDir": {"medium": "Memory"}}
_SHM_MOUNT = {"name": "shm", "mountPath": "/dev/shm"}


def _kubernetes(job: _Job) -> str:
    kind, version, spec = (
        ("TrainJob", "trainer.kubeflow.org/v1alpha1", _train_job(job))
        if job.asked.kind == "trainjob"
        else ("JobSet", "jobset.x-k8s.io/v1alpha2", _job_set(job))
    )
    metadata = {"name": job.name} | ({"namespace": job.asked.namespace} if job.asked.namespace else {})
    return _yaml({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})


def _variables(job: _Job, place: Mapping[str, str]) -> list[dict[str, str]]:
    values = {"COMPOSER_RUN_NAME": job.name, **job.env, **place}
    return [{"name": name, "value": _literal(value)} for name, value in values.items()]


def _literal(text: str) -> str:
    """Return text in which Kubernetes does not replace `$(NAME)` by a variable."""
    return text.replace("$(", "$$(")


def _gpus(job: _Job, field: str) -> dict[str, Any]:
    return {field: {"limits": {"nvidia.com/gpu": job.num_gpus}}} if job.num_gpus else {}


def _train_job(job: _Job) -> dict[str, Any]:
    pod = {
        "terminationGracePeriodSeconds": job.grace_s,
        "volumes": [_SHM],
        "containers": [{"name": _CONTAINER, "volumeMounts": [_SHM_MOUNT]}],
    }
    command = [_literal(word) for word in job.command]
    node = {"name": _CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
    trainer = {"image": job.image, "command": command, "numNodes": job.num_nodes, "env": _variables(job, {})}
    return {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer | _gpus(job, "resourcesPerNode"),
        "runtimePatches": [
            {
                "manager": "composer.submit",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
            }
        ],
    }


def _job_set(job: _Job) -> dict[str, Any]:
    place = {
        "COMPOSER_NUM_NODES": str(job.num_nodes),
        "COMPOSER_MASTER_ADDR": f"{job.name}-{_CONTAINER}-0-0.{job.name}",
    }
    container = {
        "name": _CONTAINER,
        "image": job.image,
        "command": [_literal(word) for word in job.command],
        "env": _variables(job, place),
        "volumeMounts": [_SHM_MOUNT],
    }
    interruptions = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # Nodes whose ranks have stopped together with those of an interrupted one.
        {"action": "FailJob", "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [_STOPPED]}},
    ]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container | _gpus(job, "resources")],
        "volumes": [_SHM],
    }
    of_job = {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": 0,  # a new pod alone could not join the others
        "podFailurePolicy": {"rules": interruptions},
        "template": {"spec": pod},
    }
    rule = {
        "name": "interrupted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "failurePolicy": {"maxRestarts": _MAX_RESTARTS, "rules": [rule]},
        "replicatedJobs": [{"name": _CONTAINER, "replicas": 1, "template": {"spec": of_job}}],
    }


def _skypilot(job: _Job) -> str:
    resources: dict[str, Any] = {"job_recovery": {"recover_on_exit_codes": [_STOPPED]}}
    if job.num_gpus:
        resources["accelerators"] = f"{job.asked.gpu_type}:{job.num_gpus}"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    # The id of the task stays the same when a managed job recovers.
    name = 'export COMPOSER_RUN_NAME="${COMPOSER_RUN_NAME:-$SKYPILOT_TASK_ID}"'
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.num_nodes, "resources": resources, "workdir": "."}
    task |= {"envs": dict(job.env)} if job.env else {}
    return _yaml(task | {"run": f"{name}\nexec {shlex.join(job.command)}\n"})


def _yaml(manifest: Mapping[str, Any]) -> str:
    return yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Write a text of several lines as such."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "composer submit",
        usage="composer submit --to CLUSTER [options] -- composer [-N NODES] [-n NPROC] [options] training_script ...",
        description="Write the job of a cluster that starts the launcher on each node, and submit it if the cluster's "
        "client is installed here.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--to",
        required=True,
        choices=[*_CLIENTS],
        help="slurm: an sbatch script; kubernetes: a manifest; skypilot: a task",
    )
    add("--dry-run", action="store_true", help="print the job; write and submit nothing")
    add("--name", help="name of the job (default: that of the training script)")
    add("--output", metavar="FOLDER", default=".", help="where the job is written, and Slurm's logs (default: here)")
    add("--image", help="container image; required for kubernetes, Pyxis runs it on Slurm")
    add("--env", metavar="NAME=VALUE", action="append", default=[], help="variable of the ranks; may be repeated")
    add(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="GPUs of each node, 0 for a job on CPUs (default: NPROC; one of the two is required)",
    )
    add("--gpu-type", metavar="NAME", help="such as H100, for slurm and skypilot")
    add(
        "--grace",
        type=int,
        default=120,
        metavar="SECONDS",
        help="time to save a checkpoint, before Slurm's limit or when Kubernetes ends a pod (default: %(default)s)",
    )
    slurm = parser.add_argument_group("slurm").add_argument
    slurm("--time", metavar="LIMIT", help="such as 04:00:00 or 1-12:00:00")
    slurm("--partition")
    slurm("--account")
    slurm("--cpus-per-node", type=int, metavar="N", help="cores of each node (default: whole nodes, --exclusive)")
    kubernetes = parser.add_argument_group("kubernetes").add_argument
    kubernetes("--kind", choices=["jobset", "trainjob"], help="JobSet, or Kubeflow's TrainJob (default: jobset)")
    kubernetes("--namespace")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
