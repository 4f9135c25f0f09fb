"""Stores that have no server here: how they are addressed, and what is said when credentials are missing."""

import os

import pytest

from composer_checkpoint.remote.fetch import maybe_create_object_store_from_uri
from composer_checkpoint.stores import AzureObjectStore, FsspecObjectStore, GCSObjectStore, OCIObjectStore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """A user without any credentials, on a machine in no cloud."""
    for name in ("GCS_KEY", "GCS_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "OCI_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))


def test_google_without_credentials_names_what_to_set():
    with pytest.raises(ValueError, match="GCS_KEY and GCS_SECRET"):
        GCSObjectStore("bucket")


def test_google_s_emulator_needs_no_credentials(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    assert GCSObjectStore("bucket", "prefix/").get_uri("x") == "gs://bucket/prefix/x"


def test_oracle_without_credentials_names_what_to_set(monkeypatch):
    with pytest.raises(ValueError, match="OCI_CONFIG_FILE"):
        maybe_create_object_store_from_uri("oci://bucket@namespace/x")
    monkeypatch.setenv("OCI_CONFIG_FILE", "/no/such/file")
    with pytest.raises(ValueError, match="'/no/such/file' is not a file"):
        OCIObjectStore("bucket")


@pytest.mark.parametrize("scheme", ["azure", "az"])
def test_azure_without_credentials_names_what_to_set(scheme, monkeypatch):
    """Seen before: "unable to connect to account for Must provide either a connection_string or account_name"."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"az://box.* needs credentials.*AZURE_STORAGE_CONNECTION_STRING"):
        maybe_create_object_store_from_uri(f"{scheme}://box/x")


def test_azure_s_account_comes_from_the_variables_that_composer_names(monkeypatch):
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "someone")
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "c2VjcmV0")
    store = maybe_create_object_store_from_uri("azure://box/x")
    assert isinstance(store, AzureObjectStore)
    assert store.get_uri("x") == "az://box/x"
    assert (store.filesystem.account_name, store.filesystem.account_key) == ("someone", "c2VjcmV0")


def test_a_repository_of_hugging_face_is_a_store():
    store = maybe_create_object_store_from_uri("hf://someone/model/ep1.pt")
    assert isinstance(store, FsspecObjectStore)
    assert store.get_uri("model/ep1.pt") == "hf://someone/model/ep1.pt"
