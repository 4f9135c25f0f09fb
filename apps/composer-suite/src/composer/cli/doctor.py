"""The command `composer doctor`: check machines, network and storage before a run, on one or all nodes."""

import argparse
import errno
import json
import os
import platform
import posixpath
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as tdist

from composer_checkpoint.stores.base import parse_uri, read_object
from composer_checkpoint.stores.opening import open_store, validate_credentials
from composer_dist import dist
from composer_dist.initialize import initialize_dist
from composer_events.hparams import get_composer_env_dict

__all__ = ["main"]

_MIB: Final = 2**20
_FEW_FILES: Final = 4096
_SKEWED_S: Final = 1.0
_SLOW_REDUCE_S: Final = 0.05
_SLOW_DISK: Final = 50 * 10**6  # bytes per second
_STORE_TIMEOUT_S: Final = 5.0
_PROBE: Final = ".composer-doctor-"
_LOOPBACK: Final = {"localhost", "127.0.0.1", "::1"}
_ADVICE: Final = {
    "devices": "Check the driver and other processes with `nvidia-smi`, and CUDA_VISIBLE_DEVICES.",
    "process group": "Check that every rank has started, and that all nodes can connect to MASTER_ADDR at MASTER_PORT.",
    "all-reduce": "Check for ranks that have ended, and for a firewall between the nodes. To choose the network "
    "interface, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    "object store": "Check the address, and that the credentials are set on this node.",
}
"""What to do about an error in a check."""


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check on some ranks, and what to do about it."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Report:
    """The findings of one rank, for rank 0."""

    host: str
    findings: list[Finding]
    versions: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the command line asks for, print a table, and return 1 if a check has failed.

    Every rank must call this. Rank 0 prints and returns the status for all.
    """
    parser = _parser()
    asked = parser.parse_args(arguments)
    if not 0 < asked.timeout < float("inf"):
        parser.error(f"--timeout={asked.timeout!r} must be a number of seconds above 0.")
    for port in asked.port:
        if not 0 < port < 2**16:
            parser.error(f"--port={port} must be from 1 to 65535.")
    report = _Report(socket.gethostname(), _alone(asked), _versions())
    rank, reports = dist.get_global_rank(), {dist.get_global_rank(): report}
    failures = _attempt("process group", lambda: initialize_dist("cpu", timeout=asked.timeout))
    if not failures:
        report.findings += _safely("all-reduce", lambda: _together(asked, report))
        failures = _attempt("process group", lambda: reports.update(enumerate(dist.all_gather_object(report))))
    if not failures and rank != 0:
        return 0
    # A rank that was lost has made the all-reduce fail, too: one report is enough.
    if not any(one.check == "all-reduce" and one.verdict is Verdict.FAILURE for one in report.findings):
        report.findings += failures
    findings = [*_compare_versions(reports), *_merge(reports)]
    has_failed = any(one.verdict is Verdict.FAILURE for one in findings)
    if asked.json:
        told = {"has_failed": has_failed, "world_size": dist.get_world_size(), "environment": get_composer_env_dict()}
        text = json.dumps(told | {"checks": [asdict(one) for one in findings]}, indent=2)
    else:
        text = _table(findings, dist.get_world_size())
    sys.stdout.write(f"{text}\n")
    return int(has_failed)


def _safely(check: str, run: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check; an error is one too, since other ranks wait for this one."""
    found: list[Finding] = []
    try:
        found.extend(run())
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        advice = _ADVICE.get(check, "Fix this error on the node, and check again.")
        found.append(Finding(check, Verdict.FAILURE, message, advice))
    return found


def _attempt(check: str, run: Callable[[], object]) -> list[Finding]:
    """Return the failure of a call, if any."""
    return _safely(check, lambda: (run(), ())[1])


