"""A Trainer that splits tensors over ranks, alone and with FSDP2, trains as one process with the whole batch."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer import Callback, Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import OptimizerMonitor
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.trainer.divergence import DivergenceError
from composer_dist import dist
from composer_dist.testing import run_ranks

WIDTH, CLASSES, BATCH, STEPS = 8, 3, 8, 5
SPLIT = {"net.blocks.*.up": ColwiseParallel(), "net.blocks.*.down": RowwiseParallel()}
# The ranks add up the same numbers in another order; each step passes on a few roundings of float32.
TOLERANCE = 64 * torch.finfo(torch.float32).eps
NORMS = "l2_norm/grad/"


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs):
        return inputs + self.dropout(self.down(F.gelu(self.up(self.norm(inputs)))))


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))

    def forward(self, inputs):
        return self.head(self.blocks(self.stem(inputs)))

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)

    activation_checkpointing_fn = fsdp_wrap_fn


class Model(ComposerModel):
    def __init__(self, dropout):
        super().__init__()
        self.net = Net(dropout)

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


def make(degree, *, dropout=0.0, **arguments):
    warnings.simplefilter("ignore")
    torch.manual_seed(11)
    model = Model(dropout)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(STEPS * BATCH, 5, generator=generator),
        torch.randint(0, CLASSES, (STEPS * BATCH,), generator=generator),
    )
    num_shares = dist.get_world_size() // degree
    sampler = dist.get_sampler(data, num_replicas=num_shares, rank=dist.get_global_rank() // degree)
    settings = {
        "train_dataloader": torch.utils.data.DataLoader(data, batch_size=BATCH // num_shares, sampler=sampler),
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "max_duration": "1ep",
        "device_train_microbatch_size": BATCH // num_shares // 2,
        "algorithms": GradientClipping("norm", 0.5),
        "device": "cpu",
        "progress_bar": False,
        "seed": 5,
    }
    if degree > 1:
        settings["parallelism_config"] = {
            "fsdp": {"activation_checkpointing": True},
            "tp": {"tensor_parallel_degree": degree, "layer_plan": SPLIT},
        }
    return Trainer(model=model, **{**settings, **arguments})


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.strategy.model_state_dict(trainer.state.model).items()}


def train(degree, dropout=0.0):
    memory = InMemoryLogger()
    with make(degree, dropout=dropout, loggers=memory, callbacks=OptimizerMonitor(batch_log_interval=1)) as trainer:
        trainer.fit()
        samples, weights = int(trainer.state.timestamp.sample), weights_of(trainer)
    norms = {key: float(values[-1][1]) for key, values in memory.data.items() if key.startswith(NORMS)}
    losses = [float(value) for _, value in memory.data["loss/train/total"]]
    return weights, norms, samples, losses


def farthest(weights, others):
    assert list(weights) == list(others)
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4], ids=["alone", "with FSDP2"])
def test_split_tensors_are_trained_and_logged_as_by_one_process(world_size, tmp_path):
    ((weights, norms, samples, losses),) = run_ranks(train, 1, store=tmp_path / "one", world_size=1)
    for others in run_ranks(train, 2, store=tmp_path / "store", world_size=world_size, timeout_s=120):
        assert farthest(others[0], weights) < TOLERANCE
        assert others[1] == pytest.approx(norms, rel=1e-4)  # a norm of 1e-3 is a sum of numbers of up to 1
        assert others[2] == samples == STEPS * BATCH
        assert others[3] == pytest.approx(losses, rel=1e-5)


class Stops(Callback):
    def batch_end(self, state, logger):
        state.stop_training()


def ruin(trainer):
    """Let rank 1's part of a weight become infinite by the first step itself."""
    if dist.get_global_rank() == 1:
        weight = trainer.state.model.net.blocks[0].up.weight
        assert isinstance(weight, DTensor)
        trainer.state.optimizers[0].register_step_post_hook(lambda *_: weight.to_local().detach().fill_(math.inf))


def go_through_what_ranks_may_not_see_alike(folder):
    weights, *_ = train(2, dropout=0.5)
    with make(2, callbacks=[Stops()] if dist.get_global_rank() == 0 else []) as trainer:
        trainer.fit()
        stopped = int(trainer.state.timestamp.batch)
    with make(2, save_folder=folder) as trainer:
        ruin(trainer)
        with pytest.raises(DivergenceError, match=r"the weights net\.blocks\.0\.up\.weight must be finite") as error:
            trainer.fit(duration="1ba")
    with make(2) as trainer:
        loader = trainer.state.train_dataloader
    naive = torch.utils.data.DataLoader(loader.dataset, BATCH // 2, sampler=dist.get_sampler(loader.dataset))
    with make(2, train_dataloader=naive) as trainer, pytest.warns(UserWarning, match="their first batches differ"):
        trainer.fit(duration="1ba")
    return weights, stopped, str(error.value)


@pytest.mark.slow
def test_ranks_of_one_tensor_draw_stop_and_fail_alike(tmp_path):
    first, second = run_ranks(
        go_through_what_ranks_may_not_see_alike, str(tmp_path / "saved"), store=tmp_path / "store", timeout_s=120
    )
    assert farthest(first[0], second[0]) == 0.0
    assert first[1:] == second[1:]
    assert first[1] == 2  # the request of one rank arrives with the next batch
