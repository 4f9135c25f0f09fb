import subprocess
import sys

import pytest

import composer_fsdp

PUBLIC = (
    "Estimate Explanation FSDP FSDP2Config FSDPConfig ParallelismConfig ShardingPlan TPConfig Workload __version__ "
    "apply_ac estimate explain get_summon_params_fn make_plan parallelize_composer_model parallelize_model "
    "parse_parallelism summon_full_params_fsdp2"
)


def test_public_names_change_only_on_purpose():
    assert sorted(composer_fsdp.__all__) == PUBLIC.split()
    assert all(hasattr(composer_fsdp, name) for name in composer_fsdp.__all__)
    assert set(composer_fsdp.__all__) <= set(dir(composer_fsdp))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'composer_fsdp' has no attribute 'FSDP3'"):
        composer_fsdp.FSDP3  # noqa: B018


def test_settings_are_known_without_torch():
    script = "import sys; from composer_fsdp import FSDPConfig; FSDPConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
