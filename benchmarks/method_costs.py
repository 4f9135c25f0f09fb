"""What each method costs beside training without it: the ratio of processor time, for its card in docs/algorithms.

    python benchmarks/method_costs.py [--rounds N] [--epochs N] [--method NAME ...] [--write]

Each method trains a small model of its kind on one thread, in turns with a training without it: every round has both,
one right after the other, each for the same steps from the beginning to the end. So methods that act in a part of
training count as much as they do there, and a machine that slows down slows both. A step has all that the Trainer does
for it, the loading of its batch included, in the process that trains. Prints the ratio of the sums of the steps'
medians over the rounds; `--write` puts it into the cards and their index, between the markers there.
"""

import argparse
import logging
import re
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rows import Row, add_option
from rows import write as write_rows
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import VisionDataset
from torchvision.models.resnet import BasicBlock
from torchvision.transforms import ToTensor

from composer import Trainer, algorithms
from composer.core import Callback, Event
from composer.models import ComposerClassifier, ComposerGPT, HuggingFaceModel
from composer_algorithms import Metadata, all_metadata

CARDS = Path(__file__).resolve().parent.parent / "docs" / "algorithms"
BATCHES, EPOCHS, NOT_COUNTED = 8, 4, 2
BATCH, SIDE, CLASSES = 32, 32, 10
SEQUENCES, LENGTH, VOCABULARY = 8, 128, 256
NUM_SHOWN, WIDTH = 3, 120
DOMAINS = {"cv": "images", "nlp": "text"}
HEAD = "| method | what it does | acts on | kind of data | cost here |\n|---|---|---|---|---|"


class Digits(VisionDataset):
    """The handwritten digits of scikit-learn as images of 32x32 pixels in three colours."""

    def __init__(self) -> None:
        super().__init__(root="", transform=ToTensor())
        digits: Any = load_digits()
        arrays = (digits.images[: BATCHES * BATCH] * 15.9).astype("uint8")
        self.images = [Image.fromarray(one).resize((SIDE, SIDE)).convert("RGB") for one in arrays]
        self.labels = digits.target.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        return image if self.transform is None else self.transform(image), self.labels[index]


def _halving(channels: int, width: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride=2, bias=False), norm(width))
    return BasicBlock(channels, width, stride=2, downsample=shortcut, norm_layer=norm)


def residual(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> ComposerClassifier:
    """A residual network of three blocks on three sizes, with dropout before its classifier."""
    stem = (nn.Conv2d(3, 32, 3, padding=1, stride=2, bias=False), norm(32), nn.ReLU())
    blocks = (BasicBlock(32, 32, norm_layer=norm), _halving(32, 64, norm), _halving(64, 128, norm))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(128, CLASSES))
    return ComposerClassifier(nn.Sequential(*stem, *blocks, *head), num_classes=CLASSES)


def gpt2() -> HuggingFaceModel:
    """A GPT-2 of two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "bos_token_id": 1, "eos_token_id": 2}
    return HuggingFaceModel(GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, **sizes)))


def composer_gpt() -> ComposerGPT:
    """A ComposerGPT of two layers."""
    return ComposerGPT({"vocab_size": VOCABULARY, "max_seq_len": LENGTH, "d_model": 64, "n_layers": 2, "n_heads": 4})


def bert() -> HuggingFaceModel:
    """A BERT of two layers."""
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "intermediate_size": 256}
    return HuggingFaceModel(
        BertForMaskedLM(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **sizes))
    )


def sentences() -> list[dict[str, torch.Tensor]]:
    """Return sequences of tokens without a meaning, which cost as much as others."""
    tokens = torch.randint(3, VOCABULARY, (BATCHES * SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one} for one in tokens]


class Images(torch.Tensor):
    """Images that the cards call by a name."""

    def __new__(cls, side: int) -> "Images":
        """Draw images, always the same ones."""
        return torch.rand(100, 3, side, side, generator=torch.Generator().manual_seed(0)).as_subclass(cls)

    def __repr__(self, **_: Any) -> str:
        return "images"


@dataclass(frozen=True)
class Workload:
    """What is trained, and how this is called on the cards."""

    name: str
    model: Callable[[], Any]
    dataset: Callable[[], Any]
    batch_size: int
    precision: str = "fp32"


IMAGES = Workload("a residual network on digits of 32x32 pixels", residual, Digits, BATCH)
GROUP_NORMS = Workload(
    "a residual network with group norms on digits of 32x32 pixels, in amp_bf16",
    *(partial(residual, partial(nn.GroupNorm, 8)), Digits, BATCH, "amp_bf16"),
)
GPT = Workload("a GPT-2 of two layers on sequences of 128 tokens", gpt2, sentences, SEQUENCES)
COMPOSER_GPT = Workload("a ComposerGPT of two layers on sequences of 128 tokens", composer_gpt, sentences, SEQUENCES)
GPT_LOW = Workload(f"{GPT.name}, in amp_bf16", gpt2, sentences, SEQUENCES, "amp_bf16")
BERT = Workload("a BERT of two layers on sequences of 128 tokens", bert, sentences, SEQUENCES)


@dataclass(frozen=True)
class Case:
    """A method, the settings that make it act on so small a model, and what it trains."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    workload: Workload = IMAGES


