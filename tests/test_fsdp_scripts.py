"""The FSDP code of Composer's documentation, as users have it in their scripts, on two ranks.

A line is changed only where the text leaves something out for its reader:

- `...` in a class or a call stands for what the reader adds: the layers' sizes, the forward passes and the loss, and a
  Trainer's data, length and device. They are added here.
- `self.blocks = nn.ModuleList([...]),` ends with a comma, which makes a tuple of it, whose modules no optimizer would
  see; the comma goes.
- `max_duration='2ba'` lacks the comma at its end, which is added.
"""

import os
import warnings

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.models import ComposerModel
from composer_dist import dist
from composer_dist.testing import run_ranks

WIDTH, CLASSES = 6, 3


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(self.up(inputs).relu())


class Block(Layers):
    pass


class BlockRequiringCustomArgs(Layers):
    pass


class Model(nn.Module):
    def __init__(self, n_layers):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(n_layers)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)

    # FSDP Wrap Function
    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)

    # Activation Checkpointing Function
    def activation_checkpointing_fn(self, module):
        return isinstance(module, Block)


class ModelWithCustomArgs(nn.Module):
    def __init__(self, n_layers):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(n_layers)])
        self.custom_arg_blocks = nn.ModuleList([BlockRequiringCustomArgs() for _ in range(n_layers)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        for block in [*self.blocks, *self.custom_arg_blocks]:
            inputs = block(inputs)
        return self.head(inputs)

    # FSDP Wrap function
    def fsdp_wrap_fn(self, module):
        if isinstance(module, Block):
            return True
        # extends FSDP wrapping to custom args
        if isinstance(module, BlockRequiringCustomArgs):
            return {
                "process_group": "node",
                "mixed_precision": "FULL",
            }
        # default to False
        return False

    # Activation Checkpointing Function
    def activation_checkpointing_fn(self, module):
        return isinstance(module, Block)


class MyComposerModel(ComposerModel):
    def __init__(self, n_layers, model_class=Model):
        super().__init__()
        self.model = model_class(n_layers)

    def forward(self, batch):
        return self.model(batch[0])

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch) if outputs is None else outputs

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def the_rest():
    """What the texts leave to the reader of a Trainer's arguments."""
    generator = torch.Generator().manual_seed(dist.get_global_rank())
    batch = (torch.randn(4, WIDTH, generator=generator), torch.randint(CLASSES, (4,), generator=generator))
    return {
        "train_dataloader": [batch] * 4,
        "device_train_microbatch_size": 4,
        "device": "cpu",
        "progress_bar": False,
        "seed": 1,
    }


def composer_model_of(n_layers=3, model_class=Model):
    warnings.simplefilter("ignore", DeprecationWarning)  # min_params is of the time of these texts
    torch.manual_seed(0)
    return MyComposerModel(n_layers, model_class)


def train_the_example():
    composer_model = composer_model_of(n_layers=3)

    fsdp_config = {
        "sharding_strategy": "FULL_SHARD",
        "min_params": 1e8,
        "cpu_offload": False,  # Not supported yet
        "mixed_precision": "DEFAULT",
        "backward_prefetch": "BACKWARD_POST",
        "activation_checkpointing": False,
        "activation_cpu_offload": False,
        "verbose": True,
    }
    trainer = Trainer(model=composer_model, fsdp_config=fsdp_config, max_duration="2ba", **the_rest())
    before = trainer.strategy.model_state_dict(trainer.state.model)
    trainer.fit()
    after = trainer.strategy.model_state_dict(trainer.state.model)
    trainer.close()
    return [unit.name for unit in trainer.strategy.sharded.units], [
        name for name in before if torch.equal(before[name], after[name])
    ]


def test_the_example_trains_and_its_blocks_are_sharded(tmp_path):
    for units, unchanged in run_ranks(train_the_example, store=tmp_path / "store"):
        assert units == ["model.blocks.0", "model.blocks.1", "model.blocks.2", "model"]
        assert unchanged == []


FULL_SPEC = {
    "sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    "min_params": [1e8],
    "mixed_precision": [
        "FULL",
        "DEFAULT",
        "PURE",
        {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "bf16"},
    ],
    "backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", "NONE"],
    "activation_checkpointing": [True, False],
    "activation_cpu_offload": [True, False],
    "cpu_offload": [True, False],
    "verbose": [False],
    "state_dict_type": ["full", "local", "sharded"],
}


