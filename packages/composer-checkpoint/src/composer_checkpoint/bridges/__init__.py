"""Verified checkpoints for the trainers of other libraries.

- `lightning`: a `CheckpointIO` for Lightning's Trainer.
- `hugging_face`: finds the newest complete checkpoint of a Hugging Face Trainer, and seals those that it saves.
"""
