"""`composer-ckpt inspect` says what is in a checkpoint."""

import os
import subprocess
import sys

import pytest
import torch

from composer_checkpoint import save_file, save_sharded

KEYS = {
    "schema", "source", "format", "bytes", "files", "has_manifest", "composer_version", "torch_version",
    "transformers_version", "deepspeed_version", "world_size", "timestamp", "run_name", "rank_zero_seed", "algorithms",
    "optimizers", "schedulers", "callbacks", "huggingface", "tensors", "totals", "missing", "unsafe",
}  # fmt: skip


@pytest.mark.parametrize(("save", "kind"), [(save_file, "composer"), (save_sharded, "dcp")])
def test_json_says_what_was_saved(save, kind, content, run_json, tmp_path):
    save(content, tmp_path / "ep2")
    code, told = run_json("inspect", tmp_path / "ep2")
    assert code == 0
    assert told.keys() == KEYS
    assert told["format"] == kind
    assert (told["schema"], told["world_size"], told["run_name"], told["rank_zero_seed"]) == (1, 8, "blue-fox", 17)
    assert told["algorithms"] == [{"name": "MixUp", "repr": "MixUp(alpha=0.2)"}]
    assert told["optimizers"] == [{"name": "AdamW", "groups": 1, "params": 1}]
    assert (told["timestamp"]["epoch"], told["timestamp"]["batch"]) == (2, 20)
    tensors = {tensor["name"].replace("/", "."): tensor for tensor in told["tensors"]}
    assert tensors["state.model.half"]["dtype"] == "bfloat16"
    assert tensors["state.model.layer.weight"] | {"alias_of": None} == {
        "name": tensors["state.model.layer.weight"]["name"],
        "shape": [4, 3],
        "dtype": "float32",
        "bytes": 48,
        "alias_of": None,
    }


def test_a_tied_weight_is_counted_once(content, run_json, tmp_path):
    save_file(content["state"]["model"], tmp_path / "weights.pt")
    _, told = run_json("inspect", tmp_path / "weights.pt")
    assert {tensor["name"]: tensor["alias_of"] for tensor in told["tensors"]}["tied.weight"] == "layer.weight"
    assert told["totals"]["params"] == 12 + 5 + 1
    assert told["totals"]["bytes"] == 48 + 10 + 8
    assert told["totals"]["by_dtype"] == {"float32": 48, "bfloat16": 10, "int64": 8}


def test_text_is_a_tree_with_sizes_and_facts(content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    code, out, _ = run("inspect", tmp_path / "ep2.pt")
    assert code == 0
    for words in ("epoch 2, batch 20", "MixUp(alpha=0.2)", "world size: 8", "├── ", "[4, 3]", "tied", "1 parameters"):
        assert words in out


def test_the_parameters_of_an_optimizer_are_those_that_it_trains(run_json, tmp_path):
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)  # which keeps nothing about them
    save_file({"state": {"model": {}, "optimizers": {"SGD": optimizer.state_dict()}}}, tmp_path / "ep1.pt")
    _, told = run_json("inspect", tmp_path / "ep1.pt")
    assert told["optimizers"] == [{"name": "SGD", "groups": 1, "params": 2}]


def test_the_text_counts_numbers_of_all_tensors_not_only_parameters(content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    _, out, _ = run("inspect", tmp_path / "ep2.pt")
    assert "8 tensors, 43 numbers" in out  # 12 + 5 + 1 of the model, 12 + 1 of the optimizer, 12 of generators


def test_stats_are_those_of_the_elements(run, run_json, tmp_path):
    save_file({"w": torch.tensor([1.0, 5.0, float("nan"), float("inf")])}, tmp_path / "w.pt")
    _, told = run_json("inspect", tmp_path / "w.pt", "--stats")
    assert told["tensors"][0]["stats"] == {"min": 1.0, "max": 5.0, "mean": 3.0, "nan": 1, "inf": 1}
    name = told["tensors"][0]["name"]
    assert f"\n{name}: min 1, max 5, mean 3, 1 NaN, 1 infinite\n" in run("inspect", tmp_path / "w.pt", "--stats")[1]


def test_a_pattern_that_fits_nothing_is_told_with_the_option_that_it_was_given_by(run, tmp_path):
    save_file({"state": {"model": {"w": torch.ones(2)}}}, tmp_path / "w.pt")
    code, _, told = run("inspect", tmp_path / "w.pt", "--keys", "zzz")
    assert code == 2
    assert "--keys 'zzz' fits none" in told


class Evil:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def test_a_file_that_asks_for_code_is_shown_and_not_run(run_json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": {"model": {"w": torch.ones(2)}, "more": Evil()}}, "evil.pt")
    code, told = run_json("inspect", "evil.pt")
    assert code == 4
    assert told["unsafe"] == [f"{os.mkdir.__module__}.mkdir"]
    assert [tensor["name"] for tensor in told["tensors"]] == ["state/model/w"]
    assert run_json("convert", "evil.pt", "out.pt")[0] == 4
    assert run_json("verify", "evil.pt")[0] == 4
    assert os.listdir() == ["evil.pt"]


@pytest.mark.parametrize(
    ("arguments", "code"), [(["inspect"], 2), (["inspect", "nowhere.pt"], 2), (["convert", "a.pt"], 2), (["no"], 2)]
)
def test_wrong_arguments_and_missing_files_have_their_codes(arguments, code, run):
    found, _, errors = run(*arguments)
    assert found == code
    assert "composer-ckpt" in errors


def test_help_loads_neither_torch_nor_transformers():
    code = (
        "import sys, contextlib\nfrom composer_ckpt.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['convert', '--help'])\n"
        "assert not {'torch', 'transformers', 'numpy', 'tqdm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_inspecting_does_not_load_transformers(content, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    code = (
        "import sys\nfrom composer_ckpt.cli import main\nmain(['inspect', sys.argv[1]])\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "ep2.pt"], check=True, timeout=120, stdout=subprocess.DEVNULL
    )


def test_a_reader_that_has_seen_enough_is_no_fault(tmp_path):
    save_file({f"w{number}": torch.ones(1) for number in range(5000)}, tmp_path / "many.pt")
    command = f"'{sys.executable}' -m composer_ckpt inspect --tree '{tmp_path}/many.pt' | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/many.pt: pt")


def test_different_names_look_different(run, tmp_path):
    one = torch.ones(1)
    save_file({"a": {"b": one.clone(), "c": one.clone()}, "a.b": one.clone(), "a.c": one.clone()}, tmp_path / "x.pt")
    _, out, _ = run("inspect", tmp_path / "x.pt")
    lines = [line.split("  ")[0] for line in out.splitlines()]
    assert lines[lines.index("a/") :][:6] == ["a/", "├── b", "└── c", "a", "├── b", "└── c"]
    save_file({"a": {"b": one.clone()}, "a.b": one.clone()}, tmp_path / "y.pt")
    _, out, _ = run("inspect", tmp_path / "y.pt")
    assert {"a/b", "a.b"} <= {line.split("  ")[0] for line in out.splitlines()}
