"""Publishing a Hugging Face folder on the Hub, and looking whether it has arrived."""

import argparse
import filecmp
import tempfile
from pathlib import Path

from composer_ckpt.outcomes import MismatchError, UsageError

__all__ = ["check_request", "publish"]


def check_request(options: argparse.Namespace, target: str) -> None:
    """Refuse options for the Hub that do not fit.

    Raises:
        UsageError: If something else than a Hugging Face folder is written, or nobody says to which repository.
    """
    if options.push_to_hub is not None and target != "hf":
        raise UsageError(f"--push-to-hub is of Hugging Face folders, and this writes {target}. Leave it out.")
    given = {"--private": options.private, "--test-uploaded-model": options.test_uploaded_model}
    if options.push_to_hub is None and any(given.values()):
        names = ", ".join(name for name, value in given.items() if value)
        raise UsageError(f"{names} needs --push-to-hub REPO, such as 'me/my-model'.")


def publish(folder: str | Path, options: argparse.Namespace) -> str:
    """Send all files of a folder to a repository in one commit, and return the commit's address.

    Args:
        folder: With the files.
        options: Of `convert`.

    Raises:
        OSError: If the Hub refuses, or cannot be reached.
        MismatchError: If `--test-uploaded-model` finds that the Hub has other files.
    """
    from huggingface_hub import HfApi, hf_hub_download  # it takes a second to load, and few publish

    api = HfApi()
    # With --overwrite only may there be a repository of this name: its files would be replaced.
    repo = api.create_repo(options.push_to_hub, private=options.private or None, exist_ok=options.replaces_repo).repo_id
    commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Add a model that composer-ckpt wrote")
    if options.test_uploaded_model:
        with tempfile.TemporaryDirectory(prefix="composer-ckpt-", dir=options.tmp_dir) as place:
            names = [path.relative_to(folder).as_posix() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
            for name in names:
                hf_hub_download(repo, name, revision=commit.oid, local_dir=place)
            _compare(folder, place, names, repo)
    return commit.commit_url


def _compare(folder: str | Path, arrived: str, names: list[str], repo: str) -> None:
    _, other, failed = filecmp.cmpfiles(folder, arrived, names, shallow=False)
    if other or failed:
        raise MismatchError(
            f"the Hub has not what was sent to {repo}: {', '.join([*other, *failed][:5])}. The folder here is whole. "
            f"Look at the repository, and send it again."
        )
