"""Which files the output of a rank is appended to, beside those that the launcher keeps for itself."""

import os
from collections.abc import Mapping

from composer_dist.launch.args import PLACEHOLDERS, Options

__all__ = ["named_file"]

_UNSET = ("", "false")


def named_file(stream: str, options: Options, env: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return the file that the user, or a platform, wants a rank's stream to be appended to.

    Args:
        stream: `'stdout'` or `'stderr'`.
        options: What was typed.
        env: The rank's variables.
        environ: The launcher's environment.
    """
    if env["LOCAL_RANK"] == "0":
        return None
    hosted = _hosted_prefix(environ)
    if hosted is not None:
        return f"{hosted}{env['LOCAL_RANK']}.txt"  # both streams in one file
    name_format: str | None = getattr(options, stream)
    if name_format is None:
        return None
    return name_format.format(**{name: int(env[name.upper()]) for name in PLACEHOLDERS})


def _hosted_prefix(environ: Mapping[str, str]) -> str | None:
    """Return what the files begin with that MosaicML's platform collects, where this runs there."""
    folder, prefix = environ.get("MOSAICML_LOG_DIR", ""), environ.get("MOSAICML_GPU_LOG_FILE_PREFIX", "")
    is_hosted = environ.get("MOSAICML_PLATFORM", "").lower() == "true"
    if not is_hosted or folder.lower() in _UNSET or prefix.lower() in _UNSET:
        return None
    return os.path.join(folder, prefix)
