"""Save a model so that a damaged byte is seen and a stranger's file runs nothing."""

import os
from pathlib import Path
from tempfile import mkdtemp

import torch

from composer_checkpoint import CorruptCheckpointError, UnsafeCheckpointError, load_file, save_file

folder = Path(mkdtemp())
model = torch.nn.Linear(8, 8)
save_file({"state": {"model": model.state_dict()}}, folder / "ep1.pt")
assert torch.equal(load_file(folder / "ep1.pt")["state"]["model"]["weight"], model.weight)

data = bytearray((folder / "ep1.pt").read_bytes())
data[data.index(model.weight.detach().numpy().tobytes())] ^= 1
(folder / "damaged.pt").write_bytes(data)
refusals = []
try:
    load_file(folder / "damaged.pt")
except CorruptCheckpointError as error:
    refusals.append(str(error))


class Evil:
    """Would run a command when it is unpickled."""

    def __reduce__(self):
        """Say which."""
        return os.system, ("echo owned",)


torch.save(Evil(), folder / "evil.pt")
try:
    load_file(folder / "evil.pt")
except UnsafeCheckpointError as error:
    refusals.append(str(error))

assert "state/model/weight" in refusals[0]
assert "system" in refusals[1]
print("\n".join(refusals))
