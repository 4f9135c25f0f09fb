"""What each algorithm goes together with: microbatches, ranks, precisions, checkpoints, sharding and compilation.

The two tables in `docs/composition.md` are the result of these runs, row by row.
"""

import gc
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, State, Trainer, algorithms, functional
from composer.loggers import LoggerDestination
from composer.models import ComposerClassifier, ComposerGPT, ComposerModel
from composer_dist import dist, reproducibility
from composer_dist.testing import run_ranks
from composer_events.seeded_batches import SeededBatches

CLASSES, SAMPLES, BATCH = 3, 16, 8
# However a batch is dealt out, the same numbers are added up, in another order. Each of the four steps, with its
# momentum, passes on a few dozen roundings of float32, of numbers that are not much larger than 1.
ROUNDING = 128 * torch.finfo(torch.float32).eps
# bfloat16 has three digits, of which a few are lost on the way through the layers and the steps: weights end within a
# tenth of the way that they have gone.
OF_THE_WAY = 0.1
SAME, EXACT, TRAINS, DIFFERS, NONE, REFUSED = "same", "exact", "trains", "differs", "-", "refused"
COLUMNS = ("microbatches", "two ranks", "sharded", "amp_bf16", "compiled", "resumed", "replayed", "optimizer")
ROUNDING_OF_SIX = ROUNDING / 4 * 6
SECTION, SAVED = "Under each strategy", "ep1.pt"
SAVING = {"save_interval": "1ep", "save_filename": "ep{epoch}.pt"}
STRATEGIES = {
    "DDP": {},
    "FSDP2": {"parallelism_config": {"fsdp": {}}},
    **{f"DeepSpeed {stage}": {"deepspeed_config": {"zero_optimization": {"stage": stage}}} for stage in range(4)},
}
DEEPSPEED = tuple(STRATEGIES)[2:]


class Stage(nn.Sequential):
    """What is sharded as one."""


class Network(nn.Sequential):
    def fsdp_wrap_fn(self, module):
        return isinstance(module, Stage) or "Bottleneck" in type(module).__name__


def dense():
    return Network(nn.Linear(5, 8), Stage(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()), nn.Linear(8, CLASSES))


def with_dropout():
    return Network(nn.Linear(5, 8), Stage(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5)), nn.Linear(8, CLASSES))


def convolutions(norm=lambda channels: nn.GroupNorm(4, channels)):
    return Network(
        Stage(nn.Conv2d(3, 16, 3, stride=2, padding=1), norm(16), nn.ReLU()),
        Stage(nn.Conv2d(16, 16, 3, stride=2, padding=1), norm(16), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES)),
    )


