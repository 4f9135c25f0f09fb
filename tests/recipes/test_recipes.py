"""The recipes in examples/: their data, their presets, the rules of their comparisons, and the tables."""

import contextlib
import importlib
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from torchvision.datasets import VisionDataset
from transformers import PreTrainedTokenizerFast

from composer import Callback, Trainer
from composer.algorithms import WhiteningInit
from composer.cli.race import Entry, evaluate, main
from composer.models import HuggingFaceModel

MODULES = [
    "ablations",
    "arms",
    "comparison",
    "cpu_clock",
    "glyph_data",
    "glyphs",
    "presets",
    "records",
    "stdlib",
    "stdlib_data",
    "tables",
]


@pytest.fixture(scope="module")
def recipe(root):
    """Import a module of the recipes, which import each other by their plain names."""
    folder = str(root / "examples/recipes")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def comparison(recipe):
    """Two arms and a shorter form of each, whose "training" is a line that depends on arm, learning rate and seed."""
    arms = recipe("arms")
    pace = {"plain": 2.0, "quick": 1.0, "plain, short": 1.0, "quick, short": 0.5}

    def train(arm, lr, seed):
        top = (0.8 if "plain" in arm.name else 0.9) - abs(lr - 0.2) + seed % 10 / 1000
        return [(pace[arm.name] * 10 * step, top * step / 2) for step in (1, 2)]

    task = arms.Task(
        name="small",
        setup="batches of 8",
        train=train,
        target=0.8,
        quality="accuracy",
        percent=True,
        is_better_higher=True,
    )
    return arms.Comparison(
        name="small",
        task=task,
        arms=(
            arms.Arm(name="plain", duration="2ep"),
            arms.Arm(name="quick", duration="2ep"),
            arms.Arm(name="plain, short", duration="1ep", like="plain"),
            arms.Arm(name="quick, short", duration="1ep", like="quick"),
        ),
        baseline="plain",
        composed="quick",
        learning_rates=(0.1, 0.2),
    )


@pytest.fixture
def run_all(recipe):
    """Run what is missing, as the command does."""

    def run(comparison, records, num_seeds, names=None):
        done = []
        for arm, lr, seed in recipe("comparison").missing_runs(comparison, records, num_seeds, names):
            records.add(arm, lr, seed, comparison.task.train(arm, lr, seed))
            done.append((arm.name, lr, seed))
        return done

    return run


def test_no_font_is_both_trained_and_tested_on_and_neither_is_its_family(recipe):
    data = recipe("glyph_data")
    families = [{font[:2].lower() for font in fonts} for fonts in (data.TRAIN_FONTS, data.TEST_FONTS)]
    assert (len(data.TRAIN_FONTS), len(data.TEST_FONTS)) == (16, 6)
    assert families == [{"de", "st"}, {"cm"}]
    assert all((data.font_folder() / font).exists() for font in data.TRAIN_FONTS + data.TEST_FONTS)


def test_glyphs_are_the_same_images_every_time(recipe):
    data = recipe("glyph_data")
    fonts, sizes = data.TEST_FONTS[:1], data.TEST_SIZES
    images, labels = data.draw_fonts(fonts, sizes, 3)
    again, _ = data.draw_fonts.__wrapped__(fonts, sizes, 3)
    elsewhere, _ = data.draw_fonts(fonts, sizes, 4)
    assert torch.equal(images, again)
    assert not torch.equal(images, elsewhere)
    assert images.shape == (2 * 62, 1, 32, 32)
    assert torch.equal(torch.bincount(labels), torch.tensor([4] * 26 + [2] * 10))


def test_every_glyph_has_ink_and_no_two_characters_are_alike(recipe):
    data = recipe("glyph_data")
    images, _ = data.draw_fonts(("DejaVuSans-Bold.ttf",), (24,), 0)
    ink = (images.flatten(1) - images.min()).sum(dim=1)
    assert ink.min() > 0
    assert len({image.numpy().tobytes() for image in images}) == 62


