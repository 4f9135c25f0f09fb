"""Modules that Composer once had lead to where their names are now, or say what takes their place."""

import os
import pickle
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest

GONE = [
    ("composer.callbacks.eval_output_logging_callback", "Generate"),
    ("composer.callbacks.health_checker", "SystemMetricsMonitor"),
    ("composer.datasets.ade20k", "torchvision.transforms.v2"),
    ("composer.datasets.c4", "allenai/c4"),
    ("composer.datasets.cifar", "torchvision.datasets.CIFAR10"),
    ("composer.datasets.ffcv_utils", "StreamingDataset"),
    ("composer.datasets.imagenet", "torchvision.datasets.ImageFolder"),
    ("composer.datasets.in_context_learning_evaluation", "lm-evaluation-harness"),
    ("composer.datasets.lm_dataset", "DataCollatorForLanguageModeling"),
    ("composer.datasets.mnist", "torchvision.datasets.MNIST"),
    ("composer.datasets.synthetic", "FakeData"),
    ("composer.distributed.deepspeed", "deepspeed_config"),
    ("composer.models.bert", "AutoModelForMaskedLM"),
    ("composer.models.gpt2.model", "AutoModelForCausalLM"),
    ("composer.trainer._patch_pytorch", "fully_shard"),
    ("composer.trainer.trainer_hparams", "Call the class"),
    ("composer.algorithms.algorithm_hparams_registry", "Call the class"),
    ("composer.utils.eval_client", "lm-evaluation-harness"),
    ("composer.utils.fx_utils", "torch.fx"),
]
MOVED = [
    ("composer.callbacks.utils", "create_interval_scheduler", "composer.utils"),
    ("composer.distributed.mosaic_fsdp", "prepare_fsdp_module", "composer.distributed.mosaic_parallelism"),
    ("composer.models.classify_mnist", "mnist_model", "composer.models"),
    ("composer.models.resnet.model", "composer_resnet", "composer.models"),
    ("composer.models.timm", "composer_timm", "composer.models"),
    ("composer.models.timm.model", "composer_timm", "composer.models"),
    ("composer.trainer.ddp", "DDPSyncStrategy", "composer.distributed"),
    ("composer.trainer.devices", "DeviceGPU", "composer.devices"),
    ("composer.trainer.devices.device", "Device", "composer.devices"),
    ("composer.trainer.devices.device_cpu", "DeviceCPU", "composer.devices"),
    ("composer.trainer.dist_strategy", "prepare_fsdp_module", "composer.distributed"),
    ("composer.trainer.meta_safe_apply", "meta_safe_apply", "composer.distributed.meta_safe_apply"),
    ("composer.trainer.mosaic_fsdp", "get_mixed_precision", "composer.distributed.mosaic_parallelism"),
    ("composer.trainer.mosaic_fsdp_utils", "SHARDING_MAP", "composer.distributed.mosaic_parallelism"),
]
_CAPTURED = {"capture_output": True, "text": True}


@pytest.fixture(autouse=True)
def _nothing_is_loaded():
    """Forget what a test before this one has loaded, and with it that it was warned of."""
    yield
    for name, *_ in MOVED:
        while name not in ("composer.callbacks", "composer.distributed", "composer.models", "composer.trainer"):
            sys.modules.pop(name, None)
            name = name.rpartition(".")[0]


@pytest.mark.parametrize(("module", "instead"), GONE)
def test_a_module_that_is_gone_says_what_takes_its_place(module, instead):
    with pytest.raises(ModuleNotFoundError, match=rf"^composer\.\S+ is gone: .*{instead}") as caught:
        exec(f"from {module} import anything")
    assert module.startswith(caught.value.name)


@pytest.mark.parametrize(("module", "instead"), [row for row in GONE if "hparams" not in row[0]])
def test_a_module_that_is_gone_says_so_also_where_it_is_imported_from_its_package(module, instead):
    package, _, name = module.rpartition(".")
    with pytest.raises(ImportError, match=rf"^composer\.\S+ is gone: .*{instead}"):
        exec(f"from {package} import {name}")


