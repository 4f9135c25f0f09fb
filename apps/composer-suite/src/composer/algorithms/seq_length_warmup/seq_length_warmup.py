"""Training on short sequences first."""

from composer_algorithms.seq_length_warmup import SeqLengthWarmup, set_batch_sequence_length

__all__ = ["SeqLengthWarmup", "set_batch_sequence_length"]
