import importlib

import pytest

import composer_dist

PUBLIC = {
    "composer_dist": "DDP DDPSyncStrategy DeepSpeed Device DeviceCPU DeviceGPU DeviceHPU DeviceMPS DeviceNeuron "
    "DeviceTPU LengthCurriculumSampler MAX_SEED MissingEnvironmentError Precision "
    "RankDisagreementError RepeatedAugmentationSampler STR_TO_DTYPE "
    "SingleDevice Strategy __version__ check_agreement configure_deterministic_mode "
    "ddp_sync_context describe_model get_device get_free_tcp_port get_global_rank get_local_rank "
    "get_local_world_size get_node_rank get_precision_context get_random_seed get_rng_state "
    "get_sampler get_world_size initialize_dist is_hpu_installed is_model_ddp is_model_deepspeed "
    "is_model_fsdp is_model_fsdp2 "
    "is_xla_installed load_rng_state parse_deepspeed_config prepare_ddp_module seed_all "
    "seed_context unwrap_model validate_precision",
    "composer_dist.dist": "all_gather all_gather_object all_reduce barrier broadcast broadcast_object_list "
    "get_global_rank get_local_rank get_local_world_size get_node_rank get_sampler get_world_size initialize_dist "
    "is_available is_initialized",
    "composer_dist.testing": "DeviceCounts SimulatedAccelerator run_ranks",
}
BESIDE_ALL = (
    "all_gather_object_list_hpu busy_wait_for_local_rank_zero dist get_node_signal_file_name "
    "local_rank_zero_download_and_wait MissingEnvironmentError run_local_rank_zero_first write_signal_file"
)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_change_only_on_purpose(module):
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == sorted(PUBLIC[module].split())
    assert all(hasattr(loaded, name) for name in loaded.__all__)


@pytest.mark.parametrize("name", BESIDE_ALL.split())
def test_the_face_has_names_that_a_star_import_leaves_out(name):
    face = importlib.import_module("composer_dist.dist")
    assert hasattr(face, name)
    assert name not in face.__all__


def test_the_package_lists_names_that_it_has_not_loaded():
    assert set(composer_dist.__all__) <= set(dir(composer_dist))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'composer_dist' has no attribute 'get_devise'"):
        composer_dist.get_devise  # noqa: B018


def test_a_name_is_one_object_whichever_module_it_is_taken_from():
    from composer_dist import dist

    assert composer_dist.get_sampler is dist.get_sampler
    assert composer_dist.get_global_rank is dist.get_global_rank