@pytest.mark.filterwarnings("ignore:composer.trainer.devices is now:DeprecationWarning")
def test_a_module_that_has_moved_is_imported_from_its_package():
    from composer.trainer import devices

    assert devices.DeviceCPU is import_module("composer.devices").DeviceCPU


@pytest.mark.parametrize(("module", "instead"), GONE)
def test_who_asks_whether_a_gone_module_is_there_hears_that_it_is_not(module, instead):
    if module != "composer.models.gpt2.model":  # asking for this one imports the package that it was in
        assert find_spec(module) is None
    with pytest.raises(ImportError):
        import_module(module)
    assert module not in sys.modules


def test_tools_that_ask_the_finders_themselves_hear_the_same():
    code = (
        "import composer, sys\nprint([found for finder in sys.meta_path "
        "if (found := finder.find_spec('composer.datasets.cifar', []))])"
    )
    assert subprocess.run([sys.executable, "-c", code], **_CAPTURED).stdout == "[]\n"


@pytest.mark.parametrize(("module", "name", "now"), MOVED)
def test_a_module_that_has_moved_gives_the_names_of_the_new_one_and_warns_once(module, name, now):
    given = {}
    with pytest.warns(DeprecationWarning, match=rf"^composer\.\S+ is now {now}; .* goes away in 1\.0") as caught:
        exec(f"from {module} import {name}\nimport {module}", given)
    assert given[name] is getattr(import_module(now), name)
    assert [warning.filename for warning in caught] == ["<string>"]
    assert find_spec(module).name == module


@pytest.mark.filterwarnings("ignore:composer.trainer.devices is now:DeprecationWarning")
def test_a_module_that_has_moved_is_starred_listed_and_asked_for_names_like_the_new_one():
    given = {}
    exec("from composer.trainer.devices import *\nimport composer.trainer.devices as devices", given)
    assert "DeviceMPS" in given
    assert "DeviceMPS" in dir(given["devices"])
    assert not hasattr(given["devices"], "__file__")
    with pytest.raises(ImportError, match="cannot import name 'DeviceABC'"):
        exec("from composer.trainer.devices import DeviceABC")


@pytest.mark.filterwarnings("ignore:composer.trainer.devices is now:DeprecationWarning")
def test_old_files_that_name_a_module_that_has_moved_are_read():
    pickled = b"ccomposer.trainer.devices.device_cpu\nDeviceCPU\n."
    assert pickle.loads(pickled) is import_module("composer.devices").DeviceCPU


def test_a_module_that_never_was_gives_the_error_that_python_gives():
    for module in ("composer.nothing", "composer.utils.nothing"):
        assert find_spec(module) is None
        with pytest.raises(ModuleNotFoundError, match=rf"^No module named '{module}'$"):
            import_module(module)