def _alone(asked: argparse.Namespace) -> list[Finding]:
    """Return what a rank can find by itself."""
    found = _safely("devices", lambda: _devices(asked)) + _safely("open files", _open_files)
    if dist.get_local_rank() == 0:
        found += _safely("shared memory", _shared_memory) + _safely("names", _names)
        for port in asked.port:
            found += _safely(f"port {port}", lambda port=port: _port(port))
        if asked.save_folder is None:
            found.append(Finding("save folder", Verdict.SKIPPED, "not given", "Give --save-folder."))
        elif parse_uri(asked.save_folder).backend:
            found += _safely("object store", lambda: _object_store(asked.save_folder))
        else:
            found += _safely("save folder", lambda: _disk(_existing(asked.save_folder)))
    return found


def _devices(asked: argparse.Namespace) -> Iterator[Finding]:
    num_ranks = dist.get_local_world_size()
    if asked.device == "cpu":
        yield Finding("devices", Verdict.OK, "CPU, as --device says")
    elif not torch.accelerator.is_available() and shutil.which("nvidia-smi"):
        advice = f"Install a driver for CUDA {torch.version.cuda}, or a torch for this one; check CUDA_VISIBLE_DEVICES."
        yield Finding("devices", Verdict.FAILURE, "torch finds no GPU although nvidia-smi is installed", advice)
    elif not torch.accelerator.is_available():
        yield Finding("devices", Verdict.OK, "no accelerator: training runs on the CPU")
    elif num_ranks > (count := torch.accelerator.device_count()):
        advice = f"Start {count} processes on this node, or check CUDA_VISIBLE_DEVICES."
        yield Finding("devices", Verdict.FAILURE, f"{num_ranks} ranks, but {count} devices", advice)
    else:
        device = _device(asked)
        torch.accelerator.set_device_index(dist.get_local_rank())
        torch.ones(1000, device=device).sum().item()  # raises if the device cannot be used
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        yield Finding("devices", Verdict.OK, f"{count} devices, {name}")


def _device(asked: argparse.Namespace) -> torch.device:
    accelerator = None if asked.device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, dist.get_local_rank())


def _open_files() -> Iterator[Finding]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = limit not in (resource.RLIM_INFINITY, -1) and limit < _FEW_FILES
    advice = "Raise it with `ulimit -n 65536`: workers of dataloaders need files for their tensors." * is_low
    yield Finding("open files", Verdict.WARNING if is_low else Verdict.OK, f"limit {limit}", advice)


def _shared_memory() -> Iterator[Finding]:
    if not Path("/dev/shm").is_dir():  # other systems have no folder for it
        return
    free = shutil.disk_usage("/dev/shm").free
    advice = "Give the container more, such as --shm-size=16g, or delete what is in /dev/shm." * (free < 1024 * _MIB)
    verdict = Verdict.FAILURE if free < 16 * _MIB else Verdict.WARNING if advice else Verdict.OK
    yield Finding("shared memory", verdict, f"{free / 2**30:.1f} GiB free", advice)


def _names() -> Iterator[Finding]:
    host, master = socket.gethostname(), os.environ.get("MASTER_ADDR", "localhost")
    is_multi_node = dist.get_world_size() > dist.get_local_world_size() and master not in _LOOPBACK
    for name in sorted({host, master} - _LOOPBACK):
        try:
            addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
        except OSError as error:
            verdict = Verdict.FAILURE if name == master or is_multi_node else Verdict.WARNING
            advice = "Add it to the DNS or to /etc/hosts, or give another --master-addr."
            yield Finding("names", verdict, f"{name} cannot be resolved: {error}", advice)
            continue
        found = f"{name} resolves to {', '.join(addresses)}"
        is_local = all(address.startswith("127.") or address in _LOOPBACK for address in addresses)
        if is_multi_node and is_local and "GLOO_SOCKET_IFNAME" not in os.environ:
            advice = "Set GLOO_SOCKET_IFNAME to the network's interface, such as eth0, or correct /etc/hosts."
            yield Finding("names", Verdict.FAILURE, f"{found}, which other nodes cannot reach", advice)
        else:
            yield Finding("names", Verdict.OK, found)


