"""What is said of stores that do not answer: a server on loopback takes connections and never says a word."""

import socket
import time

import pytest

from composer_checkpoint.errors import StorageError
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.stores import opening
from composer_checkpoint.stores.opening import list_remote_objects

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ADDRESSES = {
    "s3": "s3://bucket/run/latest.pt",
    "gs": "gs://bucket/run/latest.pt",
    "gcs": "gcs://bucket/run/latest.pt",
    "azure": "azure://container/run/latest.pt",
    "unity": "dbfs:/Volumes/a/b/c/run/latest.pt",
    "mlflow": "dbfs:/databricks/mlflow-tracking/1/2/artifacts/latest.pt",
}


@pytest.fixture(params=ADDRESSES)
def silent(request, monkeypatch):
    """Give the address of a store whose server is silent."""
    pytest.importorskip(
        {"unity": "databricks.sdk"}.get(request.param, "mlflow" if request.param == "mlflow" else "fsspec")
    )
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        connection = f"DefaultEndpointsProtocol=http;AccountName=me;AccountKey=bWU=;BlobEndpoint={url}/me;"
        for name, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "S3_ENDPOINT_URL": url,
            "STORAGE_EMULATOR_HOST": url,
            "AZURE_STORAGE_CONNECTION_STRING": connection,
            "DATABRICKS_HOST": url,
            "DATABRICKS_TOKEN": "testing",
            "MLFLOW_TRACKING_URI": "databricks",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(opening, "_FIRST_ANSWER_S", 1.0)
        monkeypatch.setattr(opening, "_answered", set())
        yield ADDRESSES[request.param]


@pytest.mark.parametrize("way", ["saves", "loads", "lists"])
def test_a_store_that_is_silent_is_an_error_soon_that_says_what_to_check(silent, way, tmp_path):
    """Nothing was heard of `gcs://` for more than 90 s, and of Azure, MLflow and Unity Catalog for two minutes."""
    uses = {
        "saves": lambda: RemoteUploader(silent).init(),
        "loads": lambda: get_file(silent, tmp_path / "latest.pt", progress_bar=False),
        "lists": lambda: list_remote_objects(silent),
    }
    began = time.monotonic()
    with pytest.raises(StorageError, match="did not respond within") as caught:
        uses[way]()
    assert time.monotonic() - began < 80  # with what it takes to load the libraries on a busy machine
    for advice in ("credentials", "network", "endpoint"):
        assert advice in str(caught.value)
    assert silent.partition("/")[0] in str(caught.value) or "az:" in str(caught.value)


def test_what_a_store_may_take_leaves_time_to_say_so():
    """The promise is an error within 20 s, with what it takes to load the libraries."""
    assert opening._FIRST_ANSWER_S <= 15
