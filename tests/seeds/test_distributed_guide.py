"""The guide to distributed training."""

import json
import re

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision
from torch.utils.data import DataLoader

from composer.cli.launcher import main
from composer_fsdp import FSDPConfig
from composer_fsdp.mixed_precision import resolve_dtypes

GUIDE = "distributed_guide"


def test_the_launcher_starts_eight_ranks_and_shows_the_first_ones_output(text, shell, folder):
    (folder / "my_training_script.py").write_text(
        "import os\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
        "open(os.environ['LOCAL_RANK'] + '.txt', 'w').close()\n"
    )
    assert shell(text(GUIDE, "The launcher")) == "rank 0 of 8\n"
    assert {path.name for path in folder.glob("*.txt")} == {f"{rank}.txt" for rank in range(8)}


def test_the_output_of_the_other_ranks_is_in_their_files(text, shell, folder):
    (folder / "script.py").write_text(
        "import os, sys\nprint('rank', os.environ['RANK'])\nprint('to stderr', file=sys.stderr)\n"
    )
    assert shell(text(GUIDE, "The output of each rank")) == "rank 0\n"
    for rank in range(1, 8):
        assert (folder / f"stdout_{rank}.log").read_text() == f"rank {rank}\n"
        assert (folder / f"stderr_{rank}.log").read_text() == "to stderr\n"


def test_the_launcher_has_every_option_of_the_guide(text, capsys):
    usage = text(GUIDE, "The options of the launcher")
    options = re.findall(r"\[(--?\w+)", usage)
    assert len(options) == 13
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = capsys.readouterr().out
    # The help has dashes where the guide has underscores; both are accepted.
    assert all(re.search(rf"(?<![\w-]){option.replace('_', '-')}\b", help_text) for option in options)
    assert "training_script ..." in help_text


def ranks_of(capsys, arguments):
    """Return the variables that each rank would have."""
    assert main([*arguments.split(), "--dry_run", __file__]) == 0
    return [rank["env"] for rank in json.loads(capsys.readouterr().out)["ranks"]]


def test_ranks_of_a_node_are_counted_as_the_guide_says(capsys):
    rank0, rank1 = ranks_of(capsys, "-n 2")
    assert (rank0["RANK"], rank1["RANK"], rank0["WORLD_SIZE"], rank0["MASTER_ADDR"]) == ("0", "1", "2", "127.0.0.1")
    # "processes with global ranks [B, B+1, ... B+N-1]", and "node_rank * nproc = base_rank"
    several = "-n 2 --world_size 4 --master_addr localhost --master_port 2222"
    for place in ("--base_rank 2", "--node_rank 1", "--base_rank 2 --node_rank 1"):
        ranks = ranks_of(capsys, f"{several} {place}")
        assert [(rank["RANK"], rank["LOCAL_RANK"], rank["NODE_RANK"]) for rank in ranks] == [
            ("2", "0", "1"),
            ("3", "1", "1"),
        ]


def test_ranks_outside_of_a_launcher_are_those_of_a_single_process(run):
    dist = run(GUIDE, "Ranks")["dist"]
    assert (dist.get_world_size(), dist.get_local_rank(), dist.get_global_rank()) == (1, 0, 0)


def test_a_sampler_of_a_single_process_gives_it_every_sample(run, dataset):
    names = run(GUIDE, "A sampler", dataset=dataset, DataLoader=DataLoader)
    ((_, targets),) = names["dataloader"]
    assert sorted(targets.tolist()) == sorted(dataset.tensors[1].tolist())


def test_the_settings_have_the_defaults_of_the_guide(settings):
    assert {key: default for key, (_, default) in settings.items() if default != ""} == {
        "sharding_strategy": "FULL_SHARD",
        "min_params": 1e8,
        "cpu_offload": False,
        "mixed_precision": "DEFAULT",
        "backward_prefetch": "BACKWARD_POST",
        "activation_checkpointing": False,
        "activation_cpu_offload": False,
        "state_dict_type": "full",
    }
    for key, (_, default) in settings.items():
        assert default in ("", getattr(FSDPConfig(), key))


def test_the_settings_take_the_values_of_the_guide(settings):
    assert sum(len(values) for values, _ in settings.values()) == 3 + 2 + 3 + 27 + 3 + 2 + 2 + 2 + 3
    for key, (values, _) in settings.items():
        for value in values:
            assert getattr(FSDPConfig(**{key: value}), key) == value
    for value in settings["mixed_precision"][0]:
        resolve_dtypes(value, "amp_bf16")


PRECISIONS = {
    "FULL": "Mixed precision in full",
    "DEFAULT": "Mixed precision by default",
    "PURE": "Mixed precision throughout",
}


@pytest.mark.parametrize(("name", "heading"), PRECISIONS.items())
def test_mixed_precision_by_name_is_the_object_that_the_guide_makes_of_it(run, name, heading):
    given = {"MixedPrecision": MixedPrecision, "torch": torch, "autocast_precision": torch.bfloat16}
    made = run(GUIDE, heading, **given)["mixed_precision"]
    dtypes = resolve_dtypes(name, "amp_bf16")
    assert (made.param_dtype, made.reduce_dtype, made.buffer_dtype) == (dtypes.param, dtypes.reduce, dtypes.buffer)
    assert resolve_dtypes(made, "fp32") == dtypes