CASES: Mapping[str, Case] = {
    "alibi": Case({"max_sequence_length": LENGTH}, GPT),
    "alternating_flip": Case(),
    "attention_window": Case({"initial_window": 32, "final_window": LENGTH}, COMPOSER_GPT),
    "augmix": Case(),
    "blurpool": Case(),
    "channels_last": Case(),
    "colout": Case(),
    "cutmix": Case(),
    "cutout": Case(),
    "dirac_init": Case(),
    "ema": Case(),
    "factorize": Case({"min_channels": 64}),
    "fused_cross_entropy": Case({}, GPT),
    "gated_linear_units": Case({}, BERT),
    "ghost_batchnorm": Case({"ghost_batch_size": 16}),
    "gradient_clipping": Case({"clipping_type": "norm", "clipping_threshold": 1.0}),
    "gyro_dropout": Case(),
    "label_smoothing": Case(),
    "layer_freezing": Case(),
    "logit_softcap": Case({}, GPT),
    "low_precision_groupnorm": Case({}, GROUP_NORMS),
    "low_precision_layernorm": Case({}, GPT_LOW),
    "mixup": Case(),
    "mixup_or_cutmix": Case(),
    "multi_token_prediction": Case({}, GPT),
    "multi_view_eval": Case(),
    "mup": Case({"base_width": 32}, GPT),
    "no_op_model": Case(),
    "progressive_resizing": Case(),
    "qk_norm": Case({}, GPT),
    "randaugment": Case(),
    "sam": Case(),
    "selective_backprop": Case(),
    "seq_length_warmup": Case({"max_seq_length": LENGTH}, GPT),
    "squared_relu": Case({}, GPT),
    "squeeze_excite": Case({"min_channels": 64}),
    "stochastic_depth": Case({"target_layer_name": "ResNetBasicBlock"}),
    "swa": Case(),
    "untied_head": Case({}, GPT),
    "value_residual": Case({}, GPT),
    "weight_standardization": Case(),
    "whitening_init": Case({"images": Images(SIDE)}),
    "z_loss": Case({}, GPT),
    "zero_init": Case({}, GPT),
}


@dataclass(frozen=True)
class Cost:
    """The processor times of the steps, round by round, without the method and with it."""

    without_s: list[list[float]]
    with_s: list[list[float]]

    def __str__(self) -> str:
        """The ratio of the sums of each step's median, so that a moment in which the machine is slow counts little."""
        without_s, with_s = self._sums_s()
        return f"{with_s / without_s:.2f}"

    def row(self, what: str) -> Row:
        """Return the mean step of each kind, and the same ratio."""
        (without_s, with_s), num_steps = self._sums_s(), len(self.with_s[0])
        plain, ours = 1e3 * without_s / num_steps, 1e3 * with_s / num_steps
        return Row(what=what, ours=ours, plain=plain, ratio=with_s / without_s)

    def _sums_s(self) -> tuple[float, float]:
        without_s, with_s = (
            sum(statistics.median(times) for times in zip(*rounds, strict=True))
            for rounds in (self.without_s, self.with_s)
        )
        return without_s, with_s

    @property
    def range(self) -> str:
        """The least and the largest ratio of a round."""
        ratios = [sum(with_s) / sum(without_s) for without_s, with_s in zip(self.without_s, self.with_s, strict=True)]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"