def train_all_of_the_spec():
    losses = {}
    for key, values in FULL_SPEC.items():
        for value in values:
            trainer = Trainer(
                model=composer_model_of(),
                fsdp_config={key: value},
                max_duration="1ba",
                precision="amp_bf16",
                **the_rest(),
            )
            trainer.fit()
            losses[f"{key}={value}"] = float(trainer.state.loss)
            trainer.close()
    return losses


@pytest.mark.slow
def test_every_documented_value_of_every_key_trains(tmp_path):
    for losses in run_ranks(train_all_of_the_spec, store=tmp_path / "store", timeout_s=240):
        full = losses["mixed_precision=FULL"]
        assert losses == pytest.approx(dict.fromkeys(losses, full), rel=4 * torch.finfo(torch.bfloat16).eps)


def train_with_custom_args():
    composer_model = composer_model_of(1, ModelWithCustomArgs)
    trainer = Trainer(
        model=composer_model,
        fsdp_config={"activation_checkpointing": True},
        max_duration="1ba",
        precision="amp_bf16",
        **the_rest(),
    )
    inside = []
    unit = trainer.strategy.sharded.units[1]
    unit.module.register_forward_pre_hook(lambda module, _: inside.append(str(next(module.parameters()).dtype)))
    trainer.fit()
    names = [unit.name for unit in trainer.strategy.sharded.units]
    wrapped = [name for name, _ in trainer.state.model.named_modules() if name.endswith("_checkpoint_wrapped_module")]
    trainer.close()
    return names, inside[0], len(wrapped), next(unit.module.parameters()).device_mesh.mesh.tolist()


def test_blocks_have_settings_of_their_own_as_the_function_says(tmp_path):
    for names, dtype, num_wrapped, ranks in run_ranks(train_with_custom_args, store=tmp_path / "store"):
        assert names == ["model.blocks.0", "model.custom_arg_blocks.0", "model"]
        assert (dtype, num_wrapped, ranks) == ("torch.float32", 1, [0, 1])


def local_trainer(max_duration, **paths):
    """The Trainer of both texts, which differ in what is saved and what is loaded."""
    composer_model = composer_model_of(n_layers=3)

    fsdp_config = {
        "sharding_strategy": "FULL_SHARD",
        "state_dict_type": "local",
    }

    return Trainer(
        model=composer_model,
        max_duration=max_duration,
        fsdp_config=fsdp_config,
        **paths,
        **the_rest(),
    )


def save_local(folder):
    os.chdir(folder)
    trainer = local_trainer(
        max_duration="2ba",
        save_folder="checkpoints",
        save_filename="ba{batch}_rank{rank}.pt",
        save_interval="2ba",
    )

    trainer.fit()
    weights = trainer.strategy.model_state_dict(trainer.state.model)
    trainer.close()
    return weights


def load_local(folder):
    os.chdir(folder)
    trainer = local_trainer(max_duration="4ba", load_path="./checkpoints/ba2_rank{rank}.pt")
    weights = trainer.strategy.model_state_dict(trainer.state.model)
    begun = int(trainer.state.timestamp.batch)
    trainer.fit()
    trainer.close()
    return weights, begun, int(trainer.state.timestamp.batch)


def load_on_another_number_of_ranks(folder):
    with pytest.raises(ValueError, match="not elastic") as refusal:
        load_local(folder)
    return str(refusal.value)


@pytest.mark.slow
def test_each_rank_saves_and_loads_its_own_shards(tmp_path):
    saved = run_ranks(save_local, str(tmp_path), store=tmp_path / "first")[0]
    files = {name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("ba")}
    assert files == {"ba2_rank0.pt", "ba2_rank1.pt"}
    for weights, begun, ended in run_ranks(load_local, str(tmp_path), store=tmp_path / "second"):
        assert (begun, ended) == (2, 4)
        assert all(torch.equal(weights[name], saved[name]) for name in saved)
    said = run_ranks(load_on_another_number_of_ranks, str(tmp_path), store=tmp_path / "third", world_size=1)[0]
    assert "files of 2 ranks, and 1 load them" in said