def residual():
    from torchvision.models.resnet import Bottleneck

    blocks = [Bottleneck(8, 2, norm_layer=partial(nn.GroupNorm, 2)) for _ in range(2)]
    return Network(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


class Language(ComposerModel):
    """A small model of transformers, which predicts its own input."""

    def __init__(self, name, n_layer=1):
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

        if name == "gpt2":
            sizes = {
                "n_embd": 12,
                "n_layer": n_layer,
                "n_head": 3,
                "n_positions": 16,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            config = GPT2Config(vocab_size=31, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **sizes)
            self.model: Any = GPT2LMHeadModel(config)
        else:
            sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
            without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = BertConfig(vocab_size=31, max_position_embeddings=16, **sizes, **without)
            self.model = BertForMaskedLM(config)

    def forward(self, batch):
        return self.model(**{name: value for name, value in batch.items() if name != "labels"}).logits

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


GPT = {"d_model": 12, "n_heads": 3, "n_layers": 1, "vocab_size": 31, "max_seq_len": 16}


def vectors():
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return TensorDataset(torch.randn(SAMPLES, 5, generator=generator), targets)


def images():
    from torchvision.datasets import FakeData
    from torchvision.transforms import ToTensor

    return FakeData(SAMPLES, (3, 16, 16), CLASSES, transform=ToTensor())


def sentences():
    tokens = torch.randint(3, 31, (SAMPLES, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one} for one in tokens]


def classifier(make):
    return ComposerClassifier(make(), num_classes=CLASSES)


MODELS = {
    "dense": (partial(classifier, dense), vectors),
    "dropout": (partial(classifier, with_dropout), vectors),
    "conv": (partial(classifier, convolutions), images),
    "batch norm": (partial(classifier, partial(convolutions, nn.BatchNorm2d)), images),
    "residual": (partial(classifier, residual), images),
    "gpt": (partial(ComposerGPT, GPT), sentences),
    "gpt2": (partial(Language, "gpt2"), sentences),
    "gpt2 of two layers": (partial(Language, "gpt2", 2), sentences),
    "bert": (partial(Language, "bert"), sentences),
}


@dataclass(frozen=True)
class Row:
    """One algorithm, and what is to become of it in each column: `same` or `exact`, or the reason why not."""

    make: Callable[[], Any]
    model: str = "dense"
    surgery: Callable[..., object] | None = None  # the function that changes a model
    precision: str = "fp32"
    reasons: Mapping[str, str] = field(default_factory=dict)


FACTORIZE = {"min_channels": 4, "latent_channels": 2, "min_features": 1000}
SAMPLE = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
PER_BATCH = {"two ranks": "own draws"}
PER_MICROBATCH = {"microbatches": "draws for each", **PER_BATCH}
ROWS = {
    "Alibi": Row(partial(algorithms.Alibi, 16, 0.5), "gpt2", partial(functional.apply_alibi, max_sequence_length=16)),
    "AlternatingFlip": Row(algorithms.AlternatingFlip, "conv"),
    "AttentionWindowWarmup": Row(partial(algorithms.AttentionWindowWarmup, "3ba", 3, 12, 2), "gpt"),
    "AugMix": Row(algorithms.AugMix, "conv", reasons=PER_BATCH),
    "BlurPool": Row(algorithms.BlurPool, "conv", functional.apply_blurpool),
    "ChannelsLast": Row(algorithms.ChannelsLast, "conv", functional.apply_channels_last),
    "ColOut": Row(algorithms.ColOut, "conv", reasons=PER_BATCH),
    "CutMix": Row(algorithms.CutMix, "conv", reasons=PER_MICROBATCH),
    "CutMix(draw_per='batch')": Row(partial(algorithms.CutMix, draw_per="batch"), "conv", reasons=PER_BATCH),
    "CutOut": Row(algorithms.CutOut, "conv", reasons=PER_BATCH),
    "DiracInit": Row(algorithms.DiracInit, "conv", functional.apply_dirac_init),
    "EMA": Row(partial(algorithms.EMA, "2ba")),
    "EMA(power=(2, 1))": Row(partial(algorithms.EMA, power=(2, 1))),
    "Factorize": Row(
        partial(algorithms.Factorize, **FACTORIZE), "conv", partial(functional.apply_factorization, **FACTORIZE)
    ),
    "FusedCrossEntropy": Row(algorithms.FusedCrossEntropy, "gpt", functional.apply_fused_cross_entropy),
    "GatedLinearUnits": Row(algorithms.GatedLinearUnits, "bert", functional.apply_gated_linear_units),
    "GhostBatchNorm": Row(
        partial(algorithms.GhostBatchNorm, 2),
        "batch norm",
        partial(functional.apply_ghost_batchnorm, ghost_batch_size=2),
        reasons={"two ranks": "other ghosts"},
    ),
    "GradientClipping": Row(partial(algorithms.GradientClipping, "norm", 0.1)),
    "GyroDropout": Row(
        partial(algorithms.GyroDropout, sigma=4, tau=2),
        "dropout",
        partial(functional.apply_gyro_dropout, iters_per_epoch=2, max_epoch=2, p=0.5, sigma=4, tau=2),
        reasons={"microbatches": "each has all masks", **PER_BATCH},
    ),
    "LabelSmoothing": Row(algorithms.LabelSmoothing),
    "LayerFreezing": Row(partial(algorithms.LayerFreezing, 0.0)),
    "LogitSoftcap": Row(
        partial(algorithms.LogitSoftcap, 1.0), "gpt2", partial(functional.apply_logit_softcap, cap=1.0)
    ),
    "LowPrecisionGroupNorm": Row(
        algorithms.LowPrecisionGroupNorm,
        "conv",
        partial(functional.apply_low_precision_groupnorm, precision="amp_bf16"),
        precision="amp_bf16",
    ),
    "LowPrecisionLayerNorm": Row(
        algorithms.LowPrecisionLayerNorm,
        "dense",
        partial(functional.apply_low_precision_layernorm, precision="amp_bf16"),
        precision="amp_bf16",
    ),
    "MixUp": Row(algorithms.MixUp, reasons=PER_MICROBATCH),
    "MixUp(draw_per='batch')": Row(partial(algorithms.MixUp, draw_per="batch"), reasons=PER_BATCH),
    "MixUpOrCutMix": Row(algorithms.MixUpOrCutMix, "conv", reasons=PER_MICROBATCH),
    "MultiTokenPrediction": Row(
        partial(algorithms.MultiTokenPrediction, 2), "gpt2", functional.apply_multi_token_prediction
    ),
    "MultiViewEval": Row(algorithms.MultiViewEval, "conv"),
    "MuP": Row(
        partial(algorithms.MuP, 6),
        "gpt2",
        partial(functional.apply_mup, base_width=6),
        reasons={"optimizer": "sets its groups"},
    ),
    "NoOpModel": Row(algorithms.NoOpModel),
    "ProgressiveResizing": Row(partial(algorithms.ProgressiveResizing, initial_scale=0.75, delay_fraction=0.2), "conv"),
    "QKNorm": Row(algorithms.QKNorm, "gpt2", functional.apply_qk_norm),
    "RandAugment": Row(algorithms.RandAugment, "conv", reasons=PER_BATCH),
    "SAM": Row(algorithms.SAM),
    "SelectiveBackprop": Row(partial(algorithms.SelectiveBackprop, 0.0, 1.0), reasons=PER_BATCH),
    "SeqLengthWarmup": Row(partial(algorithms.SeqLengthWarmup, 0.5, 4, 16, 4), "gpt2"),
    "SquaredReLU": Row(algorithms.SquaredReLU, "gpt2", functional.apply_squared_relu),
    "SqueezeExcite": Row(
        partial(algorithms.SqueezeExcite, 4, 16),
        "conv",
        partial(functional.apply_squeeze_excite, latent_channels=4, min_channels=16),
    ),
    "StochasticDepth": Row(
        partial(algorithms.StochasticDepth, "ResNetBottleneck"),
        "residual",
        partial(functional.apply_stochastic_depth, target_layer_name="ResNetBottleneck"),
        reasons={**PER_MICROBATCH, "sharded": "shared draws"},
    ),
    "SWA": Row(partial(algorithms.SWA, "0.3dur", "0.8dur", "1ba")),
    "UntiedHead": Row(algorithms.UntiedHead, "gpt", functional.apply_untied_head),
    "UntiedHead('3ba')": Row(partial(algorithms.UntiedHead, "3ba"), "gpt2"),
    "ValueResidual": Row(algorithms.ValueResidual, "gpt2 of two layers", functional.apply_value_residual),
    "WeightStandardization": Row(algorithms.WeightStandardization, "conv", functional.apply_weight_standardization),
    "WhiteningInit": Row(
        lambda: algorithms.WhiteningInit(SAMPLE), "conv", partial(functional.apply_whitening_init, images=SAMPLE)
    ),
    "ZLoss": Row(partial(algorithms.ZLoss, 0.1)),
    "ZeroInit": Row(algorithms.ZeroInit, "gpt2", functional.apply_zero_init),
}


# Under each strategy, one row has all methods of a kind, so that the products are tested as well.
TOGETHER = {
    "gpt2 of two layers": (
        "LogitSoftcap",
        "QKNorm",
        "SquaredReLU",
        "ValueResidual",
        "ZeroInit",
        "MultiTokenPrediction",
        "UntiedHead",
    ),
    "gpt2": ("Alibi", "MuP", "SeqLengthWarmup"),
    "gpt": ("AttentionWindowWarmup", "FusedCrossEntropy"),
    "conv": (
        "BlurPool",
        "ChannelsLast",
        "DiracInit",
        "SqueezeExcite",
        "WeightStandardization",
        "WhiteningInit",
    ),
    "images": (
        "AlternatingFlip",
        "AugMix",
        "ColOut",
        "CutOut",
        "MixUpOrCutMix",
        "MultiViewEval",
        "ProgressiveResizing",
        "RandAugment",
    ),
    "dense": ("GradientClipping", "LabelSmoothing", "MixUp", "ZLoss"),
}
MERGED = {
    # Without microbatches these draw as the rows without the argument.
    *("CutMix(draw_per='batch')", "MixUp(draw_per='batch')"),
    *(name for names in TOGETHER.values() for name in names),
}


def together(kind):
    rows = [ROWS[name] for name in TOGETHER[kind]]
    reasons = {"two ranks": "own draws"} if any("two ranks" in row.reasons for row in rows) else {}
    return Row(lambda: [row.make() for row in rows], rows[0].model if kind == "images" else kind, reasons=reasons)


METHODS = {
    **{name: row for name, row in ROWS.items() if name not in MERGED},
    **{", ".join(names): together(kind) for kind, names in TOGETHER.items()},
    # The model has its weights in bfloat16 under DeepSpeed, whose optimizer moves float32 copies of them.
    "EMA (amp_bf16)": Row(partial(algorithms.EMA, "2ba"), precision="amp_bf16"),
    "SWA (amp_bf16)": Row(partial(algorithms.SWA, "0.3dur", "0.8dur", "1ba"), precision="amp_bf16"),
    "GradientClipping('value')": Row(partial(algorithms.GradientClipping, "value", 0.01)),
    "GradientClipping('adaptive')": Row(partial(algorithms.GradientClipping, "adaptive", 0.01)),
    "StochasticDepth": Row(
        partial(algorithms.StochasticDepth, "ResNetBottleneck", drop_rate=0.5, use_same_gpu_seed=True),
        "residual",
        reasons=PER_BATCH,
    ),
    "StochasticDepth(use_same_gpu_seed=False)": Row(
        partial(algorithms.StochasticDepth, "ResNetBottleneck", drop_rate=0.5, use_same_gpu_seed=False),
        "residual",
        reasons=PER_BATCH,
    ),
    "StochasticDepth('sample')": Row(
        partial(algorithms.StochasticDepth, "ResNetBottleneck", "sample", 0.5), "residual", reasons=PER_BATCH
    ),
}
# All else has to train as one process does.
REFUSALS = {
    **{
        name: {"DeepSpeed 3": REFUSED}
        for name in (
            "EMA",
            "EMA (amp_bf16)",
            "EMA(power=(2, 1))",
            "LayerFreezing",
            "StochasticDepth",
            "SWA",
            "SWA (amp_bf16)",
        )
    },
    **{
        name: dict.fromkeys(DEEPSPEED, REFUSED)
        for name in ("GradientClipping('value')", "GradientClipping('adaptive')", "SAM", "UntiedHead('3ba')")
    },
    "StochasticDepth(use_same_gpu_seed=False)": dict.fromkeys(("FSDP2", *DEEPSPEED[1:]), REFUSED),
}


class EventsOfAlgorithms(LoggerDestination):
    """On which events algorithms acted."""

    def __init__(self):
        self.seen = set()

    def log_traces(self, traces):
        self.seen |= {name.rpartition("/")[2] for name in traces}


def make_trainer(row, **more):
    make_model, make_data = MODELS[row.model]
    torch.manual_seed(11)
    model, data = make_model(), make_data()
    settings = {
        "algorithms": row.make(),
        "train_dataloader": DataLoader(
            data, BATCH // dist.get_world_size(), sampler=dist.get_sampler(data, shuffle=False)
        ),
        "max_duration": "2ep",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1),
        "precision": row.precision,
        "device": "cpu",
        "progress_bar": False,
        "seed": 5,
        **more,
    }
    return Trainer(model=model, **settings)


def weights_of(trainer):
    weights = trainer.strategy.model_state_dict(trainer.state.model)
    # Running averages of batch norms depend on how often they are updated, and on nothing else here.
    return {name: value.clone() for name, value in weights.items() if not re.search("running|num_batches", name)}


def train(row, **more):
    """Return the weights at the end of a run."""
    with make_trainer(row, **more) as trainer:
        trainer.fit()
        return weights_of(trainer)


class SameDraws(Callback):
    """Lets all ranks go on with the generators of the first."""

    def epoch_start(self, state, logger):
        (own, *_) = reproducibility.get_rng_state()
        reproducibility.load_rng_state([own] * dist.get_world_size())


def train_like_one_process(row, strategy="DDP", **more):
    """Return the weights at the end of a run of six steps, and those of an average, which an evaluation would see.

    Where a method draws for each rank, or looks at the examples of a rank together, all ranks get the same batch and
    make the same draws, as one process does that has the batch alone. Of all other methods each rank gets its part.
    """
    if row.reasons.get("two ranks") in ("own draws", "other ghosts"):
        data = MODELS[row.model][1]()
        sampler = dist.get_sampler(data, shuffle=False, num_replicas=1, rank=0)
        more |= {"train_dataloader": DataLoader(data, BATCH, sampler=sampler), "callbacks": SameDraws()}
    with make_trainer(row, max_duration="6ba", **STRATEGIES[strategy], **more) as trainer:
        trainer.fit()
        found = {}
        for algorithm in trainer.state.algorithms:
            if isinstance(algorithm, algorithms.EMA):
                for average in filter(None, (algorithm.second_model, algorithm.ema_model)):
                    assert all(value.dtype is torch.float32 for _, value in average.named_parameters())
                    average.swap_params(trainer.state.model)
                    kind = "average" if average is algorithm.ema_model else "second average"
                    found |= {f"{kind} of {name}": value for name, value in weights_of(trainer).items()}
                    average.swap_params(trainer.state.model)
        return found | weights_of(trainer)


def distance(weights, others):
    assert list(weights) == list(others)
    return max((weights[name].double() - others[name].double()).abs().max().item() for name in weights)


def flat(weights):
    return torch.cat([value.double().flatten() for value in weights.values()])


def is_near(weights, others, start):
    far, way = (flat(others) - flat(one) for one in (weights, start))
    return far.norm() <= OF_THE_WAY * way.norm()


def compare(row, weights, others, start, rounding=ROUNDING):
    is_low = row.precision != "fp32"
    is_same = is_near(weights, others, start) if is_low else distance(weights, others) <= rounding
    return SAME if is_same else DIFFERS


class Cells:
    """Runs a row, column by column, and says what became of it."""

    def __init__(self, row, folder, of_two_ranks):
        self.row, self.of_two_ranks = row, of_two_ranks
        self.checkpoint = str(folder / "ba3.pt")  # in the middle of the second epoch
        self.events = EventsOfAlgorithms()
        saves = {"save_folder": str(folder), "save_interval": "3ba", "save_filename": "ba{batch}.pt"}
        self.whole = train(row, loggers=self.events, **saves)
        with make_trainer(row) as trainer:
            self.start = weights_of(trainer)

    def microbatches(self):
        return self._same(train(self.row, device_train_microbatch_size=BATCH // 2))

    def two_ranks(self):
        return self._same(self.of_two_ranks["ddp"])

    def sharded(self):
        return self._same(self.of_two_ranks["fsdp"], self.of_two_ranks["ddp"])

    def amp_bf16(self):
        exact, low = (
            self.whole if precision == self.row.precision else train(self.row, precision=precision)
            for precision in ("fp32", "amp_bf16")
        )
        return TRAINS if is_near(low, exact, self.start) else DIFFERS

    def compiled(self):
        torch.compiler.reset()  # what was compiled for other models counts among what may be compiled anew
        return self._same(train(self.row, compile_config={"backend": "eager"}))

    def resumed(self):
        return self._exact(train(self.row, load_path=self.checkpoint))

    def replayed(self):
        if not self.row.make().required_on_load():
            return NONE
        return self._exact(train(self.row, algorithms=[], load_path=self.checkpoint))

    def optimizer(self):
        if self.row.surgery is None:
            return NONE
        before, after = (self._train_by_hand(optimizer_first) for optimizer_first in (False, True))
        return EXACT if distance(before, after) == 0 else DIFFERS

    def _same(self, weights, others=None):
        return compare(self.row, weights, self.whole if others is None else others, self.start)

    def _exact(self, weights):
        return EXACT if distance(weights, self.whole) == 0 else DIFFERS

    def _train_by_hand(self, optimizer_first):
        make_model, make_data = MODELS[self.row.model]
        torch.manual_seed(11)
        model, data = make_model(), make_data()
        make_optimizer = partial(torch.optim.AdamW, lr=0.02)
        optimizer = make_optimizer(model.parameters()) if optimizer_first else None
        knows_optimizers = "optimizers" in inspect.signature(self.row.surgery).parameters
        torch.manual_seed(12)
        self.row.surgery(model, **({"optimizers": optimizer} if knows_optimizers else {}))
        optimizer = optimizer or make_optimizer(model.parameters())
        torch.manual_seed(13)
        for batch in DataLoader(data, BATCH):
            optimizer.zero_grad()
            model.loss(model(batch), batch).backward()
            optimizer.step()
        return model.state_dict()


def train_on_two_ranks():
    warnings.simplefilter("ignore")
    sharded = {"parallelism_config": {"fsdp": {}}}
    return {name: {"ddp": train(row), "fsdp": train(row, **sharded)} for name, row in ROWS.items()}


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    first, second = run_ranks(train_on_two_ranks, store=tmp_path_factory.mktemp("ranks") / "store", timeout_s=400)
    for name in ROWS:
        for kind, weights in first[name].items():
            assert distance(weights, second[name][kind]) == 0, f"{name}: the ranks' weights differ"
    return first


def documented_rows(root, section):
    text = (root / "docs" / "composition.md").read_text()
    lines = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    return {re.split(" *\\| *", line)[1]: line for line in lines if line.startswith("| ")}


@pytest.fixture(scope="module")
def documented(root):
    return documented_rows(root, "The table")


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore")
def test_the_documented_row_is_what_was_seen(name, of_two_ranks, documented, tmp_path):
    row = ROWS[name]
    cells = Cells(row, tmp_path, of_two_ranks[name])
    seen = {column: getattr(cells, column.replace(" ", "_"))() for column in COLUMNS}
    for column, reason in row.reasons.items():
        assert seen[column] == DIFFERS, f"{column} is {seen[column]}: there is nothing to give a reason for"
        seen[column] = reason
    assert f"| {name} | {' | '.join(seen.values())} |" == documented[name]
    assert cells.events.seen <= set(map(str, row.make().acts_on))


class Plain(ComposerModel):
    """A language model of which algorithms know no layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(31, 31).tril())
        self.seen = []

    def forward(self, batch):
        self.seen.append({name: value.clone() for name, value in batch.items()})
        return self.table[batch["input_ids"]]

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


MODELS["plain"] = (Plain, sentences)


@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if row.surgery and name not in ("GatedLinearUnits", "MuP")]
)
@pytest.mark.filterwarnings("ignore")
def test_surgery_that_finds_nothing_to_change_has_no_effect_on_training(name):
    with make_trainer(replace(ROWS[name], model="plain")) as trainer, make_trainer(Row(list, "plain")) as alone:
        trainer.fit(duration="1ep")
        alone.fit(duration="1ep")
    assert_close(trainer.state.model.seen, alone.state.model.seen, rtol=0, atol=0)
    assert_close(weights_of(trainer), weights_of(alone), rtol=0, atol=0)


def traits_of(model):
    """Return what algorithms may leave in a model: names and forms of its tensors, classes, hooks and settings."""
    found = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        held = {**vars(module), **getattr(getattr(module, "config", None), "__dict__", {})}
        plain = {key: value for key, value in held.items() if isinstance(value, int | float | str | None)}
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        found[f"module {name}"] = type(module).__qualname__, hooks, plain
    return found


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore")
def test_the_same_algorithm_twice_is_refused_or_leaves_the_model_as_one_does(name):
    row, left = ROWS[name], []
    for make in (lambda: [row.make()], lambda: [row.make(), row.make()]):
        try:
            with make_trainer(replace(row, make=make)) as trainer:
                trainer.fit()
                left.append(traits_of(trainer.state.model))
        except ValueError as refusal:
            if not left or f"{type(row.make()).__name__} cannot be combined with another" not in str(refusal):
                raise
            return
    assert left[0] == left[1]


def test_the_tables_have_every_algorithm(documented, root):
    classes = {name for name in algorithms.__all__ if not re.search("Transform|2d$|^AGC$", name)}
    assert {name.split("(")[0] for name in ROWS} == classes
    assert [name for name in documented if name in ROWS] == list(ROWS)
    assert documented_rows(root, SECTION).keys() == {"algorithm", *METHODS}


def draw_as_the_first_rank():
    """Let this process's algorithms and datasets, which draw by the seed and the rank, do it as on the first rank."""
    State.seed = property(lambda state: state.rank_zero_seed)
    make = SeededBatches.__init__
    SeededBatches.__init__ = lambda self, loader, rank, **more: make(self, loader, 0, **more)


def train_under_each_strategy(folder):
    """Return, of each method under each strategy, what a whole run and resumed ones end with, or why it is refused."""
    warnings.simplefilter("ignore")
    gc.freeze()  # stage 3 collects garbage for each model, and need not look at all that was imported
    draw_as_the_first_rank()
    return {(name, kind): run_cell(name, kind, folder) for name in METHODS for kind in STRATEGIES}


def run_cell(name, strategy, folder):
    row, own = METHODS[name], f"{folder}/{name}/{strategy}"
    if REFUSALS.get(name, {}).get(strategy) == REFUSED:
        with pytest.raises((ValueError, NotImplementedError)) as refusal:
            make_trainer(row, **STRATEGIES[strategy])
        return str(refusal.value)
    try:
        return {
            "trained": train_like_one_process(row, strategy, save_folder=own, **SAVING),
            "resumed": train_like_one_process(row, strategy, load_path=f"{own}/{SAVED}"),
            "resumed from one process": train_like_one_process(row, strategy, load_path=f"{folder}/{name}/one/{SAVED}"),
        }
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def under_strategies(tmp_path_factory):
    """Return the folder of checkpoints, what one process ends with, and what each of two ranks under each strategy."""
    folder = tmp_path_factory.mktemp("strategies")
    with warnings.catch_warnings(action="ignore"):
        alone = {
            name: train_like_one_process(row, save_folder=f"{folder}/{name}/one", **SAVING)
            for name, row in METHODS.items()
        }
    ranks = run_ranks(train_under_each_strategy, str(folder), store=folder / "store", timeout_s=1500)
    return folder, alone, ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore")
def test_each_strategy_trains_as_one_process_and_goes_on_there_and_elsewhere(name, under_strategies, root):
    """SWA's mean was thrown away under DeepSpeed 1 and 2, frozen and dropped layers moved on, averages did not load."""
    row, (folder, alone, ranks) = METHODS[name], under_strategies
    expected = {strategy: REFUSALS.get(name, {}).get(strategy, SAME) for strategy in STRATEGIES}
    with make_trainer(row) as trainer:
        begin = weights_of(trainer)
    start = {key: begin[key.rpartition(" of ")[2]] for key in alone[name]}
    for strategy, outcome in expected.items():
        cells = [rank[name, strategy] for rank in ranks]
        if outcome == REFUSED:
            for text in cells:
                assert re.search(rf"{re.match('[A-Za-z]+', name)[0]}.*(DeepSpeed|deepspeed_config|FSDP)", text), text
                assert re.search("([Uu]se|[Tt]rain with|[Ll]eave)", text), text
            continue
        assert isinstance(cells[0], dict), f"{strategy}: {cells[0]}"
        moved = train_like_one_process(row, load_path=f"{folder}/{name}/{strategy}/{SAVED}")
        seen = {**cells[0], "resumed by one process": moved}
        assert not any(distance(cells[0][run], cells[1][run]) for run in cells[0]), f"{strategy}: the ranks differ"
        of_runs = {run: compare(row, weights, alone[name], start, ROUNDING_OF_SIX) for run, weights in seen.items()}
        assert set(of_runs.values()) == {SAME}, f"{strategy}: {of_runs}"
    assert f"| {name} | {' | '.join(expected.values())} |" == documented_rows(root, SECTION)[name]
