import importlib
import pkgutil
import subprocess
import sys

import pytest

import composer_checkpoint


def test_every_public_name_can_be_had():
    for name in composer_checkpoint.__all__:
        assert getattr(composer_checkpoint, name) is not None
    assert set(composer_checkpoint.__all__) <= set(dir(composer_checkpoint))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'composer_checkpoint' has no attribute 'save_fil'"):
        composer_checkpoint.save_fil  # noqa: B018


def test_importing_the_package_loads_neither_torch_nor_numpy():
    script = "import sys, composer_checkpoint; print({'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("module", ["composer_checkpoint.verify", "composer_checkpoint.files"])
def test_verify_is_the_function_whichever_module_is_loaded_first(module):
    script = f"import {module}, composer_checkpoint; print(callable(composer_checkpoint.verify))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_no_public_name_is_hidden_by_a_module_of_that_name():
    modules = {module.name for module in pkgutil.iter_modules(composer_checkpoint.__path__)}
    assert modules & set(composer_checkpoint.__all__) == {"verify"}


def test_every_error_is_a_checkpoint_error():
    errors = importlib.import_module("composer_checkpoint.errors")
    assert all(issubclass(getattr(errors, name), composer_checkpoint.CheckpointError) for name in errors.__all__)
    assert issubclass(composer_checkpoint.NoCheckpointError, FileNotFoundError)
    assert issubclass(composer_checkpoint.CheckpointConflictError, FileExistsError)
    assert issubclass(composer_checkpoint.StorageError, OSError)
