"""Where a saver saves whose folder is the address of a store, and what it resumes from there."""

import uuid

import pytest
import torch

from composer import Trainer
from composer.models import ComposerClassifier
from composer_checkpoint import CheckpointSaver, checkpoint_to_resume, load_checkpoint
from composer_checkpoint.stores import FsspecObjectStore
from composer_checkpoint.stores.base import parse_uri
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri
from composer_events import Engine, Event, State

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of paramiko


def run(folder, run_name="plum", num_batches=2, resume=False, **settings):
    """Save after each batch. Return the saver, and the batch that was resumed from."""
    saver = CheckpointSaver(folder, "ba{batch}.pt", save_interval="1ba", **settings)
    model = torch.nn.Linear(2, 1)
    state = State(model, 1, run_name, "cpu", max_duration="9ba", dataloader=[0] * num_batches, callbacks=[saver])
    engine = Engine(state)
    engine.run_event(Event.INIT)
    with checkpoint_to_resume(saver, state, engine.logger) as path:
        if path is not None:
            load_checkpoint(path, state, None)
    resumed_from = int(state.timestamp.batch)
    assert (resumed_from > 0) == resume
    engine.run_event(Event.FIT_START)
    for _ in range(num_batches):
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=1)
        engine.run_event(Event.BATCH_CHECKPOINT)
        engine.run_event(Event.BATCH_END)
    engine.run_event(Event.FIT_END)
    engine.close()
    return saver, resumed_from


@pytest.fixture(params=["memory", "file", "s3", "sftp", "sftp-root"])
def bucket(request, tmp_path):
    """Give the address of a place in a store of each kind."""
    match request.param:
        case "memory":
            return f"memory://{uuid.uuid4().hex}"
        case "file":
            return f"file://{tmp_path}"
        case "s3":
            return f"s3://{request.getfixturevalue('s3_bucket')}"
    server = request.getfixturevalue("sftp_server")
    return f"sftp://me@127.0.0.1:{server.port}{'/' if request.param == 'sftp-root' else ''}"


def test_an_experiment_saves_below_its_address_and_resumes_its_own_run(bucket):
    """Both experiments saved to `plum/checkpoints`, so that B went on from A's weights, of batch 2."""
    first, second = f"{bucket}/experiment-A/{{run_name}}", f"{bucket}/experiment-B/{{run_name}}"
    saver, _ = run(first)
    run(second)
    assert run(first, resume=True)[1] == 2
    expected = [f"{bucket}/experiment-A/plum/ba{batch}.pt" for batch in (1, 2)]
    assert saver.saved_checkpoints == list(saver.all_saved_checkpoints_to_timestamp) == expected
    for address in saver.saved_checkpoints:  # which were in a folder that is deleted
        with maybe_create_object_store_from_uri(address) as store:
            assert store.get_object_size(parse_uri(address).path) > 0
            others = store.list_objects(parse_uri(f"{bucket}/experiment-B/plum/").path.lstrip("/"))
    assert [name.rpartition("/")[2] for name in others] == ["ba1.pt", "ba2.pt", "latest-rank0.pt.symlink"]


@pytest.mark.parametrize(
    ("folder", "below"),
    [
        ("", "plum/checkpoints"),
        ("/", "plum/checkpoints"),
        ("/deep/er/", "deep/er"),
        ("/of-{world_size}/{run_name}/{rank}-{local_rank}-{node_rank}", "of-1/plum/0-0-0"),
    ],
)
def test_placeholders_in_the_path_of_an_address_are_filled_in(folder, below):
    """The path was not looked at, whatever was in it, and neither was `filename`."""
    bucket = f"memory://{uuid.uuid4().hex}"
    saver, _ = run(bucket + folder)
    assert saver.saved_checkpoints == [f"{bucket}/{below}/ba{batch}.pt" for batch in (1, 2)]
    names = [f"{below}/{name}" for name in ("ba1.pt", "ba2.pt", "latest-rank0.pt.symlink")]
    assert FsspecObjectStore(bucket).list_objects()[1:] == names
    assert run(bucket + folder, resume=True)[1] == 2


def test_a_name_that_was_given_counts_from_the_bucket_as_ever():
    """Scripts that give `remote_file_name` find their checkpoints where they were."""
    bucket = f"memory://{uuid.uuid4().hex}"
    names = {"remote_file_name": "own/{batch}.pt", "latest_remote_file_name": "own/last"}
    saver, _ = run(f"{bucket}/elsewhere", **names)
    assert FsspecObjectStore(bucket).list_objects("own/") == ["own/1.pt", "own/2.pt", "own/last.symlink"]
    assert saver.saved_checkpoints == [f"{bucket}/own/1.pt", f"{bucket}/own/2.pt"]


def test_an_address_that_would_get_nothing_is_refused():
    """All checkpoints were gone at the end of the run, with the temporary folder that they were in."""
    with pytest.raises(ValueError, match=r"uploads nothing, so folder='memory://plums' would get"):
        CheckpointSaver("memory://plums", remote_file_name=None)


def test_what_was_deleted_in_the_store_is_not_among_the_saved_checkpoints():
    """`saved_checkpoints` had temporary files, one for each that is on this machine until the end."""
    bucket = f"memory://{uuid.uuid4().hex}"
    kept_here, _ = run(f"{bucket}/a", num_batches=4, num_checkpoints_to_keep=1)
    assert kept_here.saved_checkpoints == [f"{bucket}/a/ba{batch}.pt" for batch in (1, 2, 3, 4)]
    kept_there, _ = run(f"{bucket}/b", num_batches=4, remote_num_checkpoints_to_keep=2)
    assert kept_there.saved_checkpoints == [f"{bucket}/b/ba{batch}.pt" for batch in (3, 4)]
    names = ["b/ba3.pt", "b/ba4.pt", "b/latest-rank0.pt.symlink"]
    assert FsspecObjectStore(bucket).list_objects("b/") == names


def test_the_trainer_saves_and_resumes_below_its_address():
    """`trainer.saved_checkpoints` had paths that were gone when the Trainer was closed."""
    bucket = f"memory://{uuid.uuid4().hex}"

    def train(folder, max_duration):
        data = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))
        model = ComposerClassifier(torch.nn.Linear(1, 2), num_classes=2)
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=torch.utils.data.DataLoader(data, 2),
            max_duration=max_duration,
            save_folder=f"{bucket}/{folder}/{{run_name}}",
            run_name="plum",
            autoresume=True,
            device="cpu",
        )
        resumed_from = int(trainer.state.timestamp.epoch)
        trainer.fit()
        trainer.close()
        return resumed_from, trainer.saved_checkpoints

    assert train("A", "1ep") == (0, [f"{bucket}/A/plum/ep1-ba2-rank0.pt"])
    assert train("B", "1ep") == (0, [f"{bucket}/B/plum/ep1-ba2-rank0.pt"])
    assert train("A", "2ep") == (1, [f"{bucket}/A/plum/ep2-ba4-rank0.pt"])
