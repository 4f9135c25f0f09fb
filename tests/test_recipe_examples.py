"""The recipes among the examples train, and a sweep over one compares its runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import transformers
import yaml
from streaming import MDSWriter
from tokenizers import Tokenizer, models

from composer.report.runs import read_run

EXAMPLES = Path(__file__).parent.parent / "examples"
DATA = ["--allow", "recipe_data"]


def composer(*arguments, cwd):
    command = [sys.executable, "-m", "composer_dist.launch", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, check=True, timeout=240, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("digits.yaml", ["max_duration=2ep"]),
        ("glyphs.yaml", ["max_duration=3ba"]),
        ("stdlib.yaml", ["max_duration=3ba", "eval_subset_num_batches=1"]),
    ],
)
def test_recipes_on_data_that_ships_inside_packages(tmp_path, name, changes):
    composer("-n", 2, "--runs", "runs", EXAMPLES / name, *DATA, *changes, cwd=tmp_path)
    (run,) = (read_run(path.parent) for path in tmp_path.glob("runs/*/recipe.yaml"))
    assert run.status["status"] == "finished"


def test_the_page_about_recipes_shows_the_example():
    page = (EXAMPLES.parent / "docs/guides/recipe-files.md").read_text()
    assert (EXAMPLES / "digits.yaml").read_text().partition("\n")[2] in page


def test_fine_tuning_with_an_adapter(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=0
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(32)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(tmp_path / "base")
    with MDSWriter(out=str(tmp_path / "shards"), columns={"tokens": "ndarray:int32:10"}) as writer:
        for _ in range(16):
            writer.write({"tokens": np.arange(10, dtype=np.int32)})
    changes = ["variables.base=base", "variables.shards=shards", "run_name=lora", "device=cpu"]
    composer(EXAMPLES / "lora.yaml", *changes, cwd=tmp_path)
    (adapter,) = tmp_path.glob("runs/lora/huggingface/*/adapter_config.json")
    assert json.loads(adapter.read_text())["r"] == 8


def test_a_sweep_trains_each_combination_and_compares_the_runs(tmp_path):
    sweep = ["sweep", "-n", 1, EXAMPLES / "digits.yaml", *DATA, "max_duration=3ba", "eval_interval=0"]
    output = composer("sweep", "--dry-run", *sweep[1:], "optimizers.lr=1e-3,4e-3", "seed=1..3", cwd=tmp_path)
    assert len(output.splitlines()) == 6
    assert output.splitlines()[0].endswith("optimizers.lr=1e-3 seed=1 run_name=optimizers.lr=1e-3-seed=1")
    assert not list(tmp_path.iterdir())

    output = composer("sweep", "--dry-run", *sweep[1:], "save_folder=x/y,x_y,x_y", "seed=2..1", cwd=tmp_path)
    names = [line.rpartition("run_name=")[2] for line in output.splitlines()]
    assert len(names) == len(set(names)) == 4

    composer(*sweep, "optimizers.lr=1e-3,4e-3", cwd=tmp_path)
    runs = {path.parent.name for path in tmp_path.glob("runs/digits-sweep/*/recipe.yaml")}
    assert runs == {"optimizers.lr=1e-3", "optimizers.lr=4e-3"}
    page = (tmp_path / "runs/digits-sweep/report.html").read_text()
    assert all(run in page for run in runs)


def as_editors_read(path):
    """Return the values of a file as in YAML 1.2, where 4e-3 is a number."""
    return yaml.safe_load(re.sub(r"\b(\d+)e-(\d+)\b", r"\1.0e-\2", path.read_text()))


def test_the_schema_is_valid_and_finds_what_is_wrong(tmp_path):
    schema = json.loads(composer("schema", cwd=tmp_path))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in EXAMPLES.glob("*.yaml"):
        assert not list(validator.iter_errors(as_editors_read(path))), path
    values = as_editors_read(EXAMPLES / "digits.yaml")
    for change in (
        {"optimizers": {"name": "decoupled_adamw", "lrr": 1}},
        {"max_duration": [1]},
        {"device": [3]},
        *({"algorithms": {name: {"alpha": "x"}}} for name in ("mixup", "mix_up", "MixUp")),
        {"algorithms": {"mixupp": {}}},
        {"callbacks": {"lr_monitorr": None}},
    ):
        (error,) = validator.iter_errors({**values, **change})
        assert next(iter(error.absolute_path)) == next(iter(change))
    for change in (
        {"algorithms": {"my_package.Method": {"a": 1}}},
        {"callbacks": [{"name": "lr_monitor"}, "lr_monitor"]},
    ):
        assert not list(validator.iter_errors({**values, **change}))
