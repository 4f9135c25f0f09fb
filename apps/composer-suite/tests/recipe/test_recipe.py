"""A recipe trains as the same arguments in Python do, and what is wrong in one is named with file and line."""

import inspect
import json
import os
import random
import subprocess
import sys
import typing
import warnings
from enum import Enum
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from composer import Evaluator, Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import LRMonitor
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from composer.recipe import RecipeError, _components, load_recipe
from composer.recipe.__main__ import main
from composer.recipe._read import read
from composer.recipe.data import dataloader
from composer_dist import reproducibility

RECIPE = """\
variables:
  smoothing: 0.1
  rate: 1e-2
global_train_batch_size: 8
model:
  _target_: composer.models.ComposerClassifier
  module: {_target_: torch.nn.Linear, in_features: 4, out_features: 3}
  loss_fn: {_target_: torch.nn.CrossEntropyLoss, label_smoothing: "${variables.smoothing}"}
  num_classes: 3
optimizer:
  name: decoupled_adamw
  lr: ${variables.rate}
  betas: [0.9, 0.95]
scheduler: {name: cosine_with_warmup, t_warmup: 2ba, alpha_f: 0.1}
algorithms:
  gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}
callbacks:
  lr_monitor:
loggers:
  in_memory: {}
train_loader:
  name: dataloader
  shuffle: true
  dataset: &data {_target_: rows_of_recipes.Rows, count: 24}
eval_loader:
  label: held_out
  eval_interval: 2ba
  name: dataloader
  batch_size: 8
  dataset: {<<: *data, count: 16}
max_duration: 5ba
seed: 17
device: cpu
progress_bar: false
"""

