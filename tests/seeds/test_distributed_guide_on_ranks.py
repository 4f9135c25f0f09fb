"""What the guide to distributed training says of sharded models, on several ranks."""

import contextlib
import io
import os
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from composer import Trainer
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks

GUIDE = "distributed_guide"


def the_rest(**more):
    """The arguments of a Trainer that the guide leaves out; each rank has batches of its own."""
    generator = torch.Generator().manual_seed(dist.get_global_rank())
    batch = (torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator))
    batches = {"train_dataloader": [batch] * 4, "device_train_microbatch_size": 4}
    return {**batches, "device": "cpu", "progress_bar": False, "seed": 1, **more}


def execute(source, **names):
    """Run a text with what it leaves to its reader, and return all names that there are then."""
    warnings.simplefilter("ignore", DeprecationWarning)  # min_params is of the time of the guide
    torch.manual_seed(0)
    names = {"ComposerModel": ComposerModel, **names}
    exec(source, names)
    return names


def weights_of(trainer):
    return trainer.strategy.model_state_dict(trainer.state.model)


def class_of_the_model(source):
    definitions, is_used, _ = source.partition("composer_model = ")
    assert is_used
    return execute(definitions)["MyComposerModel"]


def train_the_example(source):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = execute(source, the_rest=the_rest(max_duration="2ba"))
    trainer = names["trainer"]
    after = weights_of(trainer)
    trainer.close()
    torch.manual_seed(0)
    before = names["MyComposerModel"](n_layers=3).state_dict()
    units = [unit.name for unit in trainer.strategy.sharded.units]
    return units, [name for name in before if torch.equal(before[name], after[name])], printed.getvalue()


def test_the_example_trains_all_weights_and_shards_its_blocks(text, tmp_path):
    ranks = run_ranks(train_the_example, text(GUIDE, "FSDP"), store=tmp_path / "store")
    for units, unchanged, _ in ranks:
        assert units == ["model.blocks.0", "model.blocks.1", "model.blocks.2", "model"]
        assert unchanged == []
    _, _, printed = ranks[0]  # verbose
    settings = ["sharding_strategy", "min_params", "cpu_offload", "mixed_precision", "backward_prefetch"]
    assert all(f"Using {name}=" in printed for name in settings)


def train_with(source, settings):
    """Train the example's model for one batch with each setting, and return the losses."""
    MyComposerModel = class_of_the_model(source)
    losses = {}
    for key, value in settings:
        torch.manual_seed(0)
        rest = the_rest(max_duration="1ba", precision="amp_bf16")
        with Trainer(model=MyComposerModel(3), fsdp_config={key: value}, **rest) as trainer:
            trainer.fit()
            losses[f"{key}={value}"] = float(trainer.state.loss)
    return losses


@pytest.mark.slow
def test_every_value_of_every_setting_trains(text, settings, tmp_path):
    dtypes = ("fp32", "fp16", "bf16")
    mixed = [dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), dtype) for dtype in dtypes]
    pairs = [(key, value) for key, (values, _) in settings.items() for value in values if not isinstance(value, dict)]
    pairs += [("mixed_precision", dtypes) for dtypes in mixed] + [("min_params", 1e8)]
    pairs += [("mixed_precision", MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16))]
    for losses in run_ranks(train_with, text(GUIDE, "FSDP"), pairs, store=tmp_path / "store", timeout_s=240):
        full = losses["mixed_precision=FULL"]
        assert len(losses) == len(pairs)
        assert losses == pytest.approx(dict.fromkeys(losses, full), rel=4 * torch.finfo(torch.bfloat16).eps)


