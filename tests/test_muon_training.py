"""`Muon` in the Trainer: with every setting it resumes to the last bit, and every strategy trains the same weights."""

import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer, algorithms
from composer.models import ComposerModel
from composer.optim import LinearScheduler, Muon
from composer_dist import dist
from composer_dist.deepspeed import DeepSpeed
from composer_dist.devices import DeviceCPU
from composer_dist.testing import SimulatedAccelerator, run_ranks

CLASSES, BATCH, STEPS, SAVED = 4, 12, 6, 3
# FSDP reduces gradients in float32. Five Newton-Schulz steps amplify rounding by at most 3.4445 each, and each of the
# optimizer's steps adds it to the weights, times the rate.
TOLERANCE = 3.4445**5 * STEPS * 0.01 * torch.finfo(torch.float32).eps


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(6, 7)
        self.filters = nn.Conv2d(7, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens):
        x = F.relu(self.norm(self.filters(self.tokens(tokens).permute(0, 3, 1, 2)))).mean((2, 3))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def fsdp_wrap_fn(self, module):
        return isinstance(module, nn.Sequential)


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = Network()

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


def make(*, dtype=torch.float64, divide=False, tensor_parallel=1, model=None, options=None, **settings):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = (model or Model)().to(dtype)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(6, (BATCH * STEPS, 3, 3), generator=generator)
    targets = torch.randint(CLASSES, (len(tokens),), generator=generator)
    data, shares = TensorDataset(tokens, targets), dist.get_world_size() // tensor_parallel
    sampler = dist.get_sampler(data, num_replicas=shares, rank=dist.get_global_rank() // tensor_parallel)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, BATCH // shares, sampler=sampler),
        optimizers=Muon(model, lr=0.01, adamw_lr=0.005, divide=divide, **(options or {})),
        **{
            "schedulers": LinearScheduler(),
            "max_duration": f"{STEPS}ba",
            "device": "cpu",
            "progress_bar": False,
            "seed": 5,
            "run_name": "plum",
            **settings,
        },
    )


