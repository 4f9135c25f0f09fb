"""A trained model becomes a version of one in MLflow's registry."""

import os
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from composer import Trainer
from composer.callbacks import HuggingFaceCheckpointer
from composer.loggers import LoggerDestination
from composer.models import HuggingFaceModel

VOCABULARY = 256


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture
def model():
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture
def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=letters[0])


@pytest.fixture
def fit():
    """Train a model for two batches."""

    def run(model, checkpointer, loggers):
        tokens = torch.arange(16).view(2, 8)
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            train_dataloader=[{"input_ids": tokens, "labels": tokens}] * 2,
            device_train_microbatch_size=2,
            max_duration="1ep",
            progress_bar=False,
            callbacks=checkpointer,
            loggers=loggers,
        )
        try:
            trainer.fit()
        finally:
            trainer.close()

    return run


class Registry(LoggerDestination):
    """Registers models in a folder, as an MLFlowLogger does with a server."""

    def __init__(self, folder):
        self.folder, self.run_id, self.client, self.versions = folder, "run", self, []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def save_model(self, flavor, *, path, transformers_model, **arguments):
        source = transformers_model if isinstance(transformers_model, str) else transformers_model["model"].name_or_path
        shutil.copytree(source, path)
        self.saved = (flavor, arguments)

    def log_artifacts(self, run_id, folder, path):
        shutil.copytree(folder, self.folder / run_id / path)

    def get_run(self, run_id):
        return SimpleNamespace(info=SimpleNamespace(artifact_uri=os.fspath(self.folder / run_id)))

    def register_model_with_run_id(self, model_uri, name, await_creation_for):
        self.may_answer.wait()
        self.versions.append((model_uri, name, await_creation_for))


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry")


@pytest.mark.parametrize(
    ("where", "only", "folders"),
    [("runs", False, ["ba1", "ba2"]), ("runs", True, None), ("memory://hub/{run_name}", False, None)],
)
def test_the_last_folder_is_registered(where, only, folders, model, tokenizer, registry, fit, tmp_path):
    checkpointer = HuggingFaceCheckpointer(
        where if "://" in where else str(tmp_path / where),
        save_interval="1ba",
        precision="bfloat16",
        mlflow_registered_model_name="plum",
        mlflow_logging_config={"metadata": {"size": "small"}, "task": "llm/v1/chat"},
        final_register_only=only,
        register_wait_seconds=50,
    )
    fit(HuggingFaceModel(model, tokenizer), checkpointer, registry)

    ((uri, name, _),) = registry.versions
    assert (uri, name) == (os.fspath(registry.folder / "run" / "final_model_checkpoint"), "plum")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(uri, dtype=torch.bfloat16)
    assert all(torch.equal(loaded.state_dict()[k], v.bfloat16()) for k, v in model.state_dict().items())
    flavor, arguments = registry.saved
    assert flavor == "transformers"
    assert arguments["metadata"] == {"task": "llm/v1/chat", "size": "small"}
    assert list(arguments["input_example"]) == ["messages"]
    place = tmp_path / "runs" / "huggingface"
    assert (sorted(os.listdir(place)) if place.exists() else None) == folders


# peft 0.21 asks models of transformers 5 by an older name of the property.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_registered_with_the_name_of_its_base(model, registry, fit, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    checkpointer = HuggingFaceCheckpointer(
        str(tmp_path),
        save_interval="1ep",
        mlflow_registered_model_name="plum",
        mlflow_logging_config={"metadata": {"pretrained_model_name": "someone/base"}},
    )
    fit(HuggingFaceModel(model, peft_config=config), checkpointer, registry)
    ((uri, _, _),) = registry.versions
    assert peft.PeftConfig.from_pretrained(uri).base_model_name_or_path == "someone/base"
    assert os.path.exists(f"{uri}/adapter_model.safetensors")


def test_a_registry_that_does_not_answer_is_told_in_time(model, tokenizer, registry, fit, tmp_path):
    registry.may_answer.clear()
    checkpointer = HuggingFaceCheckpointer(
        str(tmp_path), save_interval="1dur", mlflow_registered_model_name="plum", register_wait_seconds=0.3
    )
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"register_wait_seconds=0\.3"):
        fit(HuggingFaceModel(model, tokenizer), checkpointer, registry)
    assert time.monotonic() - began < 60
    registry.may_answer.set()


def test_a_registry_that_refuses_ends_the_fit_with_its_words(model, tokenizer, registry, fit, tmp_path):
    registry.run_id = None
    checkpointer = HuggingFaceCheckpointer(str(tmp_path), save_interval="1dur", mlflow_registered_model_name="plum")
    with pytest.raises(RuntimeError, match="has no run of MLflow"):
        fit(HuggingFaceModel(model, tokenizer), checkpointer, registry)


def test_what_registering_needs_is_asked_for_before_training(model, tokenizer, registry, fit, tmp_path):
    def checkpointer():
        return HuggingFaceCheckpointer(str(tmp_path), save_interval="1ba", mlflow_registered_model_name="plum")

    with pytest.raises(ValueError, match="needs an MLFlowLogger"):
        fit(HuggingFaceModel(model, tokenizer), checkpointer(), [])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        fit(HuggingFaceModel(model), checkpointer(), registry)
    assert not (tmp_path / "huggingface").exists()
    with pytest.warns(UserWarning, match="no mlflow_registered_model_name"):
        assert not HuggingFaceCheckpointer(str(tmp_path), "1ba", final_register_only=True).final_register_only


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own code
def test_mlflow_itself_loads_what_was_registered(model, tokenizer, fit, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    from composer.loggers import MLFlowLogger

    monkeypatch.chdir(tmp_path)
    logger = MLFlowLogger("plums", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", log_system_metrics=False)
    checkpointer = HuggingFaceCheckpointer(str(tmp_path), save_interval="1dur", mlflow_registered_model_name="plum")
    fit(HuggingFaceModel(model, tokenizer), checkpointer, logger)

    version = mlflow.MlflowClient().get_model_version("plum", "1")
    assert (version.status, version.run_id) == ("READY", logger.run_id)
    components = mlflow.transformers.load_model("models:/plum/1", return_type="components")
    assert torch.equal(components["model"].transformer.wte.weight, model.transformer.wte.weight)
    assert components["tokenizer"]("to be")["input_ids"] == tokenizer("to be")["input_ids"]
