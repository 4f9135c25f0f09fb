"""DeepSpeed's checkpoints are read without DeepSpeed, and give what its own converter and its engine give."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from composer_checkpoint import load_file
from composer_checkpoint.errors import NoCheckpointError, UnsafeCheckpointError
from composer_checkpoint.tensors import open_checkpoint
from composer_dist.testing import run_ranks

STAGES = (0, 1, 2, 3)
WORLD_SIZE = 2


class Net(nn.Module):
    """Has sizes that two ranks cannot halve, a frozen weight, and buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.last = nn.Linear(3, 3, bias=False)
        self.register_buffer("scale", torch.tensor([2.0, 3.0, 4.0]))
        self.register_buffer("count", torch.tensor(4))

    def forward(self, inputs):
        hidden = self.second(self.first(inputs).relu()) * self.scale.to(inputs.dtype)
        return self.last(self.frozen(hidden))


def save_all(folder):
    """Train two steps at each stage, save with the engine, and return the weights that it trains."""
    import deepspeed

    # An operation for inference, which DeepSpeed would compile here: minutes on a machine that has not compiled it yet.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return {
        (stage, is_bf16): save_one(deepspeed, stage, is_bf16, f"{folder}/{stage}-{is_bf16}")
        for stage in STAGES
        for is_bf16 in (False, True)
    }


def save_one(deepspeed, stage, is_bf16, folder):
    torch.manual_seed(3)
    net = Net()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:3], "weight_decay": 0.1}, {"params": trained[3:], "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **({"bf16": {"enabled": True}} if is_bf16 else {}),
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config)
    inputs = torch.randn(4, 5, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    for _ in range(2):
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag="step2")
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    per_rank = run_ranks(save_all, folder, store=folder / "store", world_size=WORLD_SIZE, timeout_s=400)
    return folder, per_rank[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_those_of_the_engine_and_of_its_converter(saved, stage, is_bf16, tmp_path, ckpt):
    folder, weights = saved
    place, of_engine = folder / f"{stage}-{is_bf16}", weights[stage, is_bf16]
    assert ckpt("convert", place, tmp_path / "out.pt")[0] == 0
    found = load_file(tmp_path / "out.pt")["state"]["model"]
    assert found.keys() == of_engine.keys()
    for name, tensor in of_engine.items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name
    if stage:
        for name, tensor in converted_by_deepspeed(place).items():
            assert torch.equal(found[name], tensor), name
            assert found[name].dtype == tensor.dtype


def converted_by_deepspeed(place):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(os.fspath(place), tag="step2")


@pytest.mark.slow
def test_16_bit_weights_are_taken_on_request(saved):
    folder, weights = saved
    with open_checkpoint(folder / "2-True", zero_weights="16bit") as source:
        assert source.weights["first.weight"].dtype == torch.bfloat16
        assert torch.equal(source.weights["first.weight"].read(), weights[2, True]["first.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_is_not_imported(saved, stage):
    folder, _ = saved
    code = (
        "import sys; from composer_checkpoint.tensors import open_checkpoint\n"
        "with open_checkpoint(sys.argv[1]) as source: [t.read() for t in source.weights.values()]\n"
        "assert not any(name.partition('.')[0] == 'deepspeed' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, os.fspath(folder / f"{stage}-False")], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_the_file_of_a_rank_that_is_missing_is_noticed(saved, stage, tmp_path):
    folder, _ = saved
    copy = shutil.copytree(folder / f"{stage}-False", tmp_path / "copy")
    (copy / "step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(NoCheckpointError, match="1 ranks, and 2 ranks saved it"):
        open_checkpoint(copy)


@pytest.mark.slow
def test_inspect_and_verify_know_the_folder(saved, ckpt):
    folder, _ = saved
    code, told = ckpt("inspect", folder / "3-False")
    assert code == 0
    assert told["format"] == "deepspeed"
    assert told["world_size"] == WORLD_SIZE
    assert told["deepspeed_version"]
    assert ckpt("verify", folder / "3-False")[1]["ok"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def test_a_file_that_asks_for_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"module": {"w": torch.ones(1)}, "more": Evil()}, "mp_rank_00_model_states.pt")
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        open_checkpoint(tmp_path)
    assert not os.path.exists("owned")


def test_a_latest_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(UnsafeCheckpointError, match="outside its folder"):
        open_checkpoint(tmp_path)