def _port(port: int) -> Iterator[Finding]:
    check = f"port {port}"
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            yield Finding(check, Verdict.FAILURE, f"cannot be opened: {error.strerror}", "Choose a port above 1023.")
        elif _is_store_of_ranks(port):
            yield Finding(check, Verdict.OK, "in use by the launcher of these ranks, as MASTER_PORT")
        else:
            advice = f"Choose another port, or stop the process that `ss -ltnp 'sport = :{port}'` shows."
            yield Finding(check, Verdict.FAILURE, "in use by another process", advice)
    else:
        yield Finding(check, Verdict.OK, "free")


def _is_store_of_ranks(port: int) -> bool:
    """Return whether the launcher's store, at which the ranks meet, listens on a port of this node."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True) or os.environ.get("MASTER_PORT") != str(port):
        return False
    key, answers = f"{_PROBE}{uuid.uuid4().hex}", list[bool]()

    def ask() -> None:
        with suppress(tdist.DistError):
            at_master, here = (
                tdist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented there
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S)
                )
                for host in (os.environ.get("MASTER_ADDR", "localhost"), "localhost")
            )
            at_master.set(key, "")
            answers.append(here.check([key]))
            at_master.delete_key(key)

    # In a thread, since a client waits without a limit for a server that accepts connections and sends nothing.
    thread = threading.Thread(target=ask, name="composer-doctor", daemon=True)
    thread.start()
    thread.join(_STORE_TIMEOUT_S)
    return answers == [True]


def _existing(folder: str) -> Path:
    """Return the folder, or its first parent that exists, in which the run makes it."""
    path = Path(folder.partition("{")[0]).absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _disk(folder: Path, num_bytes: int = 64 * _MIB) -> Iterator[Finding]:
    chunk = os.urandom(4 * _MIB)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=_PROBE, buffering=0) as file:

            def write(content: bytes, times: int = 1) -> float:
                begun_s = time.perf_counter()
                for _ in range(times):
                    file.write(content)
                os.fsync(file.fileno())
                return time.perf_counter() - begun_s

            speed = num_bytes / write(chunk, num_bytes // len(chunk))
            sync_s = statistics.median(write(chunk[:4096]) for _ in range(10))
    except OSError as error:
        advice = "Give a folder to which this user may write, on a disk with free space, or mount it for writing."
        yield Finding("save folder", Verdict.FAILURE, f"{folder} cannot be written to: {error.strerror}", advice)
        return
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {speed / 1e6:.0f} MB/s, fsync {1000 * sync_s:.1f} ms, {free / 2**30:.1f} GiB free"
    advice = "Checkpoints take long here: use save_async=True, or a faster disk." * (speed < _SLOW_DISK)
    yield Finding("save folder", Verdict.WARNING if advice else Verdict.OK, found, advice)


def _object_store(uri: str) -> Iterator[Finding]:
    folder = parse_uri(uri.partition("{")[0]).path
    name = posixpath.join(folder.rstrip("/"), f"{_PROBE}{uuid.uuid4().hex}")
    with open_store(uri) as store:
        put = _store_check("put", lambda: validate_credentials(store, name), "write")
        yield put
        if put.verdict is not Verdict.OK:
            return
        yield _store_check("list", lambda: store.list_objects(name).index(name), "list")
        yield _store_check("get", lambda: read_object(store, name), "read")
        yield _store_check("delete", lambda: store.delete_object(name), "delete, or old checkpoints stay")


def _store_check(operation: str, run: Callable[[], object], right: str) -> Finding:
    begun_s = time.perf_counter()
    for failure in _attempt(f"store: {operation}", run):
        return replace(failure, advice=f"Check the address and the credentials: the run must be able to {right}.")
    return Finding(f"store: {operation}", Verdict.OK, f"{1000 * (time.perf_counter() - begun_s):.0f} ms")


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "CUDA of torch": str(torch.version.cuda)}
    for each in distributions():
        found.setdefault(each.name, each.version)  # the first one is the one that is imported
    return found | {"torch": str(torch.__version__)}


def _together(asked: argparse.Namespace, report: _Report) -> Iterator[Finding]:
    """Check what takes all ranks. Every rank must call this."""
    world_size = dist.get_world_size()
    if world_size == 1:
        advice = "Start one rank per device: composer -n N doctor, or composer -N NODES -n N doctor on each node."
        yield Finding("all-reduce", Verdict.SKIPPED, "there is one rank", advice)
        return
    yield from _clock()
    if asked.save_folder is not None and world_size > dist.get_local_world_size():
        yield from _share_folder(asked.save_folder)
    works = all(dist.all_gather_object(not any(one.verdict is Verdict.FAILURE for one in report.findings)))
    yield from _reduce(_device(asked) if works else torch.device("cpu"), asked.timeout)


def _clock() -> Iterator[Finding]:
    """Compare the clock with that of rank 0. Every rank must call this."""
    skews_s: list[float] = []
    for _ in range(5):
        dist.all_reduce(torch.zeros(1))  # which all ranks leave at nearly the same moment
        times_s = dist.all_gather(torch.tensor([time.time()], dtype=torch.float64))
        skews_s.append(float(times_s[dist.get_global_rank()] - times_s[0]))
    skew_s = statistics.median(skews_s)
    if abs(skew_s) > _SKEWED_S:
        advice = "Synchronize the clocks of all nodes, such as with chrony."
        yield Finding("clocks", Verdict.FAILURE, f"{skew_s:+.1f} s from rank 0", advice)
    else:
        yield Finding("clocks", Verdict.OK, f"within {_SKEWED_S:g} s of rank 0")


def _share_folder(folder: str) -> Iterator[Finding]:
    """Check that all nodes have the same folder. Every rank must call this."""
    if parse_uri(folder).backend:
        return
    probe: list[str | None] = [None]
    if dist.get_global_rank() == 0:
        with suppress(OSError):  # a finding of rank 0 already
            file, path = tempfile.mkstemp(dir=_existing(folder), prefix=_PROBE)
            os.close(file)
            probe[0] = os.path.basename(path)
    dist.broadcast_object_list(probe)
    is_shared = probe[0] is None or os.path.exists(_existing(folder) / probe[0])
    dist.barrier()
    if dist.get_global_rank() == 0 and probe[0] is not None:
        os.unlink(_existing(folder) / probe[0])
    if not is_shared and dist.get_local_rank() == 0:
        advice = "To resume on other nodes, give a folder that all nodes mount, or one of an object store."
        yield Finding("save folder", Verdict.WARNING, "not the folder of rank 0", advice)


def _reduce(device: torch.device, timeout_s: float) -> Iterator[Finding]:
    """Measure the all-reduce. Every rank must call this."""
    is_cpu, world_size = device.type == "cpu", dist.get_world_size()
    group: Any = None
    if not is_cpu:
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout raises, and does not abort the process
        backend = tdist.get_default_backend_for_device(device)
        group = tdist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))

    def measure(num_elements: int, times: int) -> float:
        tensor, seconds = torch.ones(num_elements, device=device), list[float]()
        for number in range(times):
            begun_s = time.perf_counter()
            tdist.all_reduce(tensor.fill_(1.0), group=group)
            if float(tensor[-1]) != world_size:  # waits for the device, too
                raise RuntimeError(f"the sum over {world_size} ranks is {float(tensor[-1])}")
            if number:  # the first one connects
                seconds.append(time.perf_counter() - begun_s)
        return statistics.median(seconds)

    latency_s = measure(1, 21)
    num_bytes = (8 if is_cpu else 256) * _MIB
    rate = num_bytes * 2 * (world_size - 1) / world_size / measure(num_bytes // 4, 5)
    found = f"{tdist.get_backend(group)}: latency {1e6 * latency_s:.0f} us, bus bandwidth {rate / 1e9:.2f} GB/s"
    is_slow = latency_s > _SLOW_REDUCE_S or (not is_cpu and rate < 1e9)
    advice = "Set NCCL_DEBUG=INFO to see which network NCCL uses, and look for other load." * is_slow
    if dist.get_global_rank() == 0:
        yield Finding("all-reduce", Verdict.WARNING if is_slow else Verdict.OK, found, advice)


def _compare_versions(reports: Mapping[int, _Report]) -> Iterator[Finding]:
    first = next(iter(reports.values())).versions
    different = [
        f"{name} {', '.join(f'{version} on {_ranks(ranks, len(reports))}' for version, ranks in by_version.items())}"
        for name in sorted(set[str]().union(*(report.versions for report in reports.values())))
        if len(by_version := _group({r: report.versions.get(name, "none") for r, report in reports.items()})) > 1
    ]
    if different:
        advice = "Install the same lock file or image on all nodes, and start all ranks with the same interpreter."
        yield Finding("versions", Verdict.FAILURE, "; ".join(different), advice, tuple(reports))
    else:
        found = f"Python {first['Python']}, torch {first['torch']}, {len(first) - 2} packages"
        yield Finding("versions", Verdict.OK, found, ranks=tuple(reports))


def _group(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _merge(reports: Mapping[int, _Report]) -> list[Finding]:
    """Return the findings of all ranks, with one for ranks of the same verdict."""
    groups: dict[tuple[str, Verdict, str], dict[int, list[str]]] = {}
    for rank, report in reports.items():
        for one in report.findings:
            groups.setdefault((one.check, one.verdict, one.advice), {}).setdefault(rank, []).append(one.found)
    merged: list[Finding] = []
    for (check, verdict, advice), by_rank in groups.items():
        texts = _group({rank: "; ".join(found) for rank, found in by_rank.items()})
        told = [f"rank {ranks[0]} on {reports[ranks[0]].host}: {text}" for text, ranks in texts.items()]
        found = next(iter(texts)) if len(texts) == 1 else "; ".join(told[:4]) + "; ..." * (len(told) > 4)
        merged.append(Finding(check, verdict, found, advice, tuple(by_rank)))
    return merged


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{', ...' * (len(ranks) > 4)}"


def _table(findings: Sequence[Finding], world_size: int) -> str:
    width = max(len(one.check) for one in findings)
    lines: list[str] = []
    for one in findings:
        is_bad = one.verdict in (Verdict.FAILURE, Verdict.WARNING)
        where = f" ({_ranks(one.ranks, world_size)})" if is_bad and len(one.ranks) < world_size else ""
        lines.append(f"{one.verdict:8}  {one.check:{width}}  {one.found}{where}")
        if one.advice:
            lines.append(f"{'':{width + 10}}  {one.advice}")
    counts = [sum(one.verdict is verdict for one in findings) for verdict in (Verdict.FAILURE, Verdict.WARNING)]
    lines.append(f"Failures: {counts[0]}, warnings: {counts[1]}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "composer doctor",
        usage="composer [-N NODES] [-n NPROC] doctor [options]",
        description="Check machines, network and storage before a run. With several ranks, started by composer or by "
        "torchrun -m composer.cli.doctor, the ranks compare what they find.",
        epilog="Exit status: 1 if a check has failed, otherwise 0.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--save-folder", metavar="FOLDER", help="the save_folder of the run: a path, or the address of an object store")
    add("--port", type=int, action="append", default=[], help="a port that the run needs on each node; may be repeated")
    add("--device", choices=["auto", "cpu"], default="auto", help="where the run computes (default: %(default)s)")
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (default: %(default)g)",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