def test_a_missing_matplotlib_is_named(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        recipe("glyph_data").font_folder()


def test_no_module_of_the_standard_library_is_both_trained_on_and_held_out(recipe):
    data = recipe("stdlib_data")
    train, held_out = data.load_stdlib()
    text = train.windows.numpy().tobytes()
    for number, paths in enumerate(data.find_modules().values()):
        source = max((path.read_bytes() for path in paths), key=len)
        if source.isascii() and len(source) > 1000:
            middle = source[len(source) // 2 :][:400]
            assert (middle in text) is (number % 10 != 9)
    assert len(held_out) == data.NUM_HELD_OUT
    assert int(train.windows.max()) < data.VOCABULARY


class Shapes(Callback):
    """Note what each batch looks like when the algorithms are done with it."""

    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        inputs = state.batch["input_ids"] if isinstance(state.batch, dict) else state.batch[0]
        self.seen.append(tuple(inputs.shape))


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("baseline", [32] * 10),
        ("control: 24x24 throughout", [24] * 10),
        # Half of the sides for 0.4 of the training, whole ones for 0.2, in between a straight line.
        ("all three", [16] * 5 + [20, 24, 28, 32, 32]),
    ],
)
def test_arms_of_the_glyphs_train_on_images_of_their_sizes(recipe, name, sides):
    glyphs, clock = recipe("glyphs"), recipe("cpu_clock").CpuClock(lambda state: 0.5)
    arm, shapes = replace(glyphs.GLYPHS.arm(name), duration="10ba"), Shapes()
    with glyphs.make_trainer(arm, 0.1, 0, clock) as trainer:
        trainer.state.callbacks.append(shapes)
        trainer.state.evaluators = []  # an evaluation takes longer than all ten batches
        trainer.fit()
    layers = {type(layer).__name__ for layer in trainer.state.model.modules()}
    assert trainer.state.loss.isfinite()
    assert [shape[-1] for shape in shapes.seen] == sides
    assert ("BlurConv2d" in layers) == (name == "all three")


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("baseline", [256] * 10),
        ("control: ALiBi, windows of 64", [64] * 10),
        ("both", [64, 128, 192] + [256] * 7),  # whole windows after 0.3 of the training
    ],
)
def test_arms_of_the_stdlib_train_on_windows_of_their_lengths(recipe, name, lengths):
    stdlib, clock = recipe("stdlib"), recipe("cpu_clock").CpuClock(lambda state: 0.5)
    arm, shapes = replace(stdlib.STDLIB.arm(name), duration="10ba"), Shapes()
    with stdlib.make_trainer(arm, 4e-3, 0, clock) as trainer:
        trainer.state.callbacks.append(shapes)
        trainer.state.evaluators = []  # an evaluation takes longer than all ten batches
        trainer.fit()
    assert trainer.state.loss.isfinite()
    assert [shape[1] for shape in shapes.seen] == lengths
    assert bool(trainer.state.model.model.transformer.wpe.weight.any()) == (name == "baseline")


def test_the_same_seed_gives_the_same_training(recipe):
    glyphs, cpu_clock = recipe("glyphs"), recipe("cpu_clock")
    losses = []
    for seed in (0, 0, 1):
        arm = replace(glyphs.GLYPHS.arm("all three"), duration="10ba")
        with glyphs.make_trainer(arm, 0.1, seed, cpu_clock.CpuClock(lambda state: 0.5)) as trainer:
            trainer.state.evaluators = []
            trainer.fit()
        losses.append(trainer.state.loss.item())
    assert losses[0] == losses[1] != losses[2]


def test_the_clock_stands_still_during_evaluations(recipe):
    readings = iter([10.0, 12.0, 20.0, 23.0, 50.0])
    clock = recipe("cpu_clock").CpuClock(lambda state: state, clock=lambda: next(readings))
    clock.fit_start(0.1, None)
    for quality in (0.2, 0.3):
        clock.eval_before_all(quality, None)
        clock.eval_after_all(quality, None)
    assert clock.curve == [(2.0, 0.2), (5.0, 0.3)]


class Losses(Callback):
    """Note the loss of each batch."""

    def __init__(self):
        self.seen = []

    def batch_end(self, state, logger):
        self.seen.append(state.loss.item())