class Stopwatch(Callback):
    """Measure the processor time from the beginning of each step to that of the next, or to the end."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []

    def before_dataloader(self, state: Any, logger: Any) -> None:
        """Begin a step."""
        self.starts_s.append(time.process_time())

    def fit_end(self, state: Any, logger: Any) -> None:
        """End the last one."""
        self.starts_s.append(time.process_time())

    @property
    def steps_s(self) -> list[float]:
        """The times of the steps that count: those before allocate what later ones use again."""
        return [end_s - start_s for start_s, end_s in pairwise(self.starts_s)][NOT_COUNTED:]


def train(workload: Workload, chosen: Sequence[Any], num_epochs: int) -> list[float]:
    """Train once, always in the same way, and return the processor time of each step, in seconds."""
    torch.manual_seed(0)
    model, dataset = workload.model(), workload.dataset()
    stopwatch = Stopwatch()
    loader: DataLoader[Any] = DataLoader[Any](_dataset(dataset), batch_size=workload.batch_size)
    with Trainer(
        model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        max_duration=f"{num_epochs * BATCHES}ba",  # in epochs, no time would pass for methods within one
        algorithms=list(chosen),
        callbacks=[stopwatch],
        precision=workload.precision,
        device="cpu",
        seed=0,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return stopwatch.steps_s


def _dataset(dataset: Any) -> Dataset[Any]:
    return dataset  # a list is one as well, for everything but the types


def make(key: str, metadata: Metadata) -> Any:
    """Return the algorithm of a case."""
    return getattr(algorithms, metadata.class_name)(**CASES[key].settings)


def measure(keys: Sequence[str], num_rounds: int, num_epochs: int) -> dict[str, Cost]:
    """Train with and without each method, round by round."""
    methods, costs = all_metadata(), {key: Cost([], []) for key in keys}
    for workload in {CASES[key].workload.name: CASES[key].workload for key in keys}.values():
        train(workload, [], num_epochs)  # warms up
    for _ in range(num_rounds):
        for key, cost in costs.items():
            workload = CASES[key].workload
            cost.without_s.append(train(workload, [], num_epochs))
            cost.with_s.append(train(workload, [make(key, methods[key])], num_epochs))
    return costs


def row(key: str, metadata: Metadata, cost: Cost) -> str:
    """Return a method's row of the index."""
    events = sorted(make(key, metadata).acts_on, key=list(Event).index)
    acts_on = ", ".join(event.name for event in events[:NUM_SHOWN])
    if len(events) > NUM_SHOWN:
        acts_on += f" and {len(events) - NUM_SHOWN} more"
    domains = ", ".join(DOMAINS[domain] for domain in sorted(metadata.domains))
    return f"| [{metadata.name}]({key}.md) | {metadata.tldr} | {acts_on} | {domains} | {cost} |"


def sentence(key: str, metadata: Metadata, cost: Cost) -> str:
    """Return what a method's card says about its cost."""
    settings = ", ".join(f"{name}={value!r}" for name, value in CASES[key].settings.items())
    return (
        f"Measured here: a step with `{metadata.class_name}({settings})` takes {cost} times the processor time of one "
        f"without it ({cost.range} in {len(cost.with_s)} rounds), for {CASES[key].workload.name}, on one thread."
    )


def put(path: Path, marker: str, text: str) -> None:
    """Put a text between the two markers of a page."""
    page = path.read_text()
    begin, end = f"<!--{marker}-->", f"<!--/{marker}-->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path} needs {begin} and {end} once each, around what is generated.")
    if not text.startswith("\n"):  # a paragraph, with the markers in it
        text = textwrap.fill(f"{begin}{text}{end}", WIDTH, break_long_words=False, break_on_hyphens=False)
        text = text.removeprefix(begin).removesuffix(end)
    path.write_text(re.sub(f"{begin}.*{end}", lambda _: f"{begin}{text}{end}", page, flags=re.DOTALL))


def write(costs: Mapping[str, Cost]) -> None:
    """Put the costs into the cards and the index."""
    methods = all_metadata()
    table = [HEAD, *(row(key, methods[key], cost) for key, cost in costs.items())]
    put(CARDS / "README.md", "methods", "\n\n" + "\n".join(table) + "\n\n")
    for key, cost in costs.items():
        put(CARDS / f"{key}.md", "cost", sentence(key, methods[key], cost))


def main() -> int:
    """Measure, print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description="Measure what each method costs.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of {BATCHES} steps, each time")
    parser.add_argument("--method", nargs="*", default=list(CASES), choices=list(CASES), help="only these")
    parser.add_argument("--write", action="store_true", help="into docs/algorithms; for all methods together")
    add_option(parser)
    asked = parser.parse_args()
    if asked.write and len(asked.method) != len(CASES):
        parser.error("--write writes a table of all methods: leave out --method.")
    if asked.epochs < 1 or (asked.write and asked.epochs != EPOCHS):
        parser.error(f"--epochs={asked.epochs}. Take 1 or more; --write goes by {EPOCHS}.")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about what training on so little data is like
    logging.disable(logging.WARNING)
    costs = measure(asked.method, asked.rounds, asked.epochs)
    print(f"processor time of a step with the method to one without, medians of {asked.rounds} rounds")
    for key, cost in costs.items():
        print(f"{key:26}{cost!s:>6}   {cost.range}")
    write_rows(asked.json, [cost.row(f"step with {key}, to one without") for key, cost in costs.items()])
    if asked.write:
        write(costs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
