"""Algorithms in training loops that people already have.

- `loop`: a loop of one's own, in plain PyTorch.
- `accelerate`: the same, with Accelerate.
- `hf`: the Trainer of Hugging Face.
- `lightning`: the Trainer of Lightning.

Each is a module of its own, which loads the library that it is for; nothing is loaded here.
"""
