"""A script that is started again after the end of its run."""

import logging

import pytest

from composer.report import RunRecorder


@pytest.fixture
def start(make_trainer, tmp_path):
    """Start the same run once more, and return its trainer after `fit`."""

    def start(max_duration="2ep", fit_settings=(), **settings):
        with make_trainer(
            max_duration=max_duration,
            save_folder=f"{tmp_path}/saved",
            run_name="plum",
            autoresume=True,
            loggers=RunRecorder(f"{tmp_path}/runs/{{run_name}}", page=False),
            **settings,
        ) as trainer:
            trainer.fit(**dict(fit_settings))
        return trainer

    return start


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()}


def test_a_finished_run_trains_nothing_each_time_it_is_started_again(start, tmp_path, caplog):
    start()
    saved = contents(tmp_path / "saved")
    metrics = (tmp_path / "runs/plum/metrics.jsonl").read_bytes()
    for _ in range(3):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "composer"):
            trainer = start()
        assert "Nothing left to train" in caplog.text
        assert f"{tmp_path}/saved/ep2-ba4-rank0.pt is at batch 4, and max_duration='2ep' has been" in caplog.text
        assert int(trainer.state.timestamp.batch) == 4
        assert contents(tmp_path / "saved") == saved
        assert (tmp_path / "runs/plum/metrics.jsonl").read_bytes() == metrics
        assert '"finished"' in (tmp_path / "runs/plum/status.json").read_text()


def test_a_finished_run_goes_on_for_a_longer_duration(start):
    start()
    assert int(start("3ep").state.timestamp.batch) == 6
    assert int(start("3ep", {"duration": "1ba"}).state.timestamp.batch) == 7


def test_a_second_fit_without_a_duration_is_still_an_error(make_trainer):
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    with pytest.raises(ValueError, match="1ep is not beyond the 1ep trained so far"):
        trainer.fit()
