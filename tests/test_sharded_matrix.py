"""What composes with sharding: each algorithm and callback trains a sharded model as it trains one under DDP.

The table in `docs/guides/fsdp.md` is the result of these runs, row by row.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset, TensorDataset

from composer import Trainer, algorithms, callbacks, functional
from composer.core import Callback, Event
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerGPT, ComposerModel
from composer.optim import DecoupledAdamW, DecoupledSGDW
from composer_dist import dist
from composer_dist.devices import Device
from composer_dist.testing import run_ranks

CLASSES, SAMPLES = 3, 16
# Sharded or not, the ranks add up the same numbers in another order. Each of the four steps, with its momentum, passes
# on a few dozen roundings of float32, of numbers that are not much larger than 1.
TOLERANCE = 128 * torch.finfo(torch.float32).eps
# Autocast and FSDP round weights and gradients at other places, each time by half of this.
BFLOAT16, FLOAT16 = 4 * torch.finfo(torch.bfloat16).eps, 8 * torch.finfo(torch.float16).eps
# The moments of a gradient that is all rounding, divided by each other, move a weight by up to the rate in each step.
OF_ADAM = 4 * 0.01
AS_DDP, REFUSED = "as under DDP", "refused"
# What depends on the clock; and evaluations of models that count statistics, which are rank 0's under DDP, and each
# rank's own if the model is sharded.
_NOT_ALIKE = re.compile("time|throughput|memory|trainer|wall_clock|run|cpu|disk|network|swap|gradient_noise|compile")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs):
        return inputs + self.dropout(self.down(F.gelu(self.up(self.norm(inputs)))))


class Dense(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 6), Block(6), Block(6), nn.Linear(6, CLASSES))

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)


class Stage(nn.Sequential):
    pass


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(
            Stage(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            Stage(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.MaxPool2d(2)),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Stage)


class Residual(nn.Sequential):
    def __init__(self):
        from torchvision.models.resnet import Bottleneck

        blocks = [Bottleneck(8, 2) for _ in range(2)]
        super().__init__(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))

    def fsdp_wrap_fn(self, module):
        return "Bottleneck" in type(module).__name__


def adapted():
    """Return a network that stays as it is, with low-rank layers beside its own that learn."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(Dense(), LoraConfig(r=2, target_modules=["up", "down"]))


class Language(ComposerModel):
    """A small model of transformers, which predicts its own input."""

    def __init__(self, name):
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

        if name == "gpt2":
            config = GPT2Config(
                n_embd=12, n_layer=2, n_head=3, n_positions=16, vocab_size=31, bos_token_id=1, eos_token_id=2
            )
            self.model: Any = GPT2LMHeadModel(config)
        else:
            config = BertConfig(
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=24,
                max_position_embeddings=16,
                vocab_size=31,
            )
            self.model = BertForMaskedLM(config)

    def forward(self, batch):
        return self.model(**{name: value for name, value in batch.items() if name != "labels"}).logits

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch) if outputs is None else outputs


