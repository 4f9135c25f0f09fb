import pickle

import pytest

from composer_models import MissingConditionalImportError


def test_the_message_names_the_package_the_extra_and_the_line_to_type():
    error = MissingConditionalImportError("coco", "pycocotools", distribution="composer-models")
    assert "pycocotools is not installed" in str(error)
    assert "pip install 'composer-models[coco]'" in str(error)
    assert "conda install -c conda-forge pycocotools" in str(error)


def test_it_names_the_suite_unless_told_otherwise():
    assert "'composer-suite[wandb]'" in str(MissingConditionalImportError("wandb", "wandb"))


def test_it_can_be_caught_as_an_import_error():
    with pytest.raises(ImportError):
        raise MissingConditionalImportError("vision", "torchvision")


def test_it_survives_a_pickle_whole():
    error = MissingConditionalImportError("coco", "pycocotools", None, distribution="composer-models")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.extra_deps_group, again.conda_channel) == (str(error), "coco", None)
