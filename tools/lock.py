"""Keep `uv.lock` free of addresses, so that it works with every mirror of the package registry.

    lock.py strip            rewrite uv.lock in its address-free form
    lock.py clean            the same from stdin to stdout, as a git filter
    lock.py check [--uv UV]  no address is committed, and a fresh resolution agrees with what is
    lock.py setup            let git strip the file whenever it is added

The address-free form drops every address, size and upload time, and keeps names, versions, hashes, markers, extras,
conflicts and the files of all platforms. It also carries a constraint that no project states. uv finds the lock
outdated because of it, resolves again with the pinned versions as its first choice, and so fills the addresses in.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
MARK = '{ name = "addresses-removed", specifier = ">=0" }'

_REGISTRY = re.compile(r'registry = "[^"]*://[^"]*"')
_FILE = re.compile(r'\{ url = "[^"?#]*/(?P<name>[^"?#/]+)(?:[?#][^"]*)?", hash = "(?P<hash>[^"]+)"[^}]*\}')
_CONSTRAINTS = re.compile(r"^constraints = \[(?P<items>.*?)\]$", re.MULTILINE | re.DOTALL)
_MANIFEST = "[manifest]\n"


class LockError(RuntimeError):
    """What stops a command, as a sentence for the person who typed it."""


def strip(text: str) -> str:
    """Return the lock `text` without addresses; a text that has none comes back unchanged.

    Raises:
        LockError: If the text is no TOML, or an address is left that the lock cannot do without.
    """
    text = _REGISTRY.sub('registry = "index"', text.replace("\r\n", "\n"))
    text = _FILE.sub(lambda file: f'{{ filename = "{unquote(file["name"])}", hash = "{file["hash"]}" }}', text)
    text = text if MARK in text else _mark(text)
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LockError(
            f"uv.lock is not valid TOML ({error}), perhaps because of a merge conflict; "
            "type `git checkout HEAD -- uv.lock`, then `make lock`."
        ) from error
    if found := addresses(text):
        raise LockError(
            f"uv.lock needs an address, {found[0]}; only packages of a registry, with a hash for every file, can be "
            "locked without one, so depend on a release of this one, then type `make lock`."
        )
    return text


def _mark(text: str) -> str:
    if _MANIFEST not in text:
        head, separator, packages = text.partition("[[package]]\n")
        return f"{head}{_MANIFEST}constraints = [{MARK}]\n\n{separator}{packages}"
    head, _, rest = text.partition(_MANIFEST)
    end = rest.find("\n[")  # the next table, be it [manifest.x] or [[package]]
    manifest, others = (rest, "") if end < 0 else (rest[:end], rest[end:])
    if found := _CONSTRAINTS.search(manifest):
        items = found["items"].strip().rstrip(",")
        manifest = manifest.replace(found[0], f"constraints = [{items}{', ' if items else ''}{MARK}]")
    else:
        manifest = f"constraints = [{MARK}]\n{manifest}"
    return f"{head}{_MANIFEST}{manifest}{others}"


def addresses(text: str) -> list[str]:
    """Return the lines of `text` that hold an address, with their numbers."""
    return [f"line {number}: {line}" for number, line in enumerate(text.splitlines(), 1) if "://" in line]


def differences(committed: str, fresh: str) -> list[str]:
    """Say, a line each, in what a fresh resolution disagrees with the committed, address-free lock.

    Files that only the fresh lock has are no difference, as long as the committed one has any: projects add wheels to
    old releases.
    """
    old_lock, new_lock = tomllib.loads(committed), tomllib.loads(strip(fresh))
    listed = Counter(_title(package) for package in old_lock.get("package", []))
    found = [f"{title} is listed {times} times" for title, times in listed.items() if times > 1]
    old, new = ({_title(package): package for package in lock.get("package", [])} for lock in (old_lock, new_lock))
    found += [f"{title} is locked, but a fresh resolution does not want it" for title in old.keys() - new.keys()]
    found += [f"{title} is wanted by a fresh resolution, but not locked" for title in new.keys() - old.keys()]
    found += _setting_differences("the lock", old_lock, new_lock, but={"package", "manifest", "version", "revision"})
    found += _setting_differences("the manifest", old_lock.get("manifest", {}), new_lock.get("manifest", {}))
    for title in old.keys() & new.keys():
        found += _setting_differences(title, old[title], new[title], but={"sdist", "wheels"})
        found += _file_differences(title, _files(old[title]), _files(new[title]))
    return sorted(found)


def _title(package: Mapping[str, Any]) -> str:
    return " ".join([package["name"], package.get("version", ""), *package.get("resolution-markers", [])])


def _setting_differences(
    title: str, old: Mapping[str, Any], new: Mapping[str, Any], but: Iterable[str] = ()
) -> Iterable[str]:
    for name in (old.keys() | new.keys()).difference(but):
        if old.get(name) != new.get(name):
            yield f"{title}: {name} is {old.get(name)}, fresh {new.get(name)}"


def _files(package: Mapping[str, Any]) -> set[tuple[str, str | None]]:
    """Return names with hashes, as pairs: a name that is listed twice must not hide one of its hashes."""
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    return {(file.get("filename", str(file)), file.get("hash")) for file in files}


def _file_differences(title: str, old: set[tuple[str, str | None]], new: set[tuple[str, str | None]]) -> Iterable[str]:
    if new and not old:
        yield f"{title}: none of its files is locked, the registry has {len(new)}"
    registry = dict(new)
    for name, digest in old - new:
        if name in registry:
            yield f"{title}: {name} is locked with {digest}, the registry says {registry[name]}"
        else:
            yield f"{title}: the file {name} is gone from the registry"


def check(uv: str) -> list[str]:
    """Return everything that is wrong with the committed lock; needs the registry."""
    committed = _committed()
    if found := addresses(committed):
        return [f"uv.lock holds an address, {line}" for line in found[:5]]
    if strip(committed) != committed:  # without the mark uv would not resolve again, and so find nothing wrong
        return ["uv.lock does not have the form that `tools/lock.py strip` writes: type `make lock`."]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        (copy / "uv.lock").write_text(committed, encoding="utf-8")
        members = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]
        for manifest in [ROOT / "pyproject.toml", *members]:
            target = copy / manifest.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(manifest, target)
        advice = "`make check-lock` brings the uv that fits, `make lock` resolves again."
        _run(uv, "lock", "--directory", folder, advice=advice)
        return differences(committed, (copy / "uv.lock").read_text(encoding="utf-8"))


def _committed() -> str:
    """Return what git would commit, or the file itself where there is no git."""
    try:
        return _git("show", ":./uv.lock")
    except LockError:
        return _read()


def _read() -> str:
    try:
        return (ROOT / "uv.lock").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise LockError(
            f"there is no uv.lock in {ROOT}; type `git checkout HEAD -- uv.lock` to get it back, or `make lock` to "
            "resolve from nothing."
        ) from error


def _git(*arguments: str) -> str:
    return _run("git", "-C", str(ROOT), *arguments, advice="install git and type this in a clone.")


def _run(program: str, *arguments: str, advice: str) -> str:
    try:
        run = subprocess.run([program, *arguments], capture_output=True, encoding="utf-8", check=False)
    except OSError as error:
        raise LockError(f"{program} cannot be run ({error.strerror}); {advice}") from error
    if run.returncode:
        raise LockError(f"`{shlex.join([program, *arguments])}` failed: {run.stderr.strip()}; {advice}")
    return run.stdout


def setup() -> None:
    """Tell this clone's git to pass uv.lock through `clean`, as .gitattributes asks for."""
    folder = _git("rev-parse", "--show-prefix").rstrip("\n")  # git runs filters at the top of its working tree
    clean = f"python3 {shlex.quote(f'{folder}tools/lock.py')} clean"
    for name, value in {"clean": clean, "smudge": "cat", "required": "true"}.items():
        _git("config", f"filter.uvlock.{name}", value)


def main() -> int:
    """Run one of the four commands and return its exit status."""
    parser = argparse.ArgumentParser(description="Keep uv.lock free of addresses.")
    parser.add_argument("command", choices=["strip", "clean", "check", "setup"], help="as the top of this file says")
    parser.add_argument("--uv", default="uv", help="the uv that resolves again for check")
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case "strip":
                stripped = strip(_read())
                (ROOT / "uv.lock").write_text(stripped, encoding="utf-8", newline="\n")
            case "clean":
                sys.stdout.buffer.write(strip(sys.stdin.buffer.read().decode()).encode())
            case "setup":
                setup()
            case "check":
                problems = check(arguments.uv)
                print("\n".join(problems) or "uv.lock holds no address and equals a fresh resolution.")
                return 1 if problems else 0
    except LockError as error:
        print(f"tools/lock.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
