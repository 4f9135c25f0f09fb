"""The same guarantees for the trainers of other libraries.

- `lightning`: a `CheckpointIO` for Lightning's Trainer.
- `hugging_face`: the newest whole checkpoint of a Hugging Face Trainer, and a seal on each that it saves.
"""
