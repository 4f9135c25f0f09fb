"""Print how much `uv pip` has to download for the locked packages that an environment lacks.

    download_size.py --uv UV LOCK

Runs with the Python of that environment. The lock has no sizes, so they come from the package registry.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions


def missing(pylock: str) -> list[int]:
    """Return the download size of each package that is not installed; 0 if the registry does not know it."""
    installed = {(re.sub(r"[-_.]+", "-", found.name).lower(), found.version) for found in distributions()}
    packages = tomllib.loads(pylock).get("packages", [])
    lacking = [package for package in packages if (package["name"], package["version"]) not in installed]
    return [(package.get("wheels") or [package["sdist"]])[0].get("size", 0) for package in lacking]


def main() -> None:
    """Print the number of packages, their size, and the time that the download takes."""
    parser = argparse.ArgumentParser(description="Print how much is to be downloaded.")
    parser.add_argument("--uv", default="uv", help="the uv that installs")
    parser.add_argument("lock", help="a requirements file with every package and its version")
    arguments = parser.parse_args()
    # Of all files of a package, pylock.toml holds the one for this machine.
    options = ["-q", "--no-deps", "--no-header", "--format", "pylock.toml", "--python", sys.executable]
    command = [arguments.uv, "pip", "compile", *options, arguments.lock]
    sizes = missing(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    if sizes:
        minutes = max(1, round(sum(sizes) * 8 / 100e6 / 60))
        print(
            f"Installing {len(sizes)} packages: up to {sum(sizes) / 1e9:.1f} GB to download, less what uv's cache has; "
            f"about {minutes} min at 100 Mbit/s.",
            flush=True,
        )


if __name__ == "__main__":
    main()