class Sentences(Dataset):
    def __init__(self):
        self.tokens = torch.randint(3, 31, (SAMPLES, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


GPT = {"d_model": 12, "n_heads": 3, "n_layers": 2, "vocab_size": 31, "max_seq_len": 16}


def vectors():
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return TensorDataset(torch.randn(SAMPLES, 5, generator=generator), targets)


def images():
    from torchvision.datasets import FakeData
    from torchvision.transforms import ToTensor

    return FakeData(SAMPLES, (3, 16, 16), CLASSES, transform=ToTensor())


def hugging_face():
    """Return a model of transformers with a tokenizer of four words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    from composer.models import HuggingFaceModel

    words = Tokenizer(WordLevel({"<pad>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="left")
    return HuggingFaceModel(Language("gpt2").model, tokenizer, use_logits=True)


def without_dropout():
    """Return a network whose outputs do not depend on how a batch is dealt out."""
    network = Dense()
    for block in (network[1], network[2]):
        block.dropout.p = 0.0
    return ComposerClassifier(network, num_classes=CLASSES)


MODELS = {
    "plain": (without_dropout, vectors),
    "dense": (lambda: ComposerClassifier(Dense(), num_classes=CLASSES), vectors),
    "adapted": (lambda: ComposerClassifier(adapted(), num_classes=CLASSES), vectors),
    "conv": (lambda: ComposerClassifier(Convolutions(), num_classes=CLASSES), images),
    "residual": (lambda: ComposerClassifier(Residual(), num_classes=CLASSES), images),
    "gpt": (lambda: ComposerGPT(GPT), Sentences),
    "gpt2": (lambda: Language("gpt2"), Sentences),
    "bert": (lambda: Language("bert"), Sentences),
    "hugging face": (hugging_face, Sentences),
}


class SmallDevice(Device):
    """The CPU, but taken for a GPU, as float16 and memory that runs out need one."""

    name = "gpu"
    dist_backend = "gloo"
    torch_device = torch.device("cpu")

    def module_to_device(self, module):
        return module

    def tensor_to_device(self, tensor):
        return tensor

    def fails_in(self, module, inputs, _):
        """Run out of memory on rank 1 where there are more than two samples."""
        if module.training and len(inputs[0]) > 2 and dist.get_global_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")


class SmallScale(Callback):
    """Begins with a scale at which no gradient overflows in float16, where DDP on a CPU computes in float32."""

    def fit_start(self, state, logger):
        state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": 256.0})


@dataclass(frozen=True)
class Row:
    """One thing that shall compose with sharding, and what is to become of it."""

    make: Callable[[Path], dict[str, Any]] = lambda _: {}
    model: str = "dense"
    outcome: str = AS_DDP
    tolerance: float = TOLERANCE
    resumes: bool = False  # whether the run is broken off and goes on from a checkpoint
    surgery: Callable[[nn.Module], object] | None = None  # changes the model once it is sharded
    optimizer: Callable[..., Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def algorithm(name, *arguments, **settings):
    return lambda _: {"algorithms": getattr(algorithms, name)(*arguments, **settings)}


def callback(name, *arguments, **settings):
    return lambda _: {"callbacks": getattr(callbacks, name)(*arguments, **settings)}


ALGORITHMS = {
    "AGC, the older name of adaptive GradientClipping": Row(algorithm("AGC", 0.01)),
    "Alibi": Row(algorithm("Alibi", 16, train_sequence_length_scaling=0.5), "gpt2"),
    "AlternatingFlip": Row(algorithm("AlternatingFlip"), "conv"),
    "AttentionWindowWarmup": Row(algorithm("AttentionWindowWarmup", "3ba", 3, 12, 2), "gpt"),
    "AugMix": Row(algorithm("AugMix"), "conv"),
    "BlurPool": Row(algorithm("BlurPool"), "conv"),
    "ChannelsLast": Row(algorithm("ChannelsLast"), "conv"),
    "ColOut": Row(algorithm("ColOut"), "conv"),
    "CutMix": Row(algorithm("CutMix"), "conv"),
    "CutOut": Row(algorithm("CutOut"), "conv"),
    "DiracInit": Row(algorithm("DiracInit"), "conv"),
    "EMA": Row(algorithm("EMA", "2ba"), resumes=True),
    "Factorize": Row(algorithm("Factorize", min_channels=4, latent_channels=2), "conv"),
    "FusedCrossEntropy": Row(algorithm("FusedCrossEntropy"), "gpt"),
    "GatedLinearUnits": Row(algorithm("GatedLinearUnits"), "bert"),
    "GhostBatchNorm": Row(algorithm("GhostBatchNorm", 2), "conv"),
    "GradientClipping by norm": Row(algorithm("GradientClipping", "norm", 0.1)),
    "GradientClipping by value": Row(algorithm("GradientClipping", "value", 0.01)),
    "GradientClipping, adaptive": Row(algorithm("GradientClipping", "adaptive", 0.01)),
    "GyroDropout": Row(algorithm("GyroDropout", sigma=4, tau=2)),
    "LabelSmoothing": Row(algorithm("LabelSmoothing")),
    "LayerFreezing": Row(algorithm("LayerFreezing", 0.0), resumes=True),
    "LogitSoftcap": Row(algorithm("LogitSoftcap", 1.0), "gpt2"),
    "LowPrecisionGroupNorm": Row(
        lambda _: {"algorithms": algorithms.LowPrecisionGroupNorm(), "precision": "amp_bf16"},
        "conv",
        tolerance=BFLOAT16,
    ),
    "LowPrecisionLayerNorm": Row(
        lambda _: {"algorithms": algorithms.LowPrecisionLayerNorm(), "precision": "amp_bf16"}, tolerance=BFLOAT16
    ),
    "LowPrecisionLayerNorm after wrapping": Row(
        lambda _: {"algorithms": algorithms.LowPrecisionLayerNorm(Event.AFTER_LOAD), "precision": "amp_bf16"},
        tolerance=BFLOAT16,
    ),
    "MixUp": Row(algorithm("MixUp")),
    "MixUpOrCutMix": Row(algorithm("MixUpOrCutMix"), "conv"),
    "MultiTokenPrediction": Row(algorithm("MultiTokenPrediction", 2), "gpt2"),
    "MultiViewEval": Row(algorithm("MultiViewEval", shift=1), "conv"),
    "MuP": Row(algorithm("MuP", 6), "gpt2"),
    "NoOpModel": Row(algorithm("NoOpModel")),
    "ProgressiveResizing": Row(algorithm("ProgressiveResizing", delay_fraction=0.2), "conv"),
    "QKNorm": Row(algorithm("QKNorm"), "gpt2"),
    "RandAugment": Row(algorithm("RandAugment"), "conv"),
    "SAM": Row(algorithm("SAM"), "plain", resumes=True),
    "SelectiveBackprop": Row(algorithm("SelectiveBackprop", 0.0, 1.0)),
    "SeqLengthWarmup": Row(algorithm("SeqLengthWarmup", 0.5, 4, 16, 4), "gpt2"),
    "SquaredReLU": Row(algorithm("SquaredReLU"), "gpt2"),
    "SqueezeExcite": Row(algorithm("SqueezeExcite", 4, 16), "conv"),
    "StochasticDepth by block, with use_same_gpu_seed": Row(
        algorithm("StochasticDepth", "ResNetBottleneck", use_same_gpu_seed=True), "residual"
    ),
    "StochasticDepth by sample": Row(algorithm("StochasticDepth", "ResNetBottleneck", "sample"), "residual"),
    "SWA": Row(algorithm("SWA", "0.3dur", "0.9dur", "1ba"), resumes=True),
    "UntiedHead": Row(algorithm("UntiedHead", "3ba"), "gpt", resumes=True),
    "ValueResidual": Row(algorithm("ValueResidual"), "gpt2"),
    "WeightStandardization": Row(algorithm("WeightStandardization"), "conv"),
    "WhiteningInit": Row(algorithm("WhiteningInit", torch.rand(8, 3, 16, 16)), "conv"),
    "ZLoss": Row(algorithm("ZLoss", 0.1)),
    "ZeroInit": Row(algorithm("ZeroInit"), "gpt2"),
}
CALLBACKS = {
    "ActivationMonitor": Row(callback("ActivationMonitor", "2ba")),
    "CheckpointSaver": Row(
        lambda folder: {"callbacks": callbacks.CheckpointSaver(str(folder / "saver"), save_interval="1ba")}
    ),
    "EarlyStopper": Row(callback("EarlyStopper", "CrossEntropy", "eval", "less", min_delta=10.0)),
    "ExportForInferenceCallback": Row(
        lambda folder: {"callbacks": callbacks.ExportForInferenceCallback("export", str(folder / "model.pt2"))},
        outcome=REFUSED,
    ),
    "FreeOutputs": Row(callback("FreeOutputs"), "gpt2"),
    "Generate": Row(callback("Generate", ["one two", "three"], "1ep", max_new_tokens=3), "hugging face"),
    "GradientNoiseScale": Row(callback("GradientNoiseScale", 1)),
    "HuggingFaceCheckpointer": Row(
        lambda folder: {"callbacks": callbacks.HuggingFaceCheckpointer(str(folder / "published"), "1ep")},
        "hugging face",
    ),
    "ImageVisualizer": Row(callback("ImageVisualizer", "2ba"), "conv"),
    "LRMonitor": Row(callback("LRMonitor")),
    "LoadCheckpoint": Row(
        lambda folder: {"callbacks": callbacks.LoadCheckpoint(checkpoint_in(folder), load_weights_only=True)}
    ),
    "MLPerfCallback": Row(lambda folder: {"callbacks": callbacks.MLPerfCallback(str(folder / "mlperf"), 0)}),
    "MemoryMonitor": Row(callback("MemoryMonitor")),
    "MemorySnapshot": Row(callback("MemorySnapshot")),
    "NaNMonitor": Row(callback("NaNMonitor")),
    "OOMObserver": Row(callback("OOMObserver")),
    "OptimizerMonitor": Row(callback("OptimizerMonitor", batch_log_interval=1)),
    "KubeflowProgress": Row(callback("KubeflowProgress")),
    "RuntimeEstimator": Row(callback("RuntimeEstimator")),
    "ScheduledGarbageCollector": Row(callback("ScheduledGarbageCollector", 1)),
    "SpeedMonitor": Row(callback("SpeedMonitor", 2)),
    "SyncMonitor": Row(callback("SyncMonitor")),
    "SystemMetricsMonitor": Row(callback("SystemMetricsMonitor")),
    "ThresholdStopper": Row(callback("ThresholdStopper", "CrossEntropy", "eval", 10.0, comp="less")),
}


def in_bfloat16(_):
    return {"precision": "amp_bf16"}


def to_low_precision(model):
    functional.apply_low_precision_layernorm(model, "amp_bf16")


SETTINGS = {
    "gradient scaling (`amp_fp16`)": Row(
        lambda _: {"precision": "amp_fp16", "device": SmallDevice(), "callbacks": SmallScale()}, tolerance=FLOAT16
    ),
    "`device_train_microbatch_size='auto'`": Row(
        lambda _: {"device": SmallDevice(), "device_train_microbatch_size": "auto"}
    ),
    "`compile_config` (backend `eager`)": Row(lambda _: {"compile_config": {"backend": "eager"}}),
    "low-rank adapters of PEFT": Row(model="adapted", resumes=True),
    "surgery before wrapping": Row(algorithm("SqueezeExcite", 4, 16), "conv", resumes=True),
    "surgery after wrapping, in place": Row(surgery=to_low_precision, make=in_bfloat16, tolerance=BFLOAT16),
    "surgery after wrapping, with the same weights in new layers": Row(
        model="conv", surgery=functional.apply_blurpool, outcome=REFUSED
    ),
    "surgery after wrapping, with new weights": Row(
        model="conv",
        surgery=lambda model: functional.apply_squeeze_excite(model, latent_channels=4, min_channels=16),
        outcome=REFUSED,
    ),
    "AdamW": Row(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01), tolerance=OF_ADAM),
    "DecoupledAdamW": Row(optimizer=lambda parameters: DecoupledAdamW(parameters, lr=0.01), tolerance=OF_ADAM),
    "DecoupledAdamW with cautious and clipped updates": Row(
        optimizer=lambda parameters: DecoupledAdamW(parameters, lr=0.01, cautious_updates=True, clip_updates=True),
        tolerance=OF_ADAM,
    ),
    "DecoupledSGDW": Row(optimizer=lambda parameters: DecoupledSGDW(parameters, lr=0.1, momentum=0.9)),
    "Adafactor": Row(optimizer=lambda parameters: torch.optim.Adafactor(parameters), outcome=REFUSED),
    "several optimizers": Row(optimizer=lambda parameters: three_optimizers(list(parameters)), resumes=True),
}
TABLE = {"algorithm": ALGORITHMS, "callback": CALLBACKS, "setting": SETTINGS}


def three_optimizers(parameters):
    """Return three optimizers, two of them of one class, with every third parameter each."""
    thirds = [parameters[place::3] for place in range(3)]
    kinds = (torch.optim.SGD, DecoupledSGDW, torch.optim.SGD)
    return [kind(part, lr=0.1, momentum=0.9) for kind, part in zip(kinds, thirds, strict=True)]


def checkpoint_in(folder):
    """Save weights that no row begins with."""
    path = folder / "ready.pt"
    with make_trainer(Row(), False, folder, seed=23) as trainer, torch.no_grad():
        for parameter in trainer.state.model.parameters():
            parameter.mul_(0.5)
        trainer.save_checkpoint(str(path))
    return str(path)


def make_trainer(row, sharded, folder, **more):
    make_model, make_data = MODELS[row.model]
    torch.manual_seed(11)
    model, data = make_model(), make_data()
    if row.surgery is not None and not sharded:
        row.surgery(model)
    loader = DataLoader(data, 8 // dist.get_world_size(), sampler=dist.get_sampler(data, shuffle=False))
    settings = {
        "train_dataloader": loader,
        "eval_dataloader": loader,
        "max_duration": "2ep",
        "optimizers": row.optimizer(model.parameters()),
        "device_train_microbatch_size": 4 // dist.get_world_size(),
        "loggers": InMemoryLogger(),
        "device": "cpu",
        "progress_bar": False,
        "seed": 5,
        **row.make(folder),
        **more,
    }
    if settings["device_train_microbatch_size"] == "auto":
        model.module[1].register_forward_hook(settings["device"].fails_in)
    if sharded:
        settings["parallelism_config"] = {"fsdp": {}}
    trainer = Trainer(model=model, **settings)
    if row.surgery is not None and sharded:
        row.surgery(trainer.state.model)
    return trainer


def train(row, sharded, folder):
    """Return the weights, the metrics and the time at the end of a run."""
    folder.mkdir(exist_ok=True)
    more = {}
    if row.resumes:
        name = "ep{epoch}.pt"
        with make_trainer(row, sharded, folder, save_folder=str(folder), save_filename=name) as trainer:
            trainer.fit(duration="1ep")
        more = {"load_path": str(folder / "ep1.pt")}
    with make_trainer(row, sharded, folder, **more) as trainer:
        trainer.fit()
        state = trainer.state
        assert trainer.strategy.prepares_before_load is sharded
        weights = {name: value.clone() for name, value in trainer.strategy.model_state_dict(state.model).items()}
        (memory,) = [each for each in state.callbacks if isinstance(each, InMemoryLogger)]
    return weights, metrics_of(memory, row.model in ("conv", "residual")), int(state.timestamp.sample)


def metrics_of(memory, counts_statistics):
    return {
        name.replace("/module.module.", "/module."): torch.tensor([float(value) for _, value in values])
        for name, values in memory.data.items()
        if not _NOT_ALIKE.match(name) and not (counts_statistics and name.startswith("metrics/eval"))
    }


def farthest(values, others):
    assert list(values) == list(others), set(values) ^ set(others)
    return max((values[name].double() - others[name].double()).abs().max().item() for name in values)


def compare(row, plain, shard):
    """Say how a run of a sharded model compares with another run."""
    assert plain[2] == shard[2]
    distance = max(farthest(plain[0], shard[0]), farthest(plain[1], shard[1]))
    return row.outcome if distance <= row.tolerance else f"{distance} away"


def run_row(row, folder):
    if row.outcome == REFUSED:
        with pytest.raises((ValueError, NotImplementedError)) as refusal:
            train(row, True, folder)
        return f"{REFUSED}: {refusal.value}"
    shard = train(row, True, folder / "sharded")
    return compare(row, train(row, False, folder / "plain"), shard)


def run_rows(kind, folder):
    warnings.simplefilter("ignore")
    seen = {}
    for index, (name, row) in enumerate(TABLE[kind].items()):
        (Path(folder) / str(index)).mkdir(exist_ok=True)
        seen[name] = run_row(row, Path(folder) / str(index))
    return seen


NEEDS_REPEATING = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="torch has no FSDPModule.reset_iter_state, which device_train_microbatch_size='auto' needs",
)
KINDS = [pytest.param(kind, marks=NEEDS_REPEATING) if kind == "setting" else kind for kind in TABLE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_documented_table_is_what_two_ranks_see(kind, root, tmp_path):
    seen, _ = run_ranks(run_rows, kind, str(tmp_path), store=tmp_path / "store", timeout_s=400)
    for name, row in TABLE[kind].items():
        assert seen[name].split(":")[0] == row.outcome, f"{name}: {seen[name]}"
    executed = [f"| {kind} | {name} | {row.outcome} |" for name, row in TABLE[kind].items()]
    documented = (root / "docs" / "guides" / "fsdp.md").read_text().splitlines()
    assert executed == [line for line in documented if line.startswith(f"| {kind} |")]


def test_the_table_has_every_algorithm_and_callback():
    classes = {name for name in algorithms.__all__ if not re.search("Transform|2d$", name)}
    assert {re.split("[ ,]", name)[0] for name in ALGORITHMS} == classes
    assert set(CALLBACKS) == set(callbacks.__all__)
