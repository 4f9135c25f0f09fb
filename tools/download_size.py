"""Print how much `uv pip` has to download for the locked packages of an environment.

    download_size.py --uv UV LOCK

Runs with the Python of that environment. The lock has no sizes, so they come from the package registry.
"""

import argparse
import subprocess
import sys
import tomllib


def total_bytes(pylock: str) -> int:
    """Return the size of one file of each package; 0 for a package of unknown size."""
    packages = tomllib.loads(pylock).get("packages", [])
    files = ((package.get("wheels") or [package.get("sdist", {})])[0] for package in packages)
    return sum(file.get("size", 0) for file in files)


def main() -> None:
    """Print the number of packages, their size, and the time that the download takes."""
    parser = argparse.ArgumentParser(description="Print how much is to be downloaded.")
    parser.add_argument("--uv", default="uv", help="the uv that installs")
    parser.add_argument("lock", help="a requirements file with every package and its version")
    arguments = parser.parse_args()
    # Of all files of a package, pylock.toml holds the one for this machine.
    options = ["-q", "--no-deps", "--no-header", "--format", "pylock.toml", "--python", sys.executable]
    command = [arguments.uv, "pip", "compile", *options, arguments.lock]
    pylock = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    number, size = pylock.count("[[packages]]"), total_bytes(pylock)
    print(
        f"Installing {number} packages: up to {size / 1e9:.1f} GB to download unless they are in uv's cache, about "
        f"{size * 8 / 100e6 / 60:.0f} minutes at 100 Mbit/s.",
        flush=True,
    )


if __name__ == "__main__":
    main()
