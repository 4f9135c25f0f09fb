"""`auto_log_hparams` logs the arguments as they are used, and nothing that nobody gave."""

import logging

import torch

from composer.algorithms import EMA
from composer.callbacks import SpeedMonitor
from composer.loggers import InMemoryLogger


def test_the_hyperparameters_of_a_plain_run(make_trainer, make_model):
    model, logger = make_model(), InMemoryLogger()
    trainer = make_trainer(
        model=model,
        max_duration="2ba",
        algorithms=[EMA()],
        optimizers=torch.optim.Adam(model.parameters()),
        callbacks=[SpeedMonitor()],
        loggers=[logger],
        run_name="plum",
        auto_log_hparams=True,
    )
    expected = {
        # the arguments, as they are used
        "model": "ComposerClassifier",
        "train_dataloader": "DataLoader",
        "train_dataloader_label": "train",
        "train_subset_num_batches": -1,
        "spin_dataloaders": True,
        "max_duration": "2ba",
        "eval_dataloader": None,
        "eval_interval": 1,
        "eval_subset_num_batches": -1,
        "algorithms": ["EMA"],
        "algorithm_passes": None,
        "optimizers": "Adam",
        "schedulers": None,
        "scale_schedule_ratio": 1.0,
        "step_schedulers_every_batch": None,
        "callbacks": ["SpeedMonitor"],
        "loggers": ["InMemoryLogger"],
        "run_name": "plum",
        "progress_bar": False,
        "log_to_console": False,
        "console_stream": "stderr",
        "console_log_interval": "1ba",
        "log_traces": False,
        "auto_log_hparams": True,
        "python_log_level": None,
        "load_path": None,
        "load_object_store": None,
        "load_weights_only": False,
        "load_strict_model_weights": True,
        "load_progress_bar": True,
        "load_ignore_keys": None,
        "load_exclude_algorithms": None,
        "save_folder": None,
        "save_filename": "ep{epoch}-ba{batch}-rank{rank}.pt",
        "profiler": None,
        "save_latest_filename": "latest-rank{rank}.pt",
        "save_overwrite": False,
        "save_interval": "1ep",
        "save_weights_only": False,
        "save_ignore_keys": None,
        "save_num_checkpoints_to_keep": -1,
        "save_metrics": False,
        "autoresume": False,
        "parallelism_config": None,
        "device": "DeviceCPU",
        "precision": "fp32",
        "precision_config": None,
        "device_train_microbatch_size": None,
        "accumulate_train_batch_on_tokens": False,
        "seed": 3,
        "deterministic_mode": False,
        "dist_timeout": 300.0,
        "ddp_sync_strategy": None,
        "compile_config": None,
        # what follows from them
        "is_model_compiled": False,
        "auto_microbatching": False,
        "rank_zero_seed": 3,
        "latest_remote_file_name": None,
        "num_optimizers": 1,
        "remote_ud_has_format_string": [False],
    }
    assert trainer.local_hparams == expected
    facts = {"composer_version", "composer_commit_hash", "num_nodes", "num_cpus_per_node", "node_name"}
    assert {name: value for name, value in logger.hyperparameters.items() if name not in facts} == expected


def test_arguments_that_composer_does_not_have_appear_where_they_are_used(make_trainer, tmp_path):
    plain = make_trainer(auto_log_hparams=True).local_hparams
    used = make_trainer(auto_log_hparams=True, save_folder=str(tmp_path), save_async=True).local_hparams
    assert set(used) - set(plain) == {"save_async"}
    assert used["callbacks"] == []  # none of the user's


def test_without_it_only_the_facts_of_the_run_are_logged(make_trainer):
    logger = InMemoryLogger()
    trainer = make_trainer(loggers=logger)
    assert "model" not in logger.hyperparameters
    assert not hasattr(trainer, "local_hparams")


def test_the_level_of_pythons_log_is_set_only_where_it_is_asked_for(make_trainer):
    packages = (
        "composer",
        *(f"composer_{name}" for name in ["checkpoint", "dist", "events", "fsdp", "hf", "models", "optim", "time"]),
    )
    loggers = [logging.getLogger(name) for name in (*packages, "composer_algorithms")]
    before = [each.level for each in loggers]
    try:
        make_trainer()
        assert [each.level for each in loggers] == before
        make_trainer(python_log_level="info")
        assert {each.level for each in loggers} == {logging.INFO}
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