def train(**settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with make(**settings) as trainer:
            trainer.fit()
            weights = trainer.strategy.model_state_dict(trainer.state.model)
            return trainer, {name: value.clone() for name, value in weights.items()}


FEATURES = {
    "plain": {},
    "normuon": {
        "options": {
            "normuon_beta2": 0.95,
            "cautious": True,
            "cautious_updates": True,
            "ns_coefficients": "polar_express",
        }
    },
    "clipping": {"algorithms": lambda: algorithms.GradientClipping("norm", 0.1)},
    "agc": {"algorithms": lambda: algorithms.GradientClipping("adaptive", 0.1)},
    "skip": {"on_divergence": "skip"},
    "rollback": {"on_divergence": "rollback"},
    "microbatches": {"device_train_microbatch_size": 5},
    "ema": {"algorithms": lambda: algorithms.EMA(half_life="2ba")},
    "swa": {"algorithms": lambda: algorithms.SWA(swa_start="0.2dur", swa_end="0.9dur", update_interval="1ba")},
    "sam": {"algorithms": lambda: algorithms.SAM(interval=2)},
    "freezing": {"algorithms": lambda: algorithms.LayerFreezing(freeze_start=0.0, freeze_level=0.9)},
    "surgery": {
        "algorithms": lambda: [
            algorithms.SqueezeExcite(latent_channels=4, min_channels=4),
            algorithms.Factorize(factorize_convs=False, min_features=8, latent_features=4),
        ],
    },
    "compile": {"compile_config": {"backend": "eager"}},
    "bf16": {"precision": "amp_bf16", "dtype": torch.float32},
}


def settings_of(feature):
    # Two epochs, so that a run resumes in the middle of each.
    settings = {"max_duration": "2ep", **FEATURES[feature]}
    if "algorithms" in settings:
        settings["algorithms"] = settings["algorithms"]()
    return settings


def assert_same_weights(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_with_muon_resumes_to_the_last_bit(feature, tmp_path):
    saving = {"save_folder": str(tmp_path), "save_interval": "1ba", "save_filename": "ba{batch}.pt"}
    trainer, whole = train(**settings_of(feature), **saving)
    for group in trainer.state.optimizers[0].param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            is_hidden = param.ndim >= 2 and "tokens" not in name and "head" not in name
            assert group["role"] == ("muon" if is_hidden else "adamw"), name
    for batch in (SAVED, STEPS + 2):
        _, resumed = train(**settings_of(feature), load_path=str(tmp_path / f"ba{batch}.pt"))
        assert_same_weights(resumed, whole, 0)


@pytest.mark.filterwarnings("ignore:.*'auto' is experimental:UserWarning")
def test_gradient_scaling_and_auto_microbatching_train_on_an_accelerator():
    options = {"dtype": "float32"}
    _, expected = train(dtype=torch.float32, options=options)
    with SimulatedAccelerator(shares_cpu_generator=True) as accelerator:
        for settings in ({"device_train_microbatch_size": "auto"}, {"precision": "amp_fp16"}):
            _, found = train(dtype=torch.float32, options=options, device=accelerator, **settings)
            # A step moves a weight by about its rate. Half precision turns some of these, but not most.
            moved = sum((found[name].cpu() - value).abs().mean() for name, value in expected.items())
            assert moved / len(expected) < (0.01 if "precision" in settings else 1e-5)


PLAN = {
    "net.blocks.0.0": ColwiseParallel(),
    "net.blocks.0.2": RowwiseParallel(),
}
LAYOUTS = {
    "ddp": {},
    "divided": {"divide": True},
    "fsdp": {"parallelism_config": {"fsdp": {}}},
    "sharded files": {"parallelism_config": {"fsdp": {"state_dict_type": "sharded"}}},
    "hsdp": {"parallelism_config": {"fsdp": {"data_parallel_replicate_degree": 2}}},
    "tp": {
        "parallelism_config": {"fsdp": {}, "tp": {"tensor_parallel_degree": 2, "layer_plan": PLAN}},
        "tensor_parallel": 2,
    },
}
RUNS = {1: ["ddp"], 2: ["divided", "sharded files", "tp"], 4: ["hsdp", "tp"]}
LOADERS = {1: ["ddp"], 2: ["fsdp", "tp"], 4: ["hsdp"]}


def folder_of(folder, layout, world_size):
    return f"{folder}/{layout.replace(' ', '-')}-{world_size}"


def save_runs(folder, layouts):
    """Return the last weights of a run of each layout, which saves in the middle."""
    found = {}
    for layout in layouts:
        found[layout] = train(
            **LAYOUTS[layout],
            options=FEATURES["normuon"]["options"],
            save_folder=folder_of(folder, layout, dist.get_world_size()),
            save_interval=f"{SAVED}ba",
            save_filename="ba{batch}.pt",
        )[1]
    return found


def load_runs(folder, layouts):
    """Return the last weights of runs of each layout that continue each saved run."""
    found = {}
    for layout in layouts:
        for world_size, saved in RUNS.items():
            for other in saved:
                # Without tensor parallelism a run would continue at another place in the data.
                if ("tp" in layout) != ("tp" in other):
                    continue
                (path,) = Path(folder_of(folder, other, world_size)).glob(f"*ba{SAVED}*")
                found[layout, other, world_size] = train(
                    **LAYOUTS[layout], options=FEATURES["normuon"]["options"], load_path=str(path)
                )[1]
    return found


@pytest.mark.slow
def test_every_strategy_trains_the_same_weights_and_continues_the_runs_of_all_others(tmp_path):
    folder = str(tmp_path / "runs")
    expected = None
    for phase, layouts_of in ((save_runs, RUNS), (load_runs, LOADERS)):
        for world_size, layouts in layouts_of.items():
            store = tmp_path / f"{phase.__name__}-{world_size}"
            for found in run_ranks(phase, folder, layouts, store=store, world_size=world_size, timeout_s=300):
                for weights in found.values():
                    expected = expected or weights
                    assert_same_weights(weights, expected, TOLERANCE)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("config", [{"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}])
def test_deepspeed_is_refused_where_it_flattens_parameters(config):
    model = Model()
    with pytest.raises(ValueError, match=r"Muon needs the parameters as matrices.*fsdp2"):
        DeepSpeed(DeviceCPU(), config).prepare(model, [Muon(model)])
