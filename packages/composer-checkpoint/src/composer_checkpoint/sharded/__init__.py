"""Checkpoints of state that is spread over ranks, in the format of `torch.distributed.checkpoint`.

- `save_sharded`, `load_sharded`: all ranks save into, and load from, one folder, however they are spread.
- `verify_folder`, `read_folder_metadata`: what is in a folder, and whether every byte of it is as it was written.
- `VerifiedWriter`, `VerifyingReader`, `ComparingLoadPlanner`: the same for `torch.distributed.checkpoint.save` and
  `load`.
"""

from composer_checkpoint.sharded.load import ComparingLoadPlanner, load_sharded
from composer_checkpoint.sharded.reader import VerifyingReader, read_folder_metadata
from composer_checkpoint.sharded.save import save_sharded
from composer_checkpoint.sharded.verify import verify_folder
from composer_checkpoint.sharded.writer import VerifiedWriter

__all__ = [
    "save_sharded",
    "load_sharded",
    "verify_folder",
    "read_folder_metadata",
    "VerifiedWriter",
    "VerifyingReader",
    "ComparingLoadPlanner",
]
