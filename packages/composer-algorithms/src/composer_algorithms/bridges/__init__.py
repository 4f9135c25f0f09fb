"""Bridges that run algorithms in the training loops of other libraries.

- `loop`: a custom loop in plain PyTorch.
- `accelerate`: a custom loop with Accelerate.
- `hf`: the Hugging Face Trainer.
- `lightning`: the Lightning Trainer.

Import the module of a bridge to load its library; this package loads none of them.
"""