def train_with_custom_args(source):
    """Return the sharded units, in which format the special block computes, and how many blocks are computed again."""
    composer_model = ComposerModel.from_module(execute(source)["Model"](1), nn.functional.cross_entropy)
    rest = the_rest(max_duration="1ba", precision="amp_bf16")
    with Trainer(model=composer_model, fsdp_config={"activation_checkpointing": True}, **rest) as trainer:
        inside = []
        unit = trainer.strategy.sharded.units[1]
        unit.module.register_forward_pre_hook(lambda module, _: inside.append(str(next(module.parameters()).dtype)))
        trainer.fit()
        names = [name for name, _ in trainer.state.model.named_modules()]
    again = [name for name in names if name.endswith("_checkpoint_wrapped_module")]
    return [unit.name for unit in trainer.strategy.sharded.units], inside[0], len(again)


def test_blocks_have_settings_of_their_own_as_the_function_says(text, tmp_path):
    source = text(GUIDE, "Settings for some of the blocks")
    for names, dtype, num_again in run_ranks(train_with_custom_args, source, store=tmp_path / "store"):
        assert names == ["module.blocks.0", "module.custom_arg_blocks.0", "module"]
        assert (dtype, num_again) == ("torch.float32", 1)


def ranks_of_each_group(source, groups):
    """Return with which ranks this one shares the special block, for each spelling of its group."""
    shared = {}
    for group in groups:
        chosen = source.replace("'process_group': 'node'", f"'process_group': {group!r}")
        composer_model = ComposerModel.from_module(execute(chosen)["Model"](1), nn.functional.cross_entropy)
        with Trainer(model=composer_model, fsdp_config={}, **the_rest(max_duration="1ba")) as trainer:
            special = trainer.strategy.sharded.units[1].module
            shared[group] = next(special.parameters()).device_mesh.mesh.flatten().tolist()
    return shared


def test_groups_of_processes_have_the_names_of_the_guide(text, tmp_path):
    lines = text(GUIDE, "Process groups").splitlines()
    pairs = [tuple(eval(side, {"local_world_size": 2}) for side in line.split(" == ")) for line in lines]
    source = text(GUIDE, "Settings for some of the blocks")
    assert "'process_group': 'node'" in source
    every = sorted({name for pair in pairs for name in pair})
    for rank, shared in enumerate(run_ranks(ranks_of_each_group, source, every, store=tmp_path / "store")):
        assert all(shared[name] == shared[other] for name, other in pairs)
        assert (shared["self"], shared["node"], shared["local_rank_across_nodes"]) == ([rank], [0, 1], [rank])


def save_and_load(folder, saving, loading):
    """Train and save as the one text says, then load into another model as the other does."""
    os.chdir(folder)
    names = execute(saving, the_rest=the_rest())
    saved = weights_of(names["trainer"])
    names["trainer"].close()
    composer_model = names["MyComposerModel"](n_layers=3)
    trainer = execute(loading, composer_model=composer_model, the_rest=the_rest())["trainer"]
    loaded, begun = weights_of(trainer), int(trainer.state.timestamp.batch)
    trainer.fit()
    trainer.close()
    return saved, loaded, (begun, int(trainer.state.timestamp.batch))


def load_elsewhere(folder, saving, loading):
    """Load what another number of ranks has saved."""
    composer_model = class_of_the_model(saving)(n_layers=3)
    os.chdir(folder)
    with pytest.raises(ValueError, match="not elastic") as refusal:
        execute(loading, composer_model=composer_model, the_rest=the_rest())
    return str(refusal.value)


@pytest.mark.slow
def test_each_of_four_ranks_saves_and_loads_its_own_shards(text, tmp_path):
    saving, loading = text(GUIDE, "Saving shards"), text(GUIDE, "Loading shards")
    ranks = run_ranks(save_and_load, str(tmp_path), saving, loading, store=tmp_path / "first", world_size=4)
    files = {name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("ba")}
    assert files == {f"ba2_rank{rank}.pt" for rank in range(4)}
    for saved, loaded, batches in ranks:
        assert batches == (2, 4)
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    # "Composer does not support elastic checkpointing (more ranks than checkpoint files or more files than ranks)"
    said = run_ranks(load_elsewhere, str(tmp_path), saving, loading, store=tmp_path / "second")
    assert all("files of 4 ranks, and 2 load them" in each for each in said)
