"""MLPerfCallback: the log that MLPerf's own checker reads, and the description of the system."""

import json
import re
import sys

import pytest
from torch.utils.data import DataLoader, IterableDataset

from composer.callbacks.mlperf import MLPerfCallback, get_system_description
from composer.loggers import LoggerDestination
from composer.utils import MissingConditionalImportError

# The form of https://github.com/mlcommons/policies, and how many fields it has.
FIELDS = 33


class Keeper(LoggerDestination):
    def __init__(self):
        self.names = []

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        self.names.append(remote_file_name.removeprefix(f"{state.run_name}/"))


@pytest.fixture
def make_callback(tmp_path):
    pytest.importorskip("mlperf_logging")

    def make(**settings):
        settings = {"system_name": "shed", "cache_clear_cmd": "true", **settings}
        return MLPerfCallback(str(tmp_path), settings.pop("index", 0), **settings)

    return make


def lines_of(path):
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def run(make_trainer, make_loader, callback, **settings):
    keeper = Keeper()
    settings.setdefault("eval_dataloader", make_loader(6, 3))
    trainer = make_trainer(
        train_dataloader=make_loader(8, 4), max_duration="2ep", callbacks=callback, loggers=keeper, **settings
    )
    trainer.fit()
    trainer.close()
    return keeper


def test_the_log_has_every_line_that_a_run_has(make_callback, make_trainer, make_loader, tmp_path):
    callback = make_callback(target=-1.0)
    keeper = run(make_trainer, make_loader, callback, device_train_microbatch_size=1)
    lines = lines_of(tmp_path / "results/shed/resnet/result_0.txt")
    assert [line["key"] for line in lines] == [
        *("cache_clear", "init_start", "submission_benchmark", "submission_division", "submission_org"),
        *("submission_platform", "submission_status"),
        *("seed", "global_batch_size", "gradient_accumulation_steps", "train_samples", "eval_samples"),
        *("init_stop", "run_start"),
        *("epoch_start", "block_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy", "block_stop"),
        "run_stop",
        *("epoch_start", "block_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy", "block_stop"),
    ]
    values = {line["key"]: line["value"] for line in lines}
    assert values["global_batch_size"] == 4
    assert values["gradient_accumulation_steps"] == 4
    assert (values["train_samples"], values["eval_samples"]) == (8, 6)
    assert values["submission_platform"] == "shed"
    assert callback.success
    assert keeper.names.count("results/shed/resnet/result_0.txt") == 3
    assert "systems/shed.json" in keeper.names


def test_the_checker_of_mlperf_can_read_the_log(make_callback, make_trainer, make_loader, tmp_path):
    parser = pytest.importorskip("mlperf_logging.compliance_checker.mlp_parser")
    run(make_trainer, make_loader, make_callback())
    lines, errors = parser.parse_file(str(tmp_path / "results/shed/resnet/result_0.txt"), ruleset="2.1.0")
    assert not errors
    assert len(lines) > 20


def test_training_stops_at_the_target_when_asked_for(make_callback, make_trainer, make_loader, tmp_path):
    run(make_trainer, make_loader, make_callback(target=-1.0, exit_at_target=True))
    keys = [line["key"] for line in lines_of(tmp_path / "results/shed/resnet/result_0.txt")]
    assert keys.count("epoch_start") == 1
    assert keys[-1] == "run_stop"


def test_epochs_of_bert_are_counted_in_samples(make_callback, make_trainer, make_loader, tmp_path):
    run(make_trainer, make_loader, make_callback(benchmark="bert"))
    lines = lines_of(tmp_path / "results/shed/bert/result_0.txt")
    assert [line["metadata"]["epoch_num"] for line in lines if line["key"] == "epoch_stop"] == [8, 16]


def test_a_result_is_written_once(make_callback, make_trainer, make_loader):
    run(make_trainer, make_loader, make_callback())
    with pytest.raises(FileExistsError, match="a result is written once"):
        make_trainer(callbacks=make_callback())
    run(make_trainer, make_loader, make_callback(index=1))


def test_without_an_evaluator_the_run_is_logged_all_the_same(make_callback, make_trainer, make_loader, tmp_path):
    run(make_trainer, make_loader, make_callback(), eval_dataloader=None)
    assert lines_of(tmp_path / "results/shed/resnet/result_0.txt")[-1]["key"] == "epoch_stop"


def test_a_metric_that_does_not_exist_is_named(make_callback, make_trainer, make_loader):
    with pytest.raises(ValueError, match=r"metric_name='Quality'.*\['CrossEntropy', 'MulticlassAccuracy'\]"):
        run(make_trainer, make_loader, make_callback(metric_name="Quality"))


def test_several_evaluators_are_refused(make_callback, make_trainer, make_loader):
    from composer import Evaluator

    two = [Evaluator(label=label, dataloader=make_loader(6, 3)) for label in ("plain", "hard")]
    with pytest.raises(ValueError, match=r"one evaluator.*\['plain', 'hard'\]"):
        run(make_trainer, make_loader, make_callback(), eval_dataloader=two)


def test_samples_of_streams_are_counted_over_all_ranks(make_callback, make_trainer, make_data, tmp_path):
    class Stream(IterableDataset):
        def __len__(self):
            return 8

        def __iter__(self):
            return iter([make_data(8)[index] for index in range(8)])

    loader = DataLoader(Stream(), batch_size=4)
    make_trainer(train_dataloader=loader, callbacks=make_callback(), max_duration="1ep").fit()
    lines = lines_of(tmp_path / "results/shed/resnet/result_0.txt")
    assert [line["value"] for line in lines if line["key"] == "train_samples"] == [8]


def test_caches_that_are_not_cleared_are_warned_of(make_callback, make_trainer):
    with pytest.warns(UserWarning, match="cache_clear_cmd is not set"):
        make_trainer(callbacks=make_callback(cache_clear_cmd=None))


@pytest.mark.parametrize(
    "settings", [{"benchmark": "chess"}, {"division": "closed"}, {"status": "sold"}], ids=lambda each: next(iter(each))
)
def test_words_that_mlperf_does_not_know_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be one of"):
        MLPerfCallback(".", 0, **settings)


@pytest.mark.parametrize("command", ["", []])
def test_a_command_that_is_none_is_refused(tmp_path, command):
    with pytest.raises(ValueError, match=r"cache_clear_cmd=.* must be a command"):
        MLPerfCallback(str(tmp_path), 0, cache_clear_cmd=command)


def test_a_package_that_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlperf_logging", None)
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog", None)
    with pytest.raises(MissingConditionalImportError, match=r"mlperf-logging is not .*composer-suite\[mlperf\]"):
        MLPerfCallback(".", 0)


def test_the_description_of_the_system_has_every_field_of_the_form():
    description = get_system_description("Plum", "open", "onprem", host_processors_per_node=2)
    assert len(description) == FIELDS
    assert description["host_processors_per_node"] == 2
    assert re.fullmatch(r"1x\S+_composer", description["system_name"])
    assert description["other_software_stack"]["python_version"] == sys.version
    assert json.loads(json.dumps(description)) == description
