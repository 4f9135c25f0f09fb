"""Checkpoints of state that is sharded over ranks, in the format of `torch.distributed.checkpoint`.

- `save_sharded`, `load_sharded`: save into one folder from all ranks, and load it on any number of ranks.
- `verify_folder`, `read_folder_metadata`: verify every byte of a folder, and read its metadata.
- `VerifiedWriter`, `VerifyingReader`, `ComparingLoadPlanner`: the same for `torch.distributed.checkpoint.save` and
  `load`.
"""

from composer_checkpoint.sharded.load import ComparingLoadPlanner, load_sharded
from composer_checkpoint.sharded.reader import VerifyingReader, read_folder_metadata, verify_folder
from composer_checkpoint.sharded.save import save_sharded
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
