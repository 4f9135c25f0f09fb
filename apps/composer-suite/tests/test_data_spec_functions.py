"""Return values of a DataSpec's functions, and file names, are checked before they fail deep inside."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Evaluator
from composer.callbacks import CheckpointSaver, MemorySnapshot
from composer.core import DataSpec
from composer.loggers import FileLogger, RemoteUploaderDownloader
from composer.profiler import JSONTraceHandler
from composer.report import RunRecorder


def nothing(*_):
    """Forget to return the batch."""


RETURN_NOTHING = {
    "batch_transforms": r"batch_transforms=<function nothing.*returned None. It must return the batch",
    "microbatch_transforms": r"microbatch_transforms=<function nothing.*returned None. It must return the batch",
    "split_batch": r"split_batch=<function nothing.*returned None. It must return a list of microbatches",
}


@pytest.mark.parametrize("name", RETURN_NOTHING)
def test_a_function_that_forgets_to_return_is_named(make_trainer, make_loader, name):
    spec = DataSpec(make_loader(8, 4), **{name: nothing})
    trainer = make_trainer(train_dataloader=spec, max_duration="1ba", device_train_microbatch_size=2)
    with pytest.raises(TypeError, match=RETURN_NOTHING[name]):
        trainer.fit()
    with pytest.raises(TypeError, match=RETURN_NOTHING[name]):
        trainer.eval(Evaluator(label="held out", dataloader=spec, device_eval_microbatch_size=2))
    with pytest.raises(TypeError, match=RETURN_NOTHING[name]):
        trainer.predict(spec, device_predict_microbatch_size=2)


def test_tokens_that_nobody_counts_are_refused(make_trainer, make_loader):
    trainer = make_trainer(
        train_dataloader=make_loader(8, 4), accumulate_train_batch_on_tokens=True, max_duration="1ba"
    )
    with pytest.raises(ValueError, match=r"no tokens are counted in a batch.*get_num_tokens_in_batch=count"):
        trainer.fit()


@pytest.mark.parametrize(("label", "counted"), [(-100, False), (-100, True), (0, False)])
def test_labels_that_enter_no_loss_and_are_counted_are_told(make_trainer, label, counted):
    loader = DataLoader(TensorDataset(torch.randn(4, 2), torch.tensor([1, label, 0, 1])), batch_size=4)
    loader.dataset.max_seq_len = 1
    own = {"get_num_tokens_in_batch": lambda batch: {"total": 4, "loss_generating": int((batch[1] >= 0).sum())}}
    spec = DataSpec(loader, **own if counted else {})
    trainer = make_trainer(train_dataloader=spec, accumulate_train_batch_on_tokens=True, max_duration="2ba")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit()
    told = [str(each.message) for each in told if "accumulate_train_batch_on_tokens" in str(each.message)]
    assert len(told) == (label == -100 and not counted)
    assert all("label -100, which enter no loss" in each for each in told)


def test_a_batch_cut_into_no_parts_is_an_error(make_trainer, make_loader):
    spec = DataSpec(make_loader(8, 4), split_batch=lambda batch, size: [])
    with pytest.raises(TypeError, match=r"returned \[\]. It must return a list of microbatches, with one at least"):
        make_trainer(train_dataloader=spec, max_duration="1ba", device_train_microbatch_size=2).fit()


@pytest.mark.parametrize("dataloader", [3, None])
def test_what_is_no_dataloader_is_refused_where_it_is_given(make_trainer, dataloader):
    with pytest.raises(TypeError, match=f"dataloader={dataloader} is not an iterable of batches"):
        DataSpec(dataloader)
    with pytest.raises(TypeError, match=f"dataloader={dataloader} is not an iterable of batches"):
        Evaluator(label="eval", dataloader=dataloader)
    if dataloader is not None:
        with pytest.raises(TypeError, match="dataloader=3 is not an iterable of batches"):
            make_trainer(eval_dataloader=dataloader)
        with pytest.raises(TypeError, match="dataloader=3 is not an iterable of batches"):
            make_trainer().eval(dataloader)


def test_an_interval_that_is_a_function_of_something_else_is_refused(make_trainer, make_loader):
    said = r"cannot be called with a state and an event \(too many positional arguments\)"
    with pytest.raises(TypeError, match=f"eval_interval=.*{said}"):
        make_trainer(eval_dataloader=make_loader(8, 4), eval_interval=lambda: 1)
    with pytest.raises(TypeError, match=f"eval_interval=.*{said}"):
        Evaluator(label="eval", dataloader=make_loader(8, 4), eval_interval=lambda state: True)
    with pytest.raises(TypeError, match=f"save_interval=.*{said}"):
        CheckpointSaver("f", save_interval=lambda: True)


def test_a_text_is_no_answer_to_yes_or_no(make_trainer, make_loader, tmp_path):
    trainer = make_trainer()
    with pytest.raises(TypeError, match="weights_only='no'"):
        trainer.save_checkpoint(str(tmp_path / "ok.pt"), weights_only="no")
    assert not any(tmp_path.iterdir())
    with pytest.raises(TypeError, match="return_outputs='no'"):
        trainer.predict(make_loader(8, 4), return_outputs="no")


def test_an_export_without_a_name_is_refused(make_trainer):
    with pytest.raises(ValueError, match="save_path='' names no file"):
        make_trainer().export_for_inference("torchscript", "")


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: CheckpointSaver("{run_nme}"), "folder"),
        (lambda: CheckpointSaver("f", "{run_nme}-{batch}.pt"), "save_filename"),
        (lambda: CheckpointSaver("f", latest_filename="{run_nme}"), "save_latest_filename"),
        (lambda: CheckpointSaver("f", remote_file_name="{run_nme}/{batch}.pt"), "remote_file_name"),
        (lambda: FileLogger("{run_nme}/log.txt", capture_stdout=False, capture_stderr=False), "filename"),
        (lambda: RunRecorder("{run_nme}"), "folder"),
        (
            lambda: RemoteUploaderDownloader("memory://b", file_path_format_string="{run_nme}"),
            "file_path_format_string",
        ),
        (lambda: JSONTraceHandler("{run_nme}"), "folder"),
        (lambda: MemorySnapshot(filename="{run_nme}"), "filename"),
    ],
)
def test_a_misspelt_placeholder_is_told(make, argument):
    with pytest.warns(UserWarning, match=rf"{argument}='.*\{{run_nme\}}.* Did you mean \{{run_name\}}\?"):
        make()


def test_a_misspelt_placeholder_of_a_checkpoint_saved_by_hand_is_told(make_trainer, tmp_path):
    trainer = make_trainer()
    with pytest.warns(UserWarning, match=r"Did you mean \{run_name\}\?"):
        trainer.save_checkpoint(str(tmp_path / "{run_nme}.pt"))
    assert (tmp_path / "{run_nme}.pt").exists()
