"""The names that users may import; a change here is a change to the interface."""

import subprocess
import sys

import pytest

import composer_algorithms
from composer_algorithms import ema, functional, label_smoothing, mixup


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (composer_algorithms, {"EMA", "LabelSmoothing", "MixUp", "Metadata", "all_metadata", "__version__"}),
        (functional, {"compute_ema", "mixup_batch", "smooth_labels"}),
        (ema, {"EMA", "EMAParameters", "compute_ema", "get_model_context_manager", "METADATA"}),
        (label_smoothing, {"LabelSmoothing", "smooth_labels", "METADATA"}),
        (mixup, {"MixUp", "mixup_batch", "METADATA"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_public_names_are_these(module, names):
    assert set(module.__all__) == names
    assert all(hasattr(module, name) for name in names)
    assert set(module.__all__) <= set(dir(module))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'MixDown'"):
        composer_algorithms.MixDown  # noqa: B018  # the look-up is the test


def test_importing_the_package_does_not_import_torch():
    code = "import sys, composer_algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