class FourImages(VisionDataset):
    """Four images as RandAugment takes them."""

    def __init__(self):
        super().__init__(root=".", transform=None)
        self.images = torch.randint(256, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        image = self.images[index]
        return (self.transform(image) if self.transform else image).float() / 255, index % 2


@pytest.mark.parametrize(("name", "number"), [("RESNET_MILD", 5), ("RESNET_MEDIUM", 7), ("RESNET_HOT", 10)])
def test_presets_of_resnet_train(recipe, name, number):
    preset = getattr(recipe("presets"), name)
    model = preset.make_model(num_classes=2)
    algorithms = preset.make_algorithms()
    with Trainer(
        model,
        train_dataloader=DataLoader(FourImages(), batch_size=4),
        max_duration="9ep",  # the warm-up takes eight
        algorithms=algorithms,
        optimizers=preset.make_optimizer(model),
        schedulers=preset.make_scheduler(),
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert len(algorithms) == number
    assert trainer.state.loss.isfinite()


def test_the_preset_of_bert_trains(recipe):
    preset = recipe("presets").MosaicBERT(max_sequence_length=16, vocabulary=100)
    bert = preset.make_model(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    words = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2} | {f"word{index}": index for index in range(3, 100)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )
    collate = preset.make_collator(tokenizer)
    torch.manual_seed(0)
    texts = [{"input_ids": list(range(start, start + 16))} for start in range(3, 67)]
    labels = collate(texts)["labels"]
    share = (labels != -100).double().mean().item()
    deviation = (preset.masking_rate * (1 - preset.masking_rate) / labels.numel()) ** 0.5
    assert share == pytest.approx(preset.masking_rate, abs=4 * deviation)
    model = HuggingFaceModel(bert, use_logits=True)
    with Trainer(
        model,
        train_dataloader=DataLoader(texts, batch_size=32, collate_fn=collate),
        max_duration="2ep",
        algorithms=preset.make_algorithms(),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        precision=preset.precision,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert bert.config.vocab_size == 128
    assert "BERTGatedFFOutput" in {type(layer).__name__ for layer in bert.modules()}


@pytest.mark.parametrize("name", ["ModdedNanoGPT", "Airbench94"])
def test_presets_of_speed_records_learn_their_samples(recipe, name):
    torch.manual_seed(0)
    if name == "ModdedNanoGPT":
        preset = recipe("presets").ModdedNanoGPT(vocabulary=64)
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        model = preset.make_model(hidden_size=16, intermediate_size=32, num_hidden_layers=2, **heads)
        samples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (8, 16))]
        algorithms = preset.make_algorithms()
    else:
        preset = recipe("presets").Airbench94(batch_size=8, widths=(8, 16, 16))
        model = preset.make_model(num_classes=2)
        assert not any(isinstance(each, WhiteningInit) for each in preset.make_algorithms())
        algorithms = preset.make_algorithms(torch.rand(8, 3, 32, 32))
        assert isinstance(algorithms[0], WhiteningInit)
        samples = list(zip(torch.rand(8, 3, 32, 32), [0, 1] * 4, strict=True))
    losses = Losses()
    with Trainer(
        model,
        train_dataloader=DataLoader(samples, batch_size=8),
        max_duration="20ba",
        algorithms=algorithms,
        optimizers=preset.make_optimizer(model),
        schedulers=preset.make_scheduler(),
        callbacks=losses,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert losses.seen[-1] < 0.85 * losses.seen[0]
    names = {id(param): name for name, param in trainer.state.model.named_parameters()}
    groups = trainer.state.optimizers[0].param_groups
    rates = {names[id(param)]: group["initial_lr"] for group in groups for param in group["params"]}
    if name == "ModdedNanoGPT":
        assert losses.seen[0] == pytest.approx(math.log(64), abs=0.1)  # the blocks are the identity
        layer = "model.model.layers.1"
        of_layer = {name.removeprefix(layer): lr for name, lr in rates.items() if name.startswith(layer)}
        assert {name for name, lr in of_layer.items() if lr == 0.04} == {
            ".input_layernorm.weight",
            ".input_layernorm.bias",
            ".post_attention_layernorm.weight",
            ".post_attention_layernorm.bias",
            ".self_attn.q_proj.qk_scale",
            ".self_attn.v_proj.value_mix",
        }
        assert set(of_layer.values()) == {0.04, 0.05}
    else:
        # With 8 images in place of 1,024, and Nesterov momentum, which multiplies a constant gradient.
        lr = 11.5 / 128 / (1 + 1 / 0.15)
        assert sorted(set(rates.values())) == pytest.approx([lr, 64 * lr])


@pytest.mark.parametrize(("module", "name"), [("glyphs", "GLYPHS"), ("stdlib", "STDLIB")])
def test_the_published_comparisons_give_the_baseline_what_the_recipe_has(recipe, module, name):
    comparison = getattr(recipe(module), name)
    assert comparison.arm(comparison.baseline).algorithms() == []
    assert len(comparison.arm(comparison.composed).algorithms()) > 1
    controls = [arm for arm in comparison.tuned if arm.name.startswith("control")]
    assert controls
    shorter = {arm.like for arm in comparison.arms if arm.like}
    assert {comparison.baseline, comparison.composed} <= shorter
    assert shorter & {arm.name for arm in controls}


def test_every_arm_is_tuned_alike_and_shorter_forms_take_over(recipe, comparison, run_all, tmp_path):
    records = recipe("records").Records(tmp_path / "runs.jsonl", comparison)
    done = run_all(comparison, records, num_seeds=1)
    tuning = recipe("records").TUNING_SEED
    assert done == [
        ("plain", 0.1, tuning),
        ("quick", 0.1, tuning),
        ("plain", 0.2, tuning),
        ("quick", 0.2, tuning),
        ("plain", 0.2, 0),
        ("quick", 0.2, 0),
        ("plain, short", 0.2, 0),
        ("quick, short", 0.2, 0),
    ]


def test_a_stopped_comparison_goes_on_where_it_was(recipe, comparison, run_all, tmp_path):
    path, records_of = tmp_path / "runs.jsonl", recipe("records").Records
    run_all(comparison, records_of(path, comparison), num_seeds=1, names=["plain"])
    before = path.read_text()
    done = run_all(comparison, records_of(path, comparison), num_seeds=2)
    assert path.read_text().startswith(before)
    assert ("plain", 0.2, 0) not in done
    assert ("plain", 0.2, 1) in done
    assert run_all(comparison, records_of(path, comparison), num_seeds=2) == []


def test_runs_of_an_arm_that_was_changed_do_not_count(recipe, comparison, run_all, tmp_path):
    path, records_of = tmp_path / "runs.jsonl", recipe("records").Records
    run_all(comparison, records_of(path, comparison), num_seeds=1)
    first, *others = comparison.arms
    changed = replace(comparison, arms=(replace(first, duration="3ep"), *others))
    done = run_all(changed, records_of(path, changed), num_seeds=1)
    assert [name for name, _, _ in done] == ["plain", "plain", "plain"]


def test_runs_of_another_setup_do_not_count(recipe, comparison, run_all, tmp_path):
    path, records_of = tmp_path / "runs.jsonl", recipe("records").Records
    run_all(comparison, records_of(path, comparison), num_seeds=1)
    assert records_of(path, replace(comparison, task=replace(comparison.task, setup="batches of 16"))).runs == []


def test_runs_of_two_machines_are_not_mixed(recipe, comparison, run_all, tmp_path, monkeypatch):
    path, records_module = tmp_path / "runs.jsonl", recipe("records")
    run_all(comparison, records_module.Records(path, comparison), num_seeds=1)
    monkeypatch.setattr(records_module, "describe_machine", lambda: "another one")
    with pytest.raises(ValueError, match="another machine"):
        records_module.Records(path, comparison).check_machine()


def test_a_line_that_is_no_run_is_named(recipe, comparison, tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"arm": "pl')
    with pytest.raises(ValueError, match=r"runs.jsonl:1 is no run"):
        recipe("records").Records(path, comparison)


def test_a_table_of_arms_that_were_not_tuned_alike_is_refused(recipe, comparison, run_all, tmp_path):
    records = recipe("records").Records(tmp_path / "runs.jsonl", comparison)
    run_all(comparison, records, num_seeds=1, names=["plain"])
    with pytest.raises(ValueError, match=r"'quick' was tuned with the learning rates \[\] and not with \[0.1, 0.2\]"):
        recipe("tables").render_table(comparison, records)


def test_a_recipe_with_more_lengths_than_its_baseline_is_refused(comparison):
    arms = tuple(arm for arm in comparison.arms if arm.name != "plain, short")
    with pytest.raises(ValueError, match="Give the baseline the same"):
        replace(comparison, arms=arms)


def test_the_table_has_medians_ranges_and_the_losers(recipe, comparison, run_all, tmp_path):
    records = recipe("records").Records(tmp_path / "runs.jsonl", comparison)
    run_all(comparison, records, num_seeds=5)
    lines = recipe("tables").render_table(comparison, records).splitlines()
    plain, quick = "80.2% (80.0% to 80.4%)", "90.2% (90.0% to 90.4%)"

    def constant(seconds):
        return f"{seconds}.0 ({seconds}.0 to {seconds}.0)"

    # Seed n ends at 0.8 + n / 1000 (or 0.9), with half of that and half of the time at its first evaluation.
    assert lines[2:6] == [
        f"| plain | 2ep | 0.2 | 5 | {constant(40)} | {plain} | {constant(40)} in 3 of 5 |",
        f"| quick | 2ep | 0.2 | 5 | {constant(20)} | {quick} | {constant(20)} |",
        f"| plain, short | 1ep | 0.2 | 5 | {constant(20)} | {plain} | {constant(20)} in 3 of 5 |",
        f"| quick, short | 1ep | 0.2 | 5 | {constant(10)} | {quick} | {constant(10)} |",
    ]
    assert "*quick, short* took 0.25 times the baseline's CPU-seconds" in lines[-1]
    assert "with 5 of 5 seeds. Its worst seed is better than the baseline's best." in lines[-1]


def test_less_is_better_where_the_comparison_says_so(recipe, comparison, run_all, tmp_path):
    loss = replace(comparison, task=replace(comparison.task, is_better_higher=False))
    records = recipe("records").Records(tmp_path / "runs.jsonl", loss)
    run_all(loss, records, num_seeds=5)
    lines = recipe("tables").render_table(loss, records).splitlines()
    assert records.best_lr(loss.arm("plain")) == 0.1
    assert lines[3].startswith("| quick | 2ep | 0.1 ")
    assert "Its best seed is worse than the baseline's worst." in lines[-1]


def test_a_table_is_written_between_its_comments_and_nowhere_else(recipe, tmp_path):
    page, write_table = tmp_path / "page.md", recipe("tables").write_table
    page.write_text("before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n")
    for _ in range(2):
        write_table(page, "a", "| new |")
    assert page.read_text() == "before\n<!-- a -->\n| new |\n<!-- end of a -->\nafter\n"
    with pytest.raises(ValueError, match="0 places for the table 'b'"):
        write_table(page, "b", "")


def test_the_pages_show_the_runs_that_are_on_record(recipe):
    for page, name, table in recipe("tables").render_all():
        assert f"<!-- {name} -->\n{table}\n<!-- end" in page.read_text()


def test_logs_of_records_have_the_source_of_their_recipes_and_satisfy_the_rules(recipe):
    tables = recipe("tables")
    logs = {path.stem: json.loads(path.read_text()) for path in tables.LOGS.glob("*.json")}
    assert {path.stem for path in tables.ENTRIES.glob("*.py")} - set(logs) == {"glyphs_0", "stdlib_0"}
    for name, log in logs.items():
        assert log["recipe"]["source"] == (tables.ENTRIES / f"{name}.py").read_text()
        assert log["target"] == Entry.load(tables.ENTRIES / f"{name}.py").task.target
        assert evaluate(log).is_record


def test_the_command_names_an_arm_that_there_is_not(recipe, comparison, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["small.py", "--arms", "plan"])
    with pytest.raises(SystemExit):
        recipe("comparison").main(comparison, "Say something.")
    said = capsys.readouterr().err
    assert "['plan']" in said
    assert "'plain'" in said


def test_the_command_runs_what_is_missing_and_prints_the_table(recipe, comparison, monkeypatch, capsys, tmp_path):
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(sys, "argv", ["small.py", "--seeds", "2", "--records", str(path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert recipe("comparison").main(comparison, "Say something.") == 0
    assert len(path.read_text().splitlines()) == 2 * 2 + 4 * 2
    assert "| quick | 2ep | 0.2 | 2 |" in capsys.readouterr().out


def test_a_learning_rate_that_is_tried_later_is_chosen_if_it_is_better(recipe, comparison, monkeypatch, tmp_path):
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    narrow = replace(comparison, learning_rates=(0.1,))
    for further in ([], ["--also-lr", "0.2"]):
        monkeypatch.setattr(sys, "argv", ["small.py", "--seeds", "2", "--records", str(path), *further])
        assert recipe("comparison").main(narrow, "Say something.") == 0
    records = recipe("records").Records(path, narrow)
    assert {records.best_lr(arm) for arm in narrow.arms} == {0.2}
    assert all(len(records.of(arm, 0.2)) == 2 for arm in narrow.arms)


ENTRY = """
from composer.cli.race import Arm, Task


def train(arm, lr, seed):
    return [(0.1, 0.0), ({seconds}, {quality})]


TASK = Task(
    name="small", setup="-", train=train, target=0.8, quality="accuracy", percent=True, is_better_higher=True
)
RECIPE = Arm(name="{name}", duration="1ep", lr=0.1, settings={{"a": 1, "b": 1}})
PARTS = {{
    part: lambda arm, part=part: Arm(
        name="", duration="1ep", settings={{name: value for name, value in arm.settings.items() if name != part}}
    )
    for part in "ab"
}}
"""


@pytest.fixture
def race(monkeypatch, capsys, tmp_path):
    """Race a recipe that takes 2 s and has some quality against one that takes 10 s and more, as the command does."""

    def run(quality="0.81 + seed / 100", num_seeds=5, seconds="2.0"):
        (tmp_path / "small_0.py").write_text(ENTRY.format(name="slow", seconds="10 + seed", quality="0.8"))
        (tmp_path / "small_1.py").write_text(ENTRY.format(name="quick", seconds=seconds, quality=quality))
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
        monkeypatch.setattr(sys, "path", [*sys.path])
        log = tmp_path / "log.json"
        assert main([str(tmp_path / "small_1.py"), "--seeds", str(num_seeds), "--log", str(log)]) == 0
        return json.loads(log.read_text()), capsys.readouterr().out

    return run


def test_a_race_logs_both_recipes_and_bounds_the_ratio_of_their_times(race, monkeypatch):
    train, order = Entry.train, []
    monkeypatch.setattr(Entry, "train", lambda self, seed: order.append(self.arm.name) or train(self, seed))
    log, printed = race()
    assert order[:6] == ["slow", "quick", "quick", "slow", "slow", "quick"]  # so that neither always trains first
    assert log["recipe"]["source"].startswith("\nfrom composer.cli.race import")
    assert log["recipe"]["curves"] == [[[0.1, 0.0], [2.0, pytest.approx(0.81 + seed / 100)]] for seed in range(5)]
    assert [curve[-1][0] for curve in log["reference"]["curves"]] == [10, 11, 12, 13, 14]
    assert log["versions"]["torch"]
    logs = [math.log(2 / seconds) for seconds in range(10, 15)]
    # 3.747 is the quantile of the t distribution with 4 degrees of freedom for 99 %.
    bound = math.exp(mean(logs) + 3.747 * stdev(logs) / 5**0.5)
    assert "2.00 CPU-s to 80.0%, reached with 5 of 5 seeds" in printed
    assert f"0.167 times small_0 (slow), below {bound:.3f} with 99% confidence: a record." in printed


@pytest.mark.parametrize(
    "changed",
    [
        {"num_seeds": 4, "quality": "0.9 + seed / 1000"},
        {"quality": "0.95 - 0.151 * (seed == 2)"},  # one seed misses the target
        {"quality": "0.8 + 0.01 * seed ** 3"},  # the mean is not beyond the target with p < 0.01
        {"seconds": "9.0 + 2 * seed"},  # faster with one seed only
    ],
)
def test_a_doubtful_result_is_no_record(race, changed):
    assert "confidence: not a record." in race(**changed)[1]


def test_a_log_is_replaced_by_a_whole_one_only(race, tmp_path):
    before, _ = race()
    with pytest.raises(ZeroDivisionError):
        race(quality="1 / (3 - seed)")
    assert json.loads((tmp_path / "log.json").read_text()) == before
    assert json.loads((tmp_path / "log.json.unfinished").read_text())["seeds"] == [0, 1, 2]


def test_what_a_failed_race_has_measured_is_not_overwritten(race, tmp_path, monkeypatch):
    race()
    monkeypatch.chdir(tmp_path)
    command, source = [str(tmp_path / "small_1.py"), "--seeds", "2"], (tmp_path / "small_1.py").read_text()
    for quality in ("1 / (1 - seed)", "1 / seed", "0.9 + seed / 99"):
        (tmp_path / "small_1.py").write_text(source.replace("0.81 + seed / 100", quality))
        with contextlib.nullcontext() if quality.startswith("0.9") else pytest.raises(ZeroDivisionError):
            main(command)
    logs = tmp_path / "runs/race"
    assert {path.name for path in logs.iterdir()} == {"small_1.json.unfinished", "small_1-2.json"}
    assert json.loads((logs / "small_1.json.unfinished").read_text())["seeds"] == [0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return [(0.1, 0.0), (2.0, 0.81 + seed / 100)]", "return []", r"must return one point or more.*'quick' with"),
        ("TASK = Task(", "TASK = Tusks(", r"small_1\.py, line \d+: NameError: name 'Tusks'"),
        ("TASK = Task(", "TASK = = Task(", r"small_1\.py: SyntaxError: invalid syntax \(small_1\.py, line \d+\)"),
    ],
)
def test_a_recipe_that_cannot_race_is_named_in_one_line(race, tmp_path, capsys, old, new, message):
    race()
    path = tmp_path / "small_1.py"
    path.write_text(path.read_text().replace(old, new))
    assert main([str(path), "--log", str(tmp_path / "other.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"^composer race: error: .*{message}", line)
    assert not list(tmp_path.glob("other.json*"))


@pytest.mark.parametrize(("old", "new"), [('setup="-"', 'setup="other"'), ("target=0.8", "target=0.1")])
def test_a_race_against_another_task_is_refused(race, tmp_path, monkeypatch, capsys, old, new):
    race()
    path = tmp_path / "small_2.py"
    path.write_text((tmp_path / "small_1.py").read_text().replace(old, new))
    monkeypatch.chdir(tmp_path)
    assert main([str(path)]) == 2
    assert "must have the same task" in capsys.readouterr().err


def test_the_command_imports_what_lies_beside_a_recipe_and_in_the_working_directory(tmp_path):
    (tmp_path / "entries").mkdir()
    (tmp_path / "task_of_race.py").write_text(ENTRY.format(name="slow", seconds="10 + seed", quality="0.8"))
    (tmp_path / "entries/arm_of_race.py").write_text("from task_of_race import RECIPE, TASK")
    (tmp_path / "entries/small_0.py").write_text("from arm_of_race import RECIPE, TASK")
    quick = ENTRY.format(name="quick", seconds="2.0", quality="0.81 + seed / 100")
    (tmp_path / "entries/small_1.py").write_text(quick)
    command = [sys.executable, "-m", "composer_dist.launch", "race"]
    done = subprocess.run(
        [*command, "entries/small_1.py"], cwd=tmp_path, check=True, timeout=120, stdout=subprocess.PIPE, text=True
    )
    assert "times small_0 (slow)" in done.stdout
    assert json.loads((tmp_path / "runs/race/small_1.json").read_text())["recipe"]["source"] == quick
    (tmp_path / "entries/small_0.py").unlink()
    failed = subprocess.run(
        [*command, "entries/small_1.py"], cwd=tmp_path, check=False, timeout=120, stderr=subprocess.PIPE, text=True
    )
    assert failed.returncode == 2
    assert "composer race: error: entries must have a record" in failed.stderr


def test_a_recipe_without_a_learning_rate_is_refused(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(ENTRY.format(name="quick", seconds="2.0", quality="1.0").replace("lr=0.1, ", ""))
    with pytest.raises(ValueError, match="must define TASK"):
        Entry.load(path)


def test_an_ablation_shows_what_each_part_brings_and_what_pairs_bring_beyond_their_sum(recipe, run_all, tmp_path):
    path = tmp_path / "small_1.py"
    a, b = 'arm.settings.get("a", 0)', 'arm.settings.get("b", 0)'
    path.write_text(
        ENTRY.format(name="quick", seconds="2.0", quality=f"0.5 + 0.1 * {a} + 0.2 * {b} + 0.05 * {a} * {b}")
    )
    ablations = recipe("ablations")
    comparison = ablations.ablation(Entry.load(path))
    records = recipe("records").Records(tmp_path / "runs.jsonl", comparison)
    assert ablations.render_ablation(comparison, records).startswith("No result yet")
    run_all(comparison, records, num_seeds=2)
    lines = ablations.render_ablation(comparison, records).splitlines()
    assert [line.split(" | ")[-2:] for line in lines[2:5]] == [
        ["85.0% (85.0% to 85.0%)", " |"],
        ["70.0% (70.0% to 70.0%)", "+15.0 |"],
        ["60.0% (60.0% to 60.0%)", "+25.0 |"],
    ]
    assert lines[-1] == "| a | +5.0 ± 0.0 |"
