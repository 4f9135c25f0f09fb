"""Import every module of some packages, and say which of them does more than define names.

    quiet_imports.py PACKAGE ...

No module may open a socket, start a process or a thread, change the environment, catch a signal or configure logging
when it is imported. What is heard counts against the module whose body is running then, so what a library does when
it is imported is not held against the module of ours that imports it. A module that cannot be imported, for want of
something that an extra brings, must say how to install it, unless it is private: whoever imports that has looked.
"""

import logging
import pkgutil
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from types import FrameType

LOUD = (
    "socket.",
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.putenv",
    "os.spawn",
    "os.system",
    "os.unsetenv",
    "_thread.start_new_thread",
)
PROGRAMS = {"__main__", "sitecustomize"}  # to import them is to run them


def import_all(name: str) -> Iterator[str]:
    """Import a package with all modules below it, and yield the names of those that are there."""
    package = import_module(name)
    yield name
    for found in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{name}."):
        if found.name.rpartition(".")[2] in PROGRAMS:
            continue
        try:
            yield from import_all(found.name)
        except ImportError as error:
            is_left_to_others = is_private(found.name) and isinstance(error, ModuleNotFoundError)
            if not is_left_to_others and "pip install" not in str(error):
                raise


def is_private(name: str) -> bool:
    """Answer whether a module is one that only its own package imports."""
    return any(part.startswith("_") for part in name.split("."))


def running_module(frame: FrameType | None) -> str:
    """Return the name of the module whose body a frame belongs to, directly or through what it called."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return "" if frame is None else frame.f_globals["__name__"]


def process_state() -> dict[str, object]:
    """Return what an import could change without being heard."""
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "signals": {number.name: signal.getsignal(number) for number in signal.Signals},
        "logging": (list(logging.root.handlers), logging.root.level),
    }


def main(names: list[str]) -> int:
    """Import the packages, print what they did besides, and return the exit status."""
    heard = []

    def listen(event: str, arguments: tuple) -> None:
        if event.startswith(LOUD) and (module := running_module(sys._getframe(1))).partition(".")[0] in names:
            heard.append(f"{module}: {event} {arguments!r}")

    before = process_state()
    sys.addaudithook(listen)
    imported = [module for name in names for module in import_all(name)]
    after = process_state()
    heard += [f"{what}: {before[what]} became {after[what]}" for what in before if before[what] != after[what]]
    print("\n".join(heard) or f"{len(imported)} modules were imported quietly.")
    return 1 if heard else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
