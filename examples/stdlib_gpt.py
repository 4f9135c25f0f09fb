"""Train a small language model on the source of Python's standard library, publish it, and let it write.

    composer -n 2 examples/stdlib_gpt.py [--folder runs/stdlib_gpt] [--duration 150ba] [--without packing muon fused]

Nothing is downloaded: a byte-level tokenizer is trained on the text first, which is then written as shards for
StreamingDataset. The model is a Llama of transformers with 1.4 million weights, sharded over the processes with FSDP2.
At the end, `composer-ckpt convert` makes a Hugging Face folder of the last checkpoint, and plain transformers loads it
in a process of its own and continues a prompt.

Functions and classes are packed into windows, the hidden matrices are trained with Muon, and FusedCrossEntropy computes
the loss without logits in memory. `--without` leaves out any of the three: each function then has windows of its own,
AdamW trains all weights, or all logits are computed. Held-out text is packed in every case, so that its cross entropy
can be compared. The shards depend on packing, so use a folder for each comparison:

    for way in packing muon fused; do
        composer -n 1 examples/stdlib_gpt.py --folder runs/without_$way --without $way
    done
    composer -n 1 examples/stdlib_gpt.py --folder runs/with_all
    composer -n 1 examples/stdlib_gpt.py --folder runs/without_all --without packing muon fused

Measured after 150 batches of 16 windows in one process with one thread on a CPU, from `result.json` in each folder
(means of two runs, which differ by at most 6% in speed and 1% in memory):

    without              held-out cross entropy   tokens per second   peak memory (MiB)
    nothing              4.546                    4,650               1,227
    packing              4.696                    3,256               1,233
    muon                 5.450                    5,080               1,228
    fused                4.546                    4,675               1,257
    packing muon fused   5.681                    3,592               1,261

Tokens of padding are not counted. The memory of logits is small here, with a vocabulary of 1,024: 8 MiB for a batch.
See `docs/algorithms/fused_cross_entropy.md` for the memory with 50,000 tokens.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from text_to_mds import Windows, write_windows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms import FusedCrossEntropy
from composer.models import HuggingFaceModel
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW, Muon
from composer.utils import dist
from composer_events import DataSpec
from composer_models import LanguageCrossEntropy, PackedDataset, packed_data_spec

LENGTH, VOCABULARY = 128, 1024
BATCH_SIZE = 16
NUM_HELD_OUT = 256
DEFINITION = r"\n(?= *(?:def |class |@))"
WAYS = ("packing", "muon", "fused")
END = "<end>"
PROMPT = "import os\n\ndef "

GENERATE = """
import sys, transformers
transformers.utils.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer(sys.argv[2], return_tensors="pt")
tokens = model.generate(**prompt, max_new_tokens=60, do_sample=False, repetition_penalty=1.2)
assert "composer" not in sys.modules
print(tokenizer.decode(tokens[0]))
"""


def read_texts() -> list[str]:
    """Return the functions, classes and other parts of the modules in the top folder of the standard library."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    return [part for path in paths for part in re.split(DEFINITION, path.read_text(encoding="utf-8")) if part.strip()]


def train_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, which knows every text."""
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bytewise.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=END, pad_token=END)


def pack(texts: list[str], tokenizer: transformers.PreTrainedTokenizerBase, *, packs: bool) -> Iterable[Any]:
    """Return the windows of all texts, each with many of them, or else with parts of one alone."""
    documents = [tokenizer.encode(text) for text in texts]
    options = {"end_of_document": tokenizer, "too_long": "split"}
    if packs:
        return PackedDataset(documents, LENGTH, **options)
    return chain.from_iterable(PackedDataset([document], LENGTH, **options) for document in documents)


def prepare(folder: Path, *, packs: bool) -> None:
    """Write the tokenizer, and shards of windows to train on and to hold out, packed alike for comparison."""
    texts = read_texts()
    tokenizer = train_tokenizer(texts)
    np.random.default_rng(17).shuffle(texts)
    write_windows(pack(texts[NUM_HELD_OUT:], tokenizer, packs=packs), folder / "train", tokenizer, LENGTH)
    write_windows(pack(texts[:NUM_HELD_OUT], tokenizer, packs=True), folder / "held_out", tokenizer, LENGTH)
    tokenizer.save_pretrained(folder / "tokenizer")  # last, so that what is there is complete


def make_loader(folder: Path, model: HuggingFaceModel, *, shuffle: bool) -> DataSpec:
    """Return this process's share of the windows in a folder."""
    size = BATCH_SIZE // dist.get_world_size()
    dataset = Windows(local=str(folder), batch_size=size, shuffle=shuffle, shuffle_seed=17)
    return packed_data_spec(DataLoader(dataset, batch_size=size), model)


