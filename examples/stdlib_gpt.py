"""Train a small language model on the source of Python's standard library, publish it, and let it write.

    composer -n 2 examples/stdlib_gpt.py [--folder runs/stdlib_gpt] [--duration 150ba]

Nothing is downloaded: a byte-level tokenizer is trained on the text first, which is then written as shards for
StreamingDataset. The model is a Llama of transformers with 1.4 million weights, sharded over the processes with FSDP2.
At the end, `composer-ckpt convert` makes a Hugging Face folder of the last checkpoint, and plain transformers loads it
in a process of its own and goes on from a prompt.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from streaming import MDSWriter, StreamingDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader

from composer import Trainer
from composer.models import HuggingFaceModel
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from composer.utils import dist
from composer_models import LanguageCrossEntropy

LENGTH, VOCABULARY = 128, 1024
BATCH_SIZE = 16
NUM_HELD_OUT = 128
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
    """Return the modules of the standard library that lie in its top folder, in a settled order."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths]


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


def prepare(folder: Path) -> None:
    """Write the tokenizer, and all tokens in samples of one length: shards to train on, and shards held out."""
    texts = read_texts()
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(folder / "tokenizer")
    tokens = np.array([token for text in texts for token in tokenizer.encode(text + END)], dtype=np.int32)
    samples = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    samples = np.random.default_rng(17).permutation(samples)
    for name, part in (("train", samples[:-NUM_HELD_OUT]), ("held_out", samples[-NUM_HELD_OUT:])):
        with MDSWriter(out=str(folder / name), columns={"tokens": f"ndarray:int32:{LENGTH}"}) as writer:
            for sample in part:
                writer.write({"tokens": sample})


class Tokens(StreamingDataset):
    """Samples of tokens; each token is the label of the one before, which the model sees to."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample as the model takes it."""
        tokens = torch.from_numpy(super().__getitem__(index)["tokens"].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def make_loader(folder: Path, *, shuffle: bool) -> DataLoader:
    """Return this process's share of the samples in a folder."""
    size = BATCH_SIZE // dist.get_world_size()
    dataset = Tokens(local=str(folder), batch_size=size, shuffle=shuffle, shuffle_seed=17)
    return DataLoader(dataset, batch_size=size)


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


def train(folder: Path, duration: str) -> dict[str, float]:
    """Train, save the last checkpoint, and return the cross entropy of held-out tokens before and after."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = make_model(tokenizer)
    with Trainer(
        model=model,
        train_dataloader=make_loader(folder / "train", shuffle=True),
        eval_dataloader=make_loader(folder / "held_out", shuffle=False),
        max_duration=duration,
        optimizers=DecoupledAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="10ba"),
        parallelism_config={"fsdp": {"state_dict_type": "full"}},
        save_folder=str(folder / "checkpoints"),
        save_interval="1dur",
        save_overwrite=True,
        device_train_microbatch_size=BATCH_SIZE // dist.get_world_size(),
        run_name="stdlib-gpt",
        device="cpu",
        seed=17,
        progress_bar=False,
    ) as trainer:
        trainer.eval()
        before = float(trainer.state.eval_metric_values["LanguageCrossEntropy"])
        trainer.fit()
        return {"before": before, "after": float(trainer.state.eval_metric_values["LanguageCrossEntropy"])}


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
    arguments = parser.parse_args()
    dist.initialize_dist("cpu")
    if dist.get_global_rank() == 0 and not (arguments.folder / "held_out" / "index.json").exists():
        prepare(arguments.folder)
    dist.barrier()
    entropy = train(arguments.folder, arguments.duration)
    if dist.get_global_rank() == 0:
        text = publish(arguments.folder)
        (arguments.folder / "result.json").write_text(json.dumps({**entropy, "text": text}, indent=2) + "\n")
        print(
            f"Cross entropy of held-out tokens: {entropy['before']:.2f} before, {entropy['after']:.2f} after.\n\n{text}"
        )


if __name__ == "__main__":
    main()
