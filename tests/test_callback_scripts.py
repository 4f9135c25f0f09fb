"""Callbacks in scripts as users write them: the Trainer guide's, with what it names but does not show, and a model of
Hugging Face that is asked for texts while it trains.
"""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MONITORS = """
from composer import Trainer
from composer.callbacks import LRMonitor, MemoryMonitor, RuntimeEstimator, SpeedMonitor, SystemMetricsMonitor

# "several useful callbacks for things such as monitoring throughput and memory usage during training"
trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='2ep',
    device='cpu',
    loggers=logger,
    callbacks=[
        SpeedMonitor(window_size=2),
        RuntimeEstimator(),
        LRMonitor(),
        MemoryMonitor(),
        SystemMetricsMonitor(),
    ],
)
trainer.fit()
"""

OWN_CALLBACK = """
from composer import Callback, Logger, State, Trainer
from composer.callbacks import EarlyStopper, ExportForInferenceCallback

class EpochCounter(Callback):
    def __init__(self):
        self.epochs = 0

    def epoch_end(self, state: State, logger: Logger) -> None:
        self.epochs += 1
        logger.log_metrics({'epochs': self.epochs})

trainer = Trainer(
    model=model,
    train_dataloader=train_dataloader,
    eval_dataloader=eval_dataloader,
    max_duration='9ep',
    device='cpu',
    loggers=logger,
    callbacks=[
        EpochCounter(),
        EarlyStopper('MulticlassAccuracy', 'eval', patience='2ep', min_delta=1.1),
        ExportForInferenceCallback(save_format='onnx', save_path=f'{folder}/model.onnx'),
    ],
)
trainer.fit()
"""

NO_OPTIMIZER = pytest.mark.filterwarnings("ignore:No optimizer was specified:UserWarning")


@pytest.fixture
def run():
    """Run a script with what it leaves to its reader, and return all its names."""
    trainers = []

    def run(text, **names):
        exec(compile(text, "<published>", "exec"), names)
        trainers.append(names["trainer"])
        return names

    yield run
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def for_scripts(tmp_path):
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerClassifier

    torch.manual_seed(0)
    data = TensorDataset(torch.rand(12, 4), torch.arange(12) % 3)
    return {
        "model": ComposerClassifier(nn.Linear(4, 3), num_classes=3),
        "train_dataloader": DataLoader(data, batch_size=4),
        "eval_dataloader": DataLoader(data, batch_size=4),
        "logger": InMemoryLogger(),
        "folder": str(tmp_path),
    }


@NO_OPTIMIZER
@pytest.mark.filterwarnings("ignore:The memory monitor only works on CUDA:UserWarning")
def test_the_monitors_that_the_trainer_guide_speaks_of(run, for_scripts):
    logger = run(MONITORS, **for_scripts)["logger"]
    assert len(logger.data["throughput/samples_per_sec"]) == 4
    assert len(logger.data["time/remaining_estimate"]) == 5
    assert len(logger.data["cpu_percentage"]) == 6 + 6  # batches of training and of evaluation
    assert "lr-DecoupledSGDW/group0" in logger.data


@NO_OPTIMIZER
def test_a_callback_of_ones_own_beside_those_that_stop_and_export(run, for_scripts):
    onnx = pytest.importorskip("onnx")
    names = run(OWN_CALLBACK, **for_scripts)
    # No step is as large as 1.1, so the first evaluation stays the best, and the second one after it waits too long.
    assert [float(value) for _, value in names["logger"].data["epochs"]] == [1, 2, 3, 4]
    onnx.checker.check_model(f"{for_scripts['folder']}/model.onnx")


@pytest.fixture
def language_model():
    """Make a tiny GPT-2 that knows eight words, in the form of a ComposerModel."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")

    from composer.models import ComposerModel

    numbers = ["<end>", "one", "two", "three", "four", "five", "six", "seven"]
    words = {word: number for number, word in enumerate(numbers)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )

    class LanguageModel(ComposerModel):
        def __init__(self):
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(config)
            self.tokenizer = tokenizer

        def forward(self, batch):
            return self.model(input_ids=batch[0], labels=batch[0])

        def loss(self, outputs, batch):
            return outputs.loss

        def generate(self, input_ids, **settings):
            return self.model.generate(input_ids=input_ids, **settings)

    return LanguageModel()


def test_a_model_of_hugging_face_goes_on_with_prompts_while_it_trains(language_model):
    from composer import Trainer
    from composer.callbacks import Generate
    from composer.loggers import InMemoryLogger

    logger = InMemoryLogger()
    counting = torch.arange(1, 8).repeat(8, 1)
    # Of one prompt each word follows from the one before; it is learned by heart within these steps.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="transformers")
        with Trainer(
            model=language_model,
            train_dataloader=DataLoader(TensorDataset(counting), batch_size=8),
            max_duration="150ba",
            optimizers=torch.optim.Adam(language_model.parameters(), lr=0.02),
            callbacks=Generate(["one two", "one"], interval="100ba", batch_size=1, max_new_tokens=3, do_sample=False),
            loggers=logger,
            device="cpu",
            progress_bar=False,
            seed=1,
        ) as trainer:
            trainer.fit()
    assert json.loads(logger.tables["generations"]) == {
        "columns": ["prompt", "generation"],
        "data": [["one two", "three four five"], ["one", "two three four"]],
    }
    assert language_model.tokenizer.pad_token is None