def test_other_packages_are_found_or_not_as_before():
    for module in ("composer_trainer", "nothing.datasets.cifar"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            import_module(module)


def test_one_finder_is_added_behind_all_others():
    code = (
        "import sys; before = list(sys.meta_path)\nimport composer, importlib; importlib.reload(composer)\n"
        "assert sys.meta_path[:-1] == before, sys.meta_path\n"
        "print([name for name in ('importlib.util', 'torch', 'difflib') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path}\n{code}"], **_CAPTURED)
    assert shown.stdout == "[]\n", shown.stderr


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("composer.callbacks.GradMonitor", "OptimizerMonitor"),
        ("composer.callbacks.HealthChecker", "SystemMetricsMonitor"),
        ("composer.datasets.build_cifar10_dataloader", "CIFAR10"),
        ("composer.datasets.InContextLearningDataset", "lm-evaluation-harness"),
        ("composer.datasets.SyntheticBatchPairDataset", "FakeData"),
        ("composer.datasets.utils.pil_image_collate", "ToImage"),
        ("composer.distributed.mosaic_parallelism.get_cpu_offload", "cpu_offload=True"),
        ("composer.distributed.mosaic_parallelism.set_custom_fsdp_module_kwargs", "fsdp_wrap_fn"),
        ("composer.distributed.parse_deepspeed_config", "deepspeed_config"),
        ("composer.loggers.LogLevel", "log_interval"),
        ("composer.loggers.logger.LogLevel", "log_interval"),
        ("composer.metrics.METRIC_DEFAULT_CTORS", "left out"),
        ("composer.metrics.nlp.InContextLearningExpectedCalibrationError", "CalibrationError"),
        ("composer.models.MMDetModel", "detection"),
        ("composer.trainer.TrainerHparams", "arguments"),
        ("composer.utils.EvalClient", "lm-evaluation-harness"),
        ("composer.utils.FORMAT_NAME_WITH_DIST_TABLE", "format_name_with_dist"),
        ("composer.utils.FORMAT_NAME_WITH_DIST_AND_TIME_TABLE", "format_name_with_dist_and_time"),
        ("composer.utils.using_torch_2", "PyTorch 2"),
        ("composer.utils.checkpoint.is_checkpoint_legacy_sharded", "load_checkpoint"),
        ("composer.utils.file_helpers.FORMAT_NAME_WITH_DIST_TABLE", "format_name_with_dist"),
        ("composer.utils.file_helpers.validate_remote_path", "composer_validate_remote_path"),
        ("composer.utils.misc.using_torch_2_0_1", "PyTorch 2"),
    ],
)
def test_a_name_that_is_gone_says_what_takes_its_place(name, instead):
    module, _, name = name.rpartition(".")
    with pytest.raises(ImportError, match=rf"{name} is gone: .*{instead}"):
        exec(f"from {module} import {name}")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("composer.models", "bert"),
        ("composer.models", "MMDetModel"),
        ("composer.metrics.nlp", "InContextLearningExpectedCalibrationError"),
        ("composer.utils", "using_torch_2"),
    ],
)
def test_who_asks_whether_a_name_is_there_learns_that_it_is_not(module, name):
    face = import_module(module)
    assert not hasattr(face, name)
    assert getattr(face, name, None) is None
    with pytest.raises(AttributeError, match=rf"{name} is gone: "):
        getattr(face, name)
    with mock.patch.object(face, name, 1, create=True):
        assert getattr(face, name) == 1


@pytest.mark.filterwarnings("ignore:composer.models.resnet is now:DeprecationWarning")
def test_a_name_that_is_gone_says_so_at_a_former_address_too():
    with pytest.raises(ImportError, match=r"ComposerResNet is gone: .*composer_resnet"):
        exec("from composer.models.resnet import ComposerResNet")


def test_metrics_of_the_tasks_that_are_left_out_are_imported_and_say_so_when_they_are_made():
    from composer.metrics import InContextLearningLMAccuracy, InContextLearningQAAccuracy

    for metric in (InContextLearningLMAccuracy, InContextLearningQAAccuracy):
        with pytest.raises(RuntimeError, match=r"was removed: .* evaluation harness"):
            metric()


def test_what_is_there_is_imported_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("from composer.datasets.utils import add_vision_dataset_transform\nimport composer.utils.collect_env")


def test_scripts_learn_that_they_do_not_run_on_the_platform_that_is_gone(monkeypatch):
    from composer.loggers import mosaicml_logger

    monkeypatch.delenv("MOSAICML_PLATFORM", raising=False)
    assert os.environ.get(mosaicml_logger.MOSAICML_PLATFORM_ENV_VAR, "false") == "false"
    monkeypatch.setenv("MOSAICML_ACCESS_TOKEN_FILE", "token")
    assert os.environ[mosaicml_logger.MOSAICML_ACCESS_TOKEN_ENV_VAR] == "token"
