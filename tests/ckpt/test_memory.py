"""A conversion's memory follows the largest tensor, and not the checkpoint.

The sources are sparse files: two gigabytes of zeros that take no room on the disk. All conversions run in one process,
the small ones first, whose peak is what the libraries take.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

CODE = """
import json, resource, sys
from composer_ckpt.cli import main
for arguments in json.loads(sys.argv[1]):
    if main([*arguments, "--overwrite"]):
        sys.exit(f"failed: {arguments}")
    sys.stderr.write(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}\\n")
"""
ALLOWED_BESIDES = 200 * 10**6
LAYERS, WIDTH = 5, 4096
NEEDED_ROOM = 5 * 10**9


@pytest.fixture
def room(tmp_path):
    """Return a folder for large files, in memory if there is enough of it: what is measured is the process alone."""
    shared = Path("/dev/shm")
    fits = shared.is_dir() and shutil.disk_usage(shared).free > NEEDED_ROOM
    with tempfile.TemporaryDirectory(dir=shared if fits else tmp_path) as folder:
        yield Path(folder)


def weights_of(width, depth):
    """Return the shapes of a Llama's weights."""
    shapes = {"model.embed_tokens.weight": (32, width), "model.norm.weight": (width,), "lm_head.weight": (32, width)}
    for layer in range(depth):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (width, width) for name in ("gate", "up", "down")}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return shapes


def write_folder(folder, width, depth):
    """Write a Hugging Face folder of zeros, which the disk does not keep; return the size of its weights."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": depth, "vocab_size": 32}
    folder.mkdir()
    LlamaConfig(num_attention_heads=2, **sizes, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    header, position = {}, 0
    for name, shape in weights_of(width, depth).items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return position


def write_pt(path, width, depth):
    """Write what a Trainer saves of the same model; `skip_data` leaves holes where elements would be."""
    weights = {f"model.{name}": torch.empty(shape) for name, shape in weights_of(width, depth).items()}
    with torch.serialization.skip_data():
        torch.save({"state": {"model": weights}}, path)


def peaks_of(commands):
    """Run commands one after the other in a process, and return the most memory that it ever had after each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = [sys.executable, "-c", CODE, json.dumps(commands)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("peak ")]


@pytest.mark.slow
def test_two_gigabytes_are_converted_in_the_memory_of_three_tensors(room):
    write_folder(room / "small", 8, 1)
    write_pt(room / "small.pt", 8, 1)
    assert write_folder(room / "large", WIDTH, LAYERS) > 2 * 10**9
    write_pt(room / "large.pt", WIDTH, LAYERS)
    # Each format is read once and written once; what is sharded is read back as large as it was.
    half = ["--output-precision", "bf16"]
    commands = [
        command
        for size in ("small", "large")
        for command in (
            ["convert", f"{room}/{size}", f"{room}/out.pt", *half],
            ["convert", f"{room}/{size}.pt", f"{room}/out-dcp", "--to", "dcp"],
            [
                "convert",
                f"{room}/out-dcp",
                f"{room}/out-hf",
                "--config",
                f"{room}/{size}",
                "--max-shard-size",
                "500MB",
                *half,
            ],
        )
    ]
    peaks = peaks_of(commands)
    assert len([*(room / "out-hf").glob("*.safetensors")]) > 1
    assert (room / "out.pt").stat().st_size > 10**9
    base, largest = peaks[2], 4 * WIDTH * WIDTH
    beyond = {" ".join(command): peak - base for command, peak in zip(commands, peaks, strict=True)}
    assert max(beyond.values()) <= 3 * largest + ALLOWED_BESIDES, beyond
