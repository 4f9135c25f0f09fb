"""A conversion's memory follows the largest tensor, and not the checkpoint.

The sources are sparse files: two gigabytes of zeros that take no room on the disk.
"""

import json
import os
import struct
import subprocess
import sys

import pytest

CODE = """
import resource, sys
from composer_ckpt.cli import main
code = main(sys.argv[1:])
sys.stderr.write(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}\\n")
sys.exit(code)
"""
ALLOWED_BESIDES = 200 * 10**6
LAYERS, WIDTH = 30, 4096


def write_sparse(path, tensors):
    """Write a `.safetensors` file of zeros, which the disk does not keep."""
    header, position = {}, 0
    for name, shape in tensors.items():
        size = 4
        for count in shape:
            size *= count
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return position


def peak_of(*arguments):
    """Run the command in a process of its own, and return the most memory that it had."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, *map(os.fspath, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.rpartition("peak ")[2])


def layers(number, width):
    return {f"layers.{i}.weight": (width, width) for i in range(number)}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["out.pt", "out"])
def test_two_gigabytes_are_converted_in_the_memory_of_three_tensors(target, tmp_path):
    more = ["--output-precision", "bf16", *([] if "." in target else ["--to", "dcp"])]
    write_sparse(tmp_path / "small.safetensors", layers(2, 8))
    size = write_sparse(tmp_path / "large.safetensors", layers(LAYERS, WIDTH))
    assert size > 2 * 10**9
    base = peak_of("convert", tmp_path / "small.safetensors", tmp_path / f"small-{target}", *more)
    peak = peak_of("convert", tmp_path / "large.safetensors", tmp_path / target, *more)
    largest = 4 * WIDTH * WIDTH
    assert peak - base <= 3 * largest + ALLOWED_BESIDES


@pytest.mark.slow
def test_a_folder_of_two_gigabytes_is_cast_in_the_memory_of_three_tensors(tmp_path):
    from transformers import LlamaConfig

    def write(folder, width, depth):
        sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": depth, "vocab_size": 32}
        config = LlamaConfig(num_attention_heads=2, **sizes, architectures=["LlamaForCausalLM"])
        folder.mkdir()
        config.save_pretrained(folder)
        tensors = {
            "model.embed_tokens.weight": (32, width),
            "model.norm.weight": (width,),
            "lm_head.weight": (32, width),
        }
        for layer in range(depth):
            prefix = f"model.layers.{layer}"
            square = (width, width)
            tensors |= {f"{prefix}.self_attn.{name}_proj.weight": square for name in "qkvo"}
            tensors |= {f"{prefix}.mlp.{name}_proj.weight": square for name in ("gate", "up", "down")}
            tensors |= {f"{prefix}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        return write_sparse(folder / "model.safetensors", tensors)

    write(tmp_path / "small", 8, 1)
    assert write(tmp_path / "large", WIDTH, 5) > 2 * 10**9
    more = ["--output-precision", "bf16", "--max-shard-size", "500MB"]
    base = peak_of("convert", tmp_path / "small", tmp_path / "small-out", *more)
    peak = peak_of("convert", tmp_path / "large", tmp_path / "out", *more)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    assert peak - base <= 3 * 4 * WIDTH * WIDTH + ALLOWED_BESIDES