def make_model(tokenizer: transformers.PreTrainedTokenizerBase) -> HuggingFaceModel:
    """Return a small causal model with weights as they are drawn."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(17)
    model = transformers.LlamaForCausalLM(config)
    return HuggingFaceModel(model, tokenizer, use_logits=True, metrics=[LanguageCrossEntropy()])


def train(folder: Path, duration: str, without: Collection[str]) -> dict[str, float]:
    """Train, save the last checkpoint, and return the cross entropy of held-out tokens before and after.

    Args:
        folder: Of the shards and checkpoints.
        duration: The length of training.
        without: What to leave out, of `WAYS`.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = make_model(tokenizer)
    options = {"lr": 3e-3, "betas": (0.9, 0.95)}
    with Trainer(
        model=model,
        train_dataloader=make_loader(folder / "train", model, shuffle=True),
        eval_dataloader=make_loader(folder / "held_out", model, shuffle=False),
        max_duration=duration,
        optimizers=DecoupledAdamW(model.parameters(), **options) if "muon" in without else Muon(model, **options),
        algorithms=None if "fused" in without else FusedCrossEntropy(),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="10ba"),
        parallelism_config={"fsdp": {"state_dict_type": "full"}},
        save_folder=str(folder / "checkpoints"),
        save_interval="1dur",
        save_overwrite=True,
        device_train_microbatch_size=BATCH_SIZE // dist.get_world_size(),
        accumulate_train_batch_on_tokens=True,
        run_name="stdlib-gpt",
        device="cpu",
        seed=17,
        progress_bar=False,
    ) as trainer:
        trainer.eval()
        before = float(trainer.state.eval_metric_values["LanguageCrossEntropy"])
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
        after = float(trainer.state.eval_metric_values["LanguageCrossEntropy"])
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of this process, in kilobytes on Linux
        rate = int(trainer.state.timestamp.token) / seconds
        return {"before": before, "after": after, "tokens_per_second": rate, "peak_mib": peak_mib}


def publish(folder: Path) -> str:
    """Convert the last checkpoint to a Hugging Face folder, and return what its model writes after the prompt."""
    checkpoint, published = folder / "checkpoints" / "latest-rank0.pt", folder / "published"
    command = [Path(sys.executable).with_name("composer-ckpt"), "convert", checkpoint, published, "--overwrite"]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, published, PROMPT], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def main() -> None:
    """Read the command line, and do it all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/stdlib_gpt"))
    parser.add_argument("--duration", default="150ba")
    parser.add_argument("--without", nargs="*", choices=WAYS, default=[], help="what to leave out, for comparison")
    arguments = parser.parse_args()
    dist.initialize_dist("cpu")
    if dist.get_global_rank() == 0 and not (arguments.folder / "tokenizer").exists():
        prepare(arguments.folder, packs="packing" not in arguments.without)
    dist.barrier()
    result = train(arguments.folder, arguments.duration, arguments.without)
    if dist.get_global_rank() == 0:
        text = publish(arguments.folder)
        (arguments.folder / "result.json").write_text(json.dumps({**result, "text": text}, indent=2) + "\n")
        print(
            f"Cross entropy of held-out tokens: {result['before']:.2f} before, {result['after']:.2f} after, with "
            f"{result['tokens_per_second']:.0f} tokens per second and {result['peak_mib']:.0f} MiB.\n\n{text}"
        )


if __name__ == "__main__":
    main()
