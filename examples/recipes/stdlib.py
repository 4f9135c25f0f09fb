"""The recipe of language models in small: the source of Python's standard library, byte by byte.

    python examples/recipes/stdlib.py --seeds 5

ALiBi and sequence length warm-up against a baseline that is tuned just as much. One thread; what is measured are the
CPU-seconds of training. All arms are evaluated on the same windows of 256 bytes, of modules that none was trained on.
"""

import math
import sys
from typing import Any

import torch
import transformers
from arms import Arm, Comparison, Point, Task
from comparison import main
from cpu_clock import CpuClock
from stdlib_data import CONTEXT, VOCABULARY, Windows, load_stdlib
from torch.utils.data import DataLoader

from composer import Algorithm, State, Trainer
from composer.algorithms import EMA, Alibi, SeqLengthWarmup
from composer.models import HuggingFaceModel
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from composer_models import LanguageCrossEntropy

BATCH_SIZE = 8
NUM_LAYERS, WIDTH, NUM_HEADS = 2, 96, 4
NUM_EVALUATIONS = 8


def make_model() -> HuggingFaceModel:
    """Return a GPT-2 of two layers, 96 wide, with 0.25 million weights as they are drawn."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=NUM_LAYERS,
        n_head=NUM_HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers does not see it in the name of this class, and warns
    return HuggingFaceModel(model, use_logits=True, metrics=[LanguageCrossEntropy()])


def make_loaders(
    seed: int, batch_size: int = BATCH_SIZE, window: int = CONTEXT
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a shuffled loader of the training text in windows of a length, and one of the held-out windows."""
    train, held_out = load_stdlib()
    if window != CONTEXT:
        train = Windows(train.windows.flatten(), window)
    generator = torch.Generator().manual_seed(seed)
    return (
        DataLoader(train, batch_size, shuffle=True, drop_last=True, generator=generator),
        DataLoader(held_out, batch_size=64),
    )


def make_trainer(arm: Arm, lr: float, seed: int, clock: CpuClock) -> Trainer:
    """Put together the training of one arm.

    Args:
        arm: May have the settings `batch_size`, `window` (the length of the training's windows), and options of the
            Trainer.
        lr: The peak of the learning rate.
        seed: Of weights and batches.
        clock: Notes the bits per byte of the held-out windows at eight moments.
    """
    torch.manual_seed(seed)
    of_loader, of_trainer = arm.split_settings("batch_size", "window")
    train_dataloader, held_out_dataloader = make_loaders(seed, **of_loader)
    model = make_model()
    if arm.optimizer is None:
        optimizer = DecoupledAdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=1e-5)
    else:
        optimizer = arm.optimizer(model, lr=lr)
    options: dict[str, Any] = {
        "eval_interval": f"{1 / NUM_EVALUATIONS}dur",
        "schedulers": CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur", alpha_f=0.1),
        **of_trainer,
    }
    return Trainer(
        model=model,
        train_dataloader=train_dataloader,
        eval_dataloader=held_out_dataloader,
        max_duration=arm.duration,
        optimizers=optimizer,
        algorithms=arm.algorithms(),
        callbacks=clock,
        device="cpu",
        seed=seed,
        progress_bar=False,
        **options,
    )


def bits_per_byte(state: State) -> float:
    """Return the cross entropy of the last evaluation, which is in nats, in bits."""
    return float(state.eval_metric_values["LanguageCrossEntropy"]) / math.log(2)


def train(arm: Arm, lr: float, seed: int) -> list[Point]:
    """Train once, and return CPU-seconds and bits per byte at eight moments."""
    clock = CpuClock(bits_per_byte)
    with make_trainer(arm, lr, seed, clock) as trainer:
        trainer.fit()
    return clock.curve


def alibi(scaling: float = 1.0) -> Alibi:
    """Biases in place of positions; by default it sees the same windows as the baseline."""
    return Alibi(max_sequence_length=CONTEXT, train_sequence_length_scaling=scaling)


def seq_length_warmup() -> SeqLengthWarmup:
    """Begin with a quarter of the window, and have the whole of it after the 30 % of training that were published."""
    return SeqLengthWarmup(duration=0.3, min_seq_length=CONTEXT // 4, max_seq_length=CONTEXT, step_size=8)


def composed() -> list[Algorithm]:
    """The recipe."""
    return [alibi(), seq_length_warmup()]


TASK = Task(
    name="stdlib",
    setup=f"batches of {BATCH_SIZE}, windows of {CONTEXT}, {NUM_LAYERS} layers of {WIDTH}, {NUM_HEADS} heads",
    train=train,
    target=3.503,
    quality="bits per byte of unseen modules",
    percent=False,
    is_better_higher=False,
)

# The durations were chosen so that the arms take about equally long; the last three, at most half of that.
STDLIB = Comparison(
    name="stdlib",
    task=TASK,
    arms=(
        Arm(name="baseline", duration="400ba"),
        Arm(name="ALiBi", duration="375ba", algorithms=lambda: [alibi()]),
        Arm(name="SeqLengthWarmup", duration="440ba", algorithms=lambda: [seq_length_warmup()]),
        Arm(name="EMA", duration="395ba", algorithms=lambda: [EMA(half_life="20ba")]),
        Arm(name="control: ALiBi, windows of 64", duration="480ba", algorithms=lambda: [alibi(scaling=0.25)]),
        Arm(name="control: half the batch", duration="780ba", settings={"batch_size": BATCH_SIZE // 2}),
        Arm(name="both", duration="410ba", algorithms=composed),
        Arm(name="baseline, half the time", duration="200ba", like="baseline"),
        Arm(
            name="control, half the time",
            duration="235ba",
            algorithms=lambda: [alibi(scaling=0.25)],
            like="control: ALiBi, windows of 64",
        ),
        Arm(name="both, half the time", duration="195ba", algorithms=composed, like="both"),
    ),
    baseline="baseline",
    composed="both",
    learning_rates=(1e-3, 2e-3, 4e-3, 6e-3),
)


if __name__ == "__main__":
    sys.exit(main(STDLIB, __doc__))
