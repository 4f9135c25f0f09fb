import random
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_checkpoint.errors import CheckpointConflictError
from composer_checkpoint.names import (
    PartialFilePath,
    check_filename,
    format_name_with_dist_and_time,
    is_tar,
    placeholders,
    sharded_folder,
)
from composer_checkpoint.save_folder import (
    ensure_folder_has_no_conflicting_files,
    ensure_folder_is_empty,
    find_conflicts,
)
from composer_time import Timestamp

DEFAULT = "ep{epoch}-ba{batch}-rank{rank}.pt"


def state(run_name="blue-fox", **time):
    return SimpleNamespace(run_name=run_name, timestamp=Timestamp(**time))


def test_a_path_is_filled_in_when_a_file_is_written(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    path = PartialFilePath(DEFAULT, "runs/{run_name}")
    assert path.format(state(epoch=1, batch=20)) == "runs/blue-fox/ep1-ba20-rank3.pt"
    assert path.format(state(), keep_placeholders=True) == "runs/{run_name}/ep{epoch}-ba{batch}-rank{rank}.pt"


def test_the_parts_of_a_path_may_be_changed_and_a_folder_may_be_missing():
    path = PartialFilePath("ba{batch}.pt")
    assert path.format(state(batch=2)) == "ba2.pt"
    path.folder, path.filename = "x", "/it{iteration}.pt"
    assert path.format(state(iteration=5)) == "x/it5.pt"


def test_what_nothing_fills_in_stays_as_it_is():
    assert PartialFilePath("{mlflow_run_id}/ba{batch}.pt").format(state(batch=2)) == "{mlflow_run_id}/ba2.pt"


def test_a_value_that_leads_out_of_the_folder_is_refused():
    with pytest.raises(ValueError, match="leads out of its folder"):
        PartialFilePath("{run_name}/ba{batch}.pt", "saves").format(state(run_name="../.."))


def test_a_sharded_checkpoint_is_in_the_folder_of_the_file_name():
    assert sharded_folder("seed1/x.pt", "ep{epoch}") == "seed1/ep{epoch}"
    assert sharded_folder("x.pt", None) == ""


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz", "x.tar.foo", "tar.xyz", "a/b.tar.lzma"])
def test_names_of_archives(name):
    assert is_tar(name)


@pytest.mark.parametrize("name", ["x.pt", "tar", "tar.foo.xyz", "tgz", "x", "tarball.pt"])
def test_names_of_other_files(name):
    assert not is_tar(name)


@pytest.mark.parametrize(
    ("template", "interval"),
    [
        (DEFAULT, "1ep"),
        (DEFAULT, "10ba"),
        (DEFAULT, None),
        ("seed1/{run_name}/ba{batch:06d}.pt", "10ba"),
        ("/ba{batch}.pt", "10ba"),
        ("ep{epoch}.pt", 1),
        ("ep{epoch}.pt", "2ep"),
        ("it{iteration}.pt", "1iter"),
        ("ep{epoch}-{batch_in_epoch}.pt", "10ba"),
        ("{total_wct}.pt", "60sec"),
        ("ep{epoch}.pt", None),
        ("final.pt", "1dur"),
        ("{mlflow_run_id}-{mlflow_experiment_id}-{sample}.pt", "100sp"),
        ("{{literal}}-{batch}.pt", "10ba"),
    ],
)
def test_a_template_that_names_each_save_is_taken(template, interval):
    check_filename(template, interval=interval)


def test_what_nothing_fills_in_stays_as_it_is_with_a_warning():
    with pytest.warns(UserWarning, match=r"save_filename='\{smple\}-\{batch\}.pt' .* Did you mean \{sample\}\?"):
        check_filename("{smple}-{batch}.pt")


@pytest.mark.parametrize(
    ("template", "interval"),
    [
        ("last.pt", "1ep"),
        ("last.pt", None),
        ("rank{rank}.pt", "1ep"),
        ("ep{epoch}.pt", "10ba"),
        ("ep{epoch}.pt", "0.1dur"),
        ("{batch_in_epoch}.pt", "10ba"),
        ("{batch_in_epoch}.pt", "1ep"),
        ("{{batch}}.pt", "10ba"),
    ],
)
def test_a_template_that_gives_two_saves_one_name_is_refused_unless_that_is_wanted(template, interval):
    with pytest.raises(ValueError, match="gives several checkpoints one name"):
        check_filename(template, interval=interval)
    check_filename(template, interval=interval, overwrite=True)


@pytest.mark.parametrize("template", ["../ba{batch}.pt", "a/../../ba{batch}.pt", "..", "a\\..\\{batch}.pt"])
def test_a_template_that_leads_out_of_the_folder_is_refused(template):
    with pytest.raises(ValueError, match="leads out of the folder"):
        check_filename(template)


@pytest.mark.parametrize("template", ["", "/", "  ", "folder{batch}/", "nul\0{batch}"])
def test_a_template_that_is_no_file_name_is_refused(template):
    with pytest.raises(ValueError, match="is not a file name"):
        check_filename(template)


@pytest.mark.parametrize(
    "template",
    [
        "{batch",
        "batch}",
        "{",
        "{}",
        "{0}",
        "{epoch.real}",
        "{epoch[0]}",
        "{batch:{rank}}",
        "{batch:0999999999d}",
        "{a b}",
    ],
)
def test_a_malformed_template_is_refused_with_the_name_that_the_user_typed(template):
    with pytest.raises(ValueError, match=r"save_latest_filename="):
        check_filename(template, argument="save_latest_filename")


@pytest.mark.filterwarnings("ignore:.* has the placeholder:UserWarning")
@settings(deadline=None, max_examples=1000)
@given(st.text(st.sampled_from("{}ab./:0!r[]epochbatch \\\0é"), max_size=30))
@example("{:")
@example("{!x}{batch}")
def test_whatever_is_typed_is_taken_or_refused_and_what_is_taken_can_be_filled_in(template):
    try:
        check_filename(template)
    except ValueError:
        return
    assert format_name_with_dist_and_time(template, "run", Timestamp(batch=1))


@pytest.mark.filterwarnings("ignore:.* has the placeholder:UserWarning")
def test_ten_thousand_templates_are_taken_or_refused():
    chance = random.Random(47)
    pieces = [
        "{epoch}",
        "{batch}",
        "{",
        "}",
        "/",
        "..",
        "a",
        "{x}",
        "{batch:04d}",
        ":",
        "!",
        "{0}",
        ".pt",
        "\0",
        "{rank}",
    ]
    taken = 0
    for _ in range(10_000):
        template = "".join(chance.choices(pieces, k=chance.randrange(6)))
        try:
            check_filename(template, interval=chance.choice(["1ep", "1ba", None]), overwrite=chance.random() < 0.5)
        except ValueError:
            continue
        taken += 1
        name = PartialFilePath(template).format(state(batch=1))
        assert ".." not in name.split("/")
    assert 100 < taken < 9_000


def test_the_placeholders_of_a_template():
    assert placeholders(DEFAULT) == {"epoch", "batch", "rank"}


@pytest.mark.parametrize(
    ("name", "template", "now", "conflicts"),
    [
        ("ep1-ba10-rank0.pt", DEFAULT, {"epoch": 2, "batch": 20}, False),
        ("ep2-ba20-rank0.pt", DEFAULT, {"epoch": 2, "batch": 20}, False),
        ("ep3-ba30-rank0.pt", DEFAULT, {"epoch": 2, "batch": 20}, True),
        ("ep2-ba21-rank7.pt", DEFAULT, {"epoch": 2, "batch": 20}, True),
        ("ep3-ba5-rank0.pt", DEFAULT, {"epoch": 2, "batch": 20}, True),
        ("ep1-ba10-rank0.pt", DEFAULT, {}, True),
        ("other-ba99.pt", DEFAULT, {}, False),
        ("ep3-ba30-rank0.ptx", DEFAULT, {}, False),
        ("seed1/ba000030.pt", "seed1/ba{batch:06d}.pt", {"batch": 20}, True),
        ("seed2/ba000030.pt", "seed1/ba{batch:06d}.pt", {"batch": 20}, False),
        ("blue/ba30.pt", "{run_name}/ba{batch}.pt", {"batch": 20}, True),
        ("ep2-5.pt", "ep{epoch}-{batch_in_epoch}.pt", {"epoch": 2, "batch_in_epoch": 4}, True),
        ("ep1-5.pt", "ep{epoch}-{batch_in_epoch}.pt", {"epoch": 2, "batch_in_epoch": 4}, False),
        ("t99.pt", "t{token}.pt", {"token": 98}, True),
        ("s98.pt", "s{sample}.pt", {"sample": 98}, False),
        ("ba30.ba30", "ba{batch}.ba{batch}", {}, True),
        ("ba30.ba31", "ba{batch}.ba{batch}", {}, False),
        ("xx.pt", "..pt", {}, False),
    ],
)
def test_which_existing_names_a_run_would_come_upon_later(name, template, now, conflicts):
    assert find_conflicts([name], template, Timestamp(**now)) == [name] * conflicts


def test_counting_inside_epochs_without_the_epoch_cannot_be_told_apart():
    with pytest.raises(ValueError, match=r"does not have \{epoch\}"):
        find_conflicts([], "{batch_in_epoch}.pt", Timestamp())


def test_starting_from_zero_over_existing_checkpoints_is_refused_and_resuming_is_not(tmp_path):
    (tmp_path / "ep1-ba10-rank0.pt").touch()
    (tmp_path / "ep2-ba20-rank0.pt").touch()
    (tmp_path / "latest-rank0.pt").symlink_to("ep2-ba20-rank0.pt")
    with pytest.raises(FileExistsError, match="may conflict with a future checkpoint of the current run") as caught:
        ensure_folder_has_no_conflicting_files(tmp_path, DEFAULT, Timestamp())
    assert isinstance(caught.value, CheckpointConflictError)
    assert "ep1-ba10-rank0.pt, ep2-ba20-rank0.pt" in str(caught.value)
    ensure_folder_has_no_conflicting_files(tmp_path, DEFAULT, Timestamp(epoch=2, batch=20))
    ensure_folder_has_no_conflicting_files(tmp_path / "new", DEFAULT, Timestamp())


def test_sharded_checkpoints_and_sub_folders_conflict_too_and_unfinished_ones_do_not(tmp_path):
    (tmp_path / "seed1" / "ep1-ba10").mkdir(parents=True)
    (tmp_path / "seed1" / "ep2-ba20.tmp-0badcafe-17-1234-01234567").mkdir()
    with pytest.raises(FileExistsError, match="holds 1 checkpoints"):
        ensure_folder_has_no_conflicting_files(tmp_path, "seed1/ep{epoch}-ba{batch}", Timestamp())


def test_a_folder_is_empty_if_all_that_is_in_it_is_hidden(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").touch()
    (tmp_path / "empty").mkdir()
    ensure_folder_is_empty(tmp_path)
    (tmp_path / "empty" / "x").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        ensure_folder_is_empty(tmp_path)
