"""The command that says what there is below an address."""

import pytest

from composer.cli.validate_remote_path import main, validate_remote_path
from composer.utils import maybe_create_object_store_from_uri


@pytest.fixture
def address(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("blue fox")
    store = maybe_create_object_store_from_uri("memory://test-validate-remote-path")
    for name in ("run/a.txt", "run/b.txt"):
        store.upload_object(name, file)
    return "memory://test-validate-remote-path/run"


def test_the_number_of_objects_is_told(address, capsys):
    assert validate_remote_path(address) == f"Found 2 objects at {address}"
    assert main([address]) == 0
    assert capsys.readouterr().out == f"Found 2 objects at {address}\n"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("/some/folder", "is a local path. Give an address"),
        ("memory://test-validate-remote-path/nothing", "There are no objects"),
        ("wandb://project", "nothing here saves to wandb:// addresses"),
    ],
)
def test_a_wrong_address_is_an_error_and_no_traceback(wrong, told, capsys):
    assert main([wrong]) == 1
    said = capsys.readouterr().err
    assert said.startswith("composer_validate_remote_path: error: ")
    assert told in said


def test_the_command_is_installed_under_its_name():
    from importlib.metadata import entry_points

    scripts = entry_points(group="console_scripts")
    if "composer_collect_env" not in scripts.names:
        pytest.skip("the package was installed before it had commands")
    assert scripts["composer_validate_remote_path"].load() is main
