"""The recipes in examples/: their data, their presets, the rules of their comparisons, and the tables."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from torchvision.datasets import VisionDataset
from transformers import PreTrainedTokenizerFast

from composer import Callback, Trainer
from composer.models import HuggingFaceModel

MODULES = [
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

    return arms.Comparison(
        name="small",
        setup="batches of 8",
        arms=(
            arms.Arm(name="plain", duration="2ep"),
            arms.Arm(name="quick", duration="2ep"),
            arms.Arm(name="plain, short", duration="1ep", like="plain"),
            arms.Arm(name="quick, short", duration="1ep", like="quick"),
        ),
        baseline="plain",
        composed="quick",
        learning_rates=(0.1, 0.2),
        train=train,
        quality="accuracy",
        percent=True,
        is_better_higher=True,
    )


@pytest.fixture
def run_all(recipe):
    """Run what is missing, as the command does."""

    def run(comparison, records, num_seeds, names=None):
        done = []
        for arm, lr, seed in recipe("comparison").missing_runs(comparison, records, num_seeds, names):
            records.add(arm, lr, seed, comparison.train(arm, lr, seed))
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
    assert records_of(path, replace(comparison, setup="batches of 16")).runs == []


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
    loss = replace(comparison, is_better_higher=False)
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


def test_the_page_shows_the_runs_that_are_on_record(recipe):
    tables = recipe("tables")
    page = tables.PAGE.read_text()
    for module, name in (("glyphs", "GLYPHS"), ("stdlib", "STDLIB"), ("stdlib_muon", "STDLIB_MUON")):
        comparison = getattr(recipe(module), name)
        records = recipe("records").Records(recipe("comparison").RESULTS / f"{comparison.name}.jsonl", comparison)
        assert f"<!-- {comparison.name} -->\n{tables.render(comparison, records)}\n<!-- end" in page


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
