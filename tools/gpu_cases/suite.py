"""The tests of the packages that carry the mark `gpu`, where pytest is installed."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from gpu_cases import Skip
from gpu_cases.as_installed import ROOT, source_folders

_SUMMARY = re.compile(r"\d+ (passed|failed|error|skipped)")


def marked(device: str) -> str:
    """Run each package's own tests with the mark."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skip(f"{' and '.join(missing)} not installed; the other cases need neither")
    said, failed = [], []
    for member, files in _files().items():
        # The root's conftest is left out: it collects pages, by a library that need not be there.
        options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", f"--confcutdir={member}", "--import-mode=importlib"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, flush=True)
        last = done.stdout.strip().rpartition("\n")[2]
        said += [f"{member.name} {', '.join(match.group() for match in _SUMMARY.finditer(last))}"]
        failed += [member.name] if done.returncode else []
    assert not failed, f"{'; '.join(said)}"
    return "; ".join(said)


def _files() -> dict[Path, list[Path]]:
    """Return each package's test files in which the mark occurs."""
    found: dict[Path, list[Path]] = {}
    for source in source_folders():
        for path in sorted((source.parent / "tests").rglob("test_*.py")):
            if "mark.gpu" in path.read_text(encoding="utf-8"):
                found.setdefault(source.parent, []).append(path)
    return found
