"""A real Hugging Face Trainer that resumes from the newest of its checkpoints that is whole."""

import json
import os
import shutil

import pytest
import safetensors.torch
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from composer_checkpoint.bridges.hugging_face import (  # noqa: E402  # needs the above
    latest_valid,
    seal_folder,
    sealing_callback,
    verify_folder,
)
from composer_checkpoint.errors import CheckpointError  # noqa: E402
from composer_checkpoint.files import load_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers, accelerate and torch warn about each other


def trainer_of(folder, max_steps, callbacks=()):
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=max_steps,
        save_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = [{"input_ids": torch.arange(i, i + 8) % 16, "labels": torch.arange(i, i + 8) % 16} for i in range(16)]
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config), args, train_dataset=data, callbacks=list(callbacks)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer = trainer_of(folder, 6, [sealing_callback()])
    trainer.train()
    return folder, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.fixture
def output_dir(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "out")
    return tmp_path / "out"


def unseal(output_dir):
    for path in output_dir.glob("*/composer_manifest.json"):
        path.unlink()


def test_every_checkpoint_of_the_trainer_is_sealed(output_dir):
    assert {path.name for path in output_dir.iterdir()} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    manifest = verify_folder(output_dir / "checkpoint-4")
    assert manifest.info["global_step"] == 4
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= set(manifest.files)


def test_the_newest_is_by_number_and_nothing_means_a_fresh_start(output_dir, tmp_path):
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-6")
    shutil.copytree(output_dir / "checkpoint-6", output_dir / "checkpoint-10")
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-10")
    assert latest_valid(tmp_path / "none") is None


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"])
@pytest.mark.parametrize("size", [0, 17, -1])
def test_a_checkpoint_that_was_cut_short_is_passed_over(output_dir, sealed, name, size):
    if not sealed:
        unseal(output_dir)
    path = output_dir / "checkpoint-6" / name
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    if name == "trainer_state.json" and size == -1 and not sealed:
        path.write_bytes(path.read_bytes().rstrip()[:-1])  # without its last brace
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-4")


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json"])
def test_a_save_that_did_not_finish_is_passed_over(output_dir, name):
    unseal(output_dir)
    (output_dir / "checkpoint-6" / name).unlink()
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-4")


def test_a_flipped_bit_of_a_sealed_checkpoint_is_seen(output_dir):
    path = output_dir / "checkpoint-6" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        verify_folder(output_dir / "checkpoint-6")
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-4")
    seal_folder(output_dir / "checkpoint-6")
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-6")


@pytest.fixture
def in_shards(output_dir):
    """The newest checkpoint with its weights in two files and an index, not sealed."""
    unseal(output_dir)
    folder = output_dir / "checkpoint-6"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    yield lambda write, name: write_in_shards(folder, weights, write, name)
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-4")


def write_in_shards(folder, weights, write, name):
    names, prefix = sorted(weights), PREFIXES[name]
    shards = {f"{prefix}-1-of-2.{name}": names[::2], f"{prefix}-2-of-2.{name}": names[1::2]}
    for shard, held in shards.items():
        write({key: weights[key].clone() for key in held}, folder / shard)
    weight_map = {key: shard for shard, held in shards.items() for key in held}
    (folder / f"{prefix}.{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert latest_valid(folder.parent) == str(folder)
    return folder


PREFIXES = {"safetensors": "model", "bin": "pytorch_model"}
SHARDED = [(safetensors.torch.save_file, "safetensors"), (torch.save, "bin")]


@pytest.mark.parametrize(("write", "name"), SHARDED)
def test_a_checkpoint_that_lacks_a_shard_of_its_weights_is_passed_over(in_shards, write, name):
    folder = in_shards(write, name)
    (folder / f"{PREFIXES[name]}-2-of-2.{name}").unlink()


@pytest.mark.parametrize(("write", "name"), SHARDED)
def test_a_shard_of_another_save_is_seen(in_shards, write, name):
    folder = in_shards(write, name)
    write({"other": torch.ones(3)}, folder / f"{PREFIXES[name]}-2-of-2.{name}")


def test_a_checkpoint_that_lost_its_optimizer_is_passed_over(output_dir):
    unseal(output_dir)
    (output_dir / "checkpoint-6" / "optimizer.pt").unlink()
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-4")


def test_a_checkpoint_that_was_not_sealed_is_called_unverified(output_dir, caplog):
    latest_valid(output_dir)
    assert "unverified" not in caplog.text
    unseal(output_dir)
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-6")
    assert f"{output_dir / 'checkpoint-6'} is unverified" in caplog.text


class Hostile:
    def __reduce__(self):
        return os.system, ("touch it-ran",)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_file_that_asks_for_code_is_named_and_passed_over(output_dir, caplog, name):
    unseal(output_dir)
    torch.save({"state": Hostile()}, output_dir / "checkpoint-6" / name)
    assert latest_valid(output_dir) == str(output_dir / "checkpoint-4")
    assert f"{name} asks for posix.system" in caplog.text


def test_the_trainer_resumes_from_it_and_ends_as_if_never_interrupted(trained, output_dir):
    shutil.rmtree(output_dir / "checkpoint-6")
    (output_dir / "checkpoint-6").mkdir()  # where a killed save began
    trainer = trainer_of(output_dir, 6)
    trainer.train(resume_from_checkpoint=latest_valid(output_dir))
    for name, expected in trained[1].items():
        assert torch.equal(trainer.model.state_dict()[name], expected), name