ROWS = """\
import torch
from torch.utils.data import TensorDataset

class Rows(TensorDataset):
    def __init__(self, count: int, num_classes: int = 3):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(count, 4, generator=generator)
        super().__init__(inputs, torch.randint(num_classes, (count,), generator=generator))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "rows_of_recipes.py").write_text(ROWS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("rows_of_recipes", None)


def load(*overrides, text=None):
    if text is not None:
        Path("recipe.yaml").write_text(text)
    return load_recipe("recipe.yaml", overrides, allow=["rows_of_recipes"])


def train_by_hand():
    from rows_of_recipes import Rows

    reproducibility.seed_all(17)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    model = ComposerClassifier(torch.nn.Linear(4, 3), loss_fn=loss, num_classes=3)
    held_out = Evaluator(label="held_out", dataloader=DataLoader(Rows(16), batch_size=8), eval_interval="2ba")
    logged = InMemoryLogger()
    with Trainer(
        model,
        train_dataloader=dataloader(Rows(24), 8, shuffle=True, seed=17),
        eval_dataloader=held_out,
        optimizers=DecoupledAdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95)),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="2ba", alpha_f=0.1),
        algorithms=GradientClipping(clipping_type="norm", clipping_threshold=1.0),
        callbacks=LRMonitor(),
        loggers=logged,
        max_duration="5ba",
        seed=17,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return model.state_dict(), logged.data


@pytest.mark.parametrize("seed", ["seed: 17\n", ""])
def test_a_recipe_trains_as_the_same_arguments_do(folder, seed):
    with load(text=RECIPE.replace("seed: 17\n", seed)).build() as trainer:
        trainer.fit()
    (logged,) = [each for each in trainer.logger.destinations if isinstance(each, InMemoryLogger)]
    weights, data = train_by_hand()
    assert all(torch.equal(value, weights[name]) for name, value in trainer.state.model.state_dict().items())
    times = {name for name in data if name.startswith("time/")}
    assert {name: [value for _, value in logged.data[name]] for name in data.keys() - times} == {
        name: [value for _, value in data[name]] for name in data.keys() - times
    }


def test_the_resolved_recipe_describes_the_same_run(folder):
    plan = load("lr=3e-4", "callbacks.lr_monitor={}", "train_loader.dataset.count=16")
    Path("again.yaml").write_text(plan.text)
    again = load_recipe("again.yaml", allow=["rows_of_recipes"])
    assert again.text == plan.text
    assert again.values["optimizer"]["lr"] == 3e-4  # the end of the only key that ends with it
    assert again.values["train_loader"]["dataset"]["count"] == 16
    assert again.values["eval_loader"]["dataset"]["count"] == 16


@pytest.mark.parametrize("name", ["1e5", "yes", "1:30", "017", "2020-01-01", "a\\${seed}", "null", "#a: b", "\n", "é"])
def test_text_and_variables_are_the_same_in_the_resolved_recipe(folder, name):
    text = RECIPE.replace("variables:", "base_lr: 0.1\nvariables:").replace("${variables.rate}", "${base_lr}")
    plan = load(f"run_name={json.dumps(name)}", text=text)
    again = load(text=plan.text)
    assert again.values["run_name"] == plan.values["run_name"]
    assert again.values["optimizer"]["lr"] == 0.1
    assert again.text == plan.text


def test_a_list_of_callbacks_may_give_their_names_as_other_sections_do(folder):
    text = RECIPE.replace("  lr_monitor:", "  - name: lr_monitor\n  - {name: speed_monitor, window_size: 3}")
    with load(text=text).build() as trainer:
        assert {"LRMonitor", "SpeedMonitor"} <= {type(each).__name__ for each in trainer.state.callbacks}


def test_an_override_may_use_another_name_of_an_entry(folder):
    assert load("optimizers.lr=0.5").values["optimizer"]["lr"] == 0.5


def test_the_launcher_runs_a_recipe_and_keeps_it_in_the_run_folder(folder):
    command = [sys.executable, "-m", "composer_dist.launch", "-n", "2", "--runs", "kept", "recipe.yaml"]
    command += ["--allow", "rows_of_recipes", "max_duration=2ba"]
    subprocess.run(command, check=True, timeout=120)
    (kept,) = Path("kept").glob("*/recipe.yaml")
    assert yaml.safe_load(kept.read_text()) == load("max_duration=2ba").values


def test_a_recipe_trains_if_the_folder_of_its_run_cannot_be_written(folder, monkeypatch):
    Path("file").touch()
    monkeypatch.setenv("COMPOSER_RUNS", "file/below")
    with pytest.warns(RuntimeWarning, match="cannot be written, so this run leaves no record"):
        assert main(["recipe.yaml", "--allow", "rows_of_recipes", "max_duration=2ba", "save_folder=saved"]) == 0
    assert list(Path("saved").glob("*ba2*"))


@pytest.mark.parametrize("seed", ["", "seed: 5\n", "seed: null\n"])
def test_the_recipe_in_a_run_folder_has_the_seed_of_the_run(folder, seed):
    plan = load(text=RECIPE.replace("seed: 17\n", seed))
    assert yaml.safe_load(plan.text)["seed"] == {"": 17, "seed: 5\n": 5}.get(seed)
    with plan.build() as trainer:
        assert (trainer.state.rank_zero_seed in (5, 17)) == (seed != "seed: null\n")


def test_included_files_are_merged_in_order_and_the_file_itself_comes_last(folder):
    Path("base.yaml").write_text(RECIPE)
    Path("more.yml").write_text("optimizer: {lr: 0.5}\nseed: 3\n")
    plan = load(text="include: [base.yaml, more.yml]\nseed: 4\n")
    assert plan.values["optimizer"] == {"name": "decoupled_adamw", "lr": 0.5, "betas": [0.9, 0.95]}
    assert plan.values["seed"] == 4
    Path("more.yml").write_text("optimizer: {lr: fast}\n")
    with pytest.raises(RecipeError, match=r"more\.yml:1: optimizer\.lr: 'fast' does not fit"):
        load()


INVALID = {
    "misspelled argument": ("max_duration:", "max_duratoin:", r"recipe\.yaml:LINE: .*'max_duration'\?"),
    "misspelled name": ("decoupled_adamw", "decoupled_adam", r"recipe\.yaml:LINE: .*'decoupled_adamw'\?"),
    "misspelled setting": ("alpha_f", "alphaf", r"recipe\.yaml:LINE: .*'alpha_f'\?"),
    "wrong type": ("lr: ${variables.rate}", "lr: fast", r"recipe\.yaml:LINE: optimizer\.lr: 'fast' does not fit"),
    "wrong type in a component": ("count: 24", "in: 24", r"recipe\.yaml:LINE: .*'in' is not an argument"),
    "unknown unit": ("max_duration: 5ba", "max_duration: 5weeks", r"recipe\.yaml:LINE: .*'5weeks'"),
    "unknown unit of a setting": ("t_warmup: 2ba", "t_warmup: 2bananas", r"recipe\.yaml:LINE: .*2bananas"),
    "a list for a mapping": (RECIPE, "- model\n- optimizer\n", r"recipe\.yaml:1: must be a mapping"),
    "a number for a component": ("lr_monitor:", "lr_monitor: 3", r"recipe\.yaml:LINE: .*3 must be a mapping"),
    "given twice": ("seed: 17", "seed: 17\nseed: 18", r"recipe\.yaml:NEXT: 'seed' is given twice"),
    "two names for one": ("seed: 17", "optimizers: sgd", r"another name of 'optimizers'"),
    "reference to nothing": ("${variables.rate}", "${variables.rat}", r"recipe\.yaml:LINE: .*rat' not found"),
    "loop of references": ("rate: 1e-2", "rate: ${optimizer.lr}", r"recipe\.yaml:\d+: .*[Rr]ecursive"),
    "environment variable": ("rate: 1e-2", "rate: ${oc.env:HOME}", r"recipe\.yaml:LINE: .*is not a reference"),
    "nested environment variable": ("1e-2", "${oc.env:${seed}}", r"recipe\.yaml:LINE: .*is not a reference"),
    "named environment variable": ("1e-2", "${${seed}:HOME}", r"recipe\.yaml:LINE: .*is not a reference"),
    "object tag": ("seed: 17", "seed: !!python/object/apply:os.getcwd []", r"recipe\.yaml:LINE: .*tag"),
    "tuple tag": ("[0.9, 0.95]", "!!python/tuple [0.9, 0.95]", r"recipe\.yaml:LINE: .*(tag|fit)"),
    "tab": ("  lr_monitor:", "\tlr_monitor:", r"recipe\.yaml:LINE: found character '\\t' .* Indent with spaces\."),
    "no colon": ("seed: 17", "seed 17", r"recipe\.yaml:LINE: could not find expected ':'"),
    "quote without an end": ("seed: 17", "run_name: 'x", r"recipe\.yaml:LINE: found unexpected end of stream"),
    "fraction of a batch": ("max_duration: 5ba", "max_duration: 1.5ba", r"recipe\.yaml:LINE: .*whole number"),
    "words for a time": ("max_duration: 5ba", "max_duration: 10 epochs", r"recipe\.yaml:LINE: .*'10 epochs'"),
    "a number for a time": ("t_warmup: 2ba", "t_warmup: 1.5", r"recipe\.yaml:LINE: .*a time with a unit"),
    "text that is not UTF-8": ("17", "\udcff", r"recipe\.yaml:LINE: is not text in UTF-8"),
    "control character": ("seed: 17", "seed: \x07", r"recipe\.yaml: unacceptable character"),
    "itself": ("betas: [0.9, 0.95]", "betas: &a [*a]", r"recipe\.yaml:LINE: the value contains itself"),
    "not in an allowed package": ("rows_of_recipes.Rows", "os.getcwd", r"recipe\.yaml:LINE: .*--allow os"),
    "imported by an allowed module": ("torch.nn.Linear,", "torch.nn.modules.linear.math.sqrt,", r"cannot be imported"),
    "a function of a library": ("torch.nn.Linear,", "torch.utils.data.default_collate,", r"LINE: .*must be a module"),
    "a dataset of transformers": (
        "torch.nn.Linear,",
        "transformers.pipelines.pt_utils.KeyDataset,",
        "--allow tr|No module",
    ),
    "a class of another kind": ("torch.nn.Linear,", "torch.utils.data.Path,", r"LINE: .*cannot be imported"),
    "a program": ("lr_monitor:", "mlperf: {root_folder: x, index: 0, cache_clear_cmd: ls}", r"LINE: .*runs code"),
    "a boolean for a number": ("lr: ${variables.rate}", "lr: true", r"LINE: .*True does not fit"),
    "text for a number": ("seed: 17", "seed: '17'", r"LINE: .*'17' does not fit"),
    "a time for a number": ("lr: ${variables.rate}", "lr: 1:30", r"LINE: .*'1:30' does not fit"),
    "text for settings of FSDP": ("seed: 17", "fsdp_config: abc", r"LINE: fsdp_config: 'abc' must be a mapping"),
    "a list for settings": ("seed: 17", "tokenizer: {name: x, kwargs: [a]}", r"LINE: tokenizer: .*must be the name"),
    "private": ("rows_of_recipes.Rows", "rows_of_recipes._Rows", r"recipe\.yaml:LINE: .*--allow"),
    "no such class": ("torch.nn.Linear,", "torch.nn.Lineal,", r"recipe\.yaml:LINE: .*cannot be imported"),
    "no model": ("model:", "variables2:", r"is no argument|needs a model"),
    "no value for the model": (RECIPE, "model:\n", r"recipe\.yaml:1: model: a recipe needs a model"),
    "a number for a file": ("seed: 17", "include: 5", r"recipe\.yaml:LINE: include: must be a path .*5"),
    "a boolean for a file": ("seed: 17", "include: true", r"recipe\.yaml:LINE: include: must be a path .*True"),
    "a mapping for files": ("seed: 17", "include: {a: b}", r"recipe\.yaml:LINE: include: must be a path .*'b'"),
    "another spelling": ("  lr_monitor:", "  lr_monitor:\n  LRMonitor:", r"NEXT: .*another spelling of 'lr_monitor'"),
    "needed argument": ("lr_monitor:", "early_stopper:", r"recipe\.yaml:LINE: .*needs the argument 'monitor'"),
    "code of a model": (
        "seed: 17",
        "tokenizer: {name: x, kwargs: {trust_remote_code: true}}",
        r":LINE: .*--trust-remote",
    ),
    "code in settings": (
        "in_features: 4,",
        "in_features: {trust_remote_code: true},",
        r":LINE: .*trust_remote_code: runs code .*--trust-remote-code",
    ),
    "batch size": (
        "global_train_batch_size: 8",
        "global_train_batch_size: 0",
        r"recipe\.yaml:LINE: .*whole number from 1",
    ),
    "precision": ("seed: 17", "precision: amp_bf61", r"recipe\.yaml:LINE: precision: .*amp_bf61"),
    "not a number": ("lr: ${variables.rate}", "lr: .nan", r"recipe\.yaml:LINE: optimizer\.lr: nan does not fit"),
    "missing value": ("seed: 17", "seed: ???", r"recipe\.yaml:LINE: .*[Mm]issing mandatory value"),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_is_wrong_is_named_with_file_and_line_before_anything_is_built(folder, case):
    old, new, message = INVALID[case]
    assert RECIPE.count(old)
    text = RECIPE.replace(old, new, 1)
    Path("recipe.yaml").write_bytes(text.encode(errors="surrogateescape"))
    line = RECIPE[: RECIPE.index(old)].count("\n") + 1
    with pytest.raises(RecipeError, match=message.replace("LINE", str(line)).replace("NEXT", str(line + 1))):
        load()


def types_of(parameter):
    return parameter.annotation, *typing.get_args(parameter.annotation)


def is_closed_set(kind):
    return typing.get_origin(kind) is typing.Literal or (inspect.isclass(kind) and issubclass(kind, Enum))


PARAMETERS = _components.signature(Trainer)
CLOSED_SETS = [name for name, each in PARAMETERS.items() if any(map(is_closed_set, types_of(each)))]
NUMBERS = [name for name, each in PARAMETERS.items() if {int, float} & set(types_of(each))]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "nonsense") for name in CLOSED_SETS),
        *((name, value) for name in NUMBERS for value in (".nan", "-.inf")),
    ],
)
def test_arguments_of_the_trainer_that_are_no_member_or_not_finite(folder, name, value):
    with pytest.raises(RecipeError, match=rf"the command line: {name}: .*{value.strip('-.')}"):
        load(f"{name}={value}")


def test_older_names_of_members_and_other_spellings_are_accepted_without_a_warning(folder):
    assert load("precision=AMP_BF16").values["precision"] == "AMP_BF16"
    assert load("precision=bf16").values["precision"] == "bf16"
    assert {"precision", "ddp_sync_strategy", "save_async_policy"} <= set(CLOSED_SETS)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr", "must be KEY=VALUE"),
        ("name=1", r"'name' may be .* or .*Give one of them"),
        ("optimizer.lr.x=1", r"optimizer\.lr is a .*without members"),
        ("optimizer.betas.2=1", r"optimizer\.betas has no item 2"),
        ("lr=[", "expected the node content"),
        ("optimizr.lr=1", r"optimizr: .*Did you mean 'optimizer"),
        ("lr=!!python/name:os.system", "tag"),
    ],
)
def test_overrides_that_do_not_fit(folder, override, message):
    with pytest.raises(RecipeError, match=f"the command line.*{message}"):
        load(override)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_name_of_the_trainer_is_not_taken_for_that_of_a_component(tmp_path, name):
    path = tmp_path / "nested.yaml"
    path.write_text(yaml.safe_dump({"variables": {"component": {name: 1}}}))
    values = read(path, [f"{name}=2"], PARAMETERS).values
    assert values.pop("variables") == {"component": {name: 1}}
    assert list(values.values()) == [2]


SIZES = ["global_train_batch_size", "device_eval_batch_size", "max_seq_len"]


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_no_dataloader_takes_is_refused_on_the_command_line_and_told_in_a_file(folder, name):
    text = RECIPE.replace("global_train_batch_size: 8\n", "").replace("shuffle: true", "batch_size: 4")
    with pytest.raises(RecipeError, match=f"the command line: {name}: has no effect"):
        load(f"{name}=16", text=text)
    with pytest.warns(UserWarning, match=rf"recipe\.yaml:1: {name}: has no effect"):
        load(text=f"{name}: 16\n{text}")
    with warnings.catch_warnings(action="error"):
        load(f"optimizer.lr=${{{name}}}", text=f"{name}: 16\n{text}")  # a variable


def test_members_of_a_list_may_be_named_mappings(folder):
    with load(
        text=RECIPE.replace("  lr_monitor:", "  - lr_monitor:\n  - speed_monitor: {window_size: 3}")
    ).build() as trainer:
        assert {"LRMonitor", "SpeedMonitor"} <= {type(each).__name__ for each in trainer.state.callbacks}


def test_a_huge_file_and_one_that_grows_are_refused_at_once(folder):
    with open("recipe.yaml", "wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(RecipeError, match="larger than 1,000,000 bytes"):
        load()
    growing = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    growing += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    with pytest.raises(RecipeError, match=r"recipe\.yaml:\d+: more than 100,000 values"):
        load(text=growing)


NASTY = (
    *("!!python/object/apply:os.system [echo]", "!!python/name:os.system", "*data", "&data", "<<: *data", "? ", "- "),
    *("${variables}", "${..x}", "${oc.env:HOME}", "${${a}}", "${", "_target_: os.system", "_target_: subprocess.Popen"),
    *(
        "{_target_: ctypes.CDLL, name: x}",
        "null",
        "~",
        "[]",
        "{}",
        "[[[[",
        "{{{{",
        "\t",
        "\0",
        "\ufeff",
        "'",
        '"',
        ": ",
    ),
    *("1e400", ".nan", "0x1F", "1_0", "yes", "2020-01-01", "|", ">", "%YAML 1.1", "---", "...", "!", "!!binary aGk="),
    *("include: recipe.yaml", "include: ../../x.yaml", "name: torch.optim.SGD", "trust_remote_code: true", "9" * 5000),
)


def mutate(text, draw):
    lines = text.splitlines()
    for _ in range(draw.randint(1, 4)):
        at, nasty = draw.randrange(len(lines)), draw.choice(NASTY)
        line = lines[at]
        cut = draw.randrange(len(line) + 1)
        lines[at] = draw.choice(
            [
                line[:cut] + nasty + line[cut:],
                line[: len(line) - len(line.lstrip())] + nasty,
                line.partition(":")[0] + ": " + nasty,
                line[:cut] + chr(draw.randrange(1, 0x2100)) + line[cut + 1 :],
                line[:cut],
                " " * draw.randrange(4) + line,
                line + "\n" + draw.choice(lines),
            ]
        )
    return "\n".join(lines)


@pytest.mark.filterwarnings("ignore:.*has no effect:UserWarning")
def test_damaged_recipes_end_with_an_error_or_a_plan_and_import_nothing_else(folder, monkeypatch):
    imported = set()

    def spy(name):
        imported.add(name)
        return import_module(name)

    monkeypatch.setattr(_components, "import_module", spy)
    draw = random.Random(17)
    num_valid, num_recipes = 0, int(os.environ.get("COMPOSER_TEST_FUZZED_RECIPES", "2000"))
    for _ in range(num_recipes):
        text = mutate(RECIPE, draw)
        Path("recipe.yaml").write_text(text, encoding="utf-8")
        try:
            load_recipe("recipe.yaml", allow=["rows_of_recipes"])
            num_valid += 1
        except RecipeError:
            pass
    assert 0.01 < num_valid / num_recipes < 0.9
    allowed = (*_components.ALLOWED, "composer", "builtins", "rows_of_recipes")
    assert not [name for name in imported if not name.startswith(allowed)]


def test_errors_of_constructors_and_of_the_trainer_say_where(folder):
    plan = load("algorithms.gradient_clipping.clipping_type=nrom")
    with pytest.raises(ValueError, match="nrom") as caught:
        plan.build()
    assert any("recipe.yaml:16: in algorithms.gradient_clipping" in note for note in caught.value.__notes__)


def test_a_batch_that_the_ranks_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr("composer_dist.dist.get_world_size", lambda: 3)
    with pytest.raises(ValueError, match="batch_size=8 must be a multiple of the number of ranks, 3"):
        dataloader(TensorDataset(torch.zeros(8)), 8)
