"""Three shapes of projects that build on Composer: each trains, saves, resumes, evaluates and exports."""

import atexit
import gc
import re
import weakref
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from composer import Algorithm, Callback, Evaluator, Event, Trainer
from composer._former_modules import GONE
from composer.algorithms import GradientClipping
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.core import Precision, TimeUnit
from composer.loggers import InMemoryLogger
from composer.models import ComposerGPT, ComposerModel, HuggingFaceModel
from composer.optim import ComposerScheduler, DecoupledAdamW
from composer.optim.scheduler import _convert_time
from composer.utils import create_interval_scheduler, dist, export_for_inference, reproducibility

PAGE = Path(__file__).parents[2] / "docs/coming-from/projects.md"


class Tokens(Dataset):
    def __init__(self, count, labels=None):
        self.ids = torch.randint(4, 32, (count, 8), generator=torch.Generator().manual_seed(0))
        self.labels = labels

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        label = ids if self.labels is None else ids.sum() % self.labels
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label}


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# A trainer of language models that is driven by YAML, with registries of its own.


class InverseSquareRoot(ComposerScheduler):
    """A schedule that converts its times with the helper of Composer's schedulers."""

    def __init__(self, t_warmup, t_scale):
        self.t_warmup, self.t_scale = t_warmup, t_scale

    def __call__(self, state, ssr=1.0):
        warmup = _convert_time(self.t_warmup, state, ssr=ssr)
        scale = _convert_time(self.t_scale, state, ssr=ssr)
        now = state.timestamp.get(warmup.unit)
        if now < warmup:
            return now.value / warmup.value
        return (scale.value / (scale.value + now.value - warmup.value)) ** 0.5


class LogsAtIntervals(Callback):
    """One concern, with an interval of its own."""

    def __init__(self, interval):
        self.is_due = create_interval_scheduler(interval, include_end_of_training=True)

    def run_event(self, event, state, logger):
        if self.is_due(state, event):
            logger.log_metrics({"project/tokens": int(state.timestamp.get(TimeUnit.TOKEN))})


REGISTRY = {
    "model": {"gpt": ComposerGPT},
    "optimizer": {"decoupled_adamw": DecoupledAdamW},
    "scheduler": {"inv_sqrt": InverseSquareRoot},
    "callback": {"lr_monitor": LRMonitor, "speed_monitor": SpeedMonitor, "logs_at_intervals": LogsAtIntervals},
    "algorithm": {"gradient_clipping": GradientClipping},
}

PROJECT = """
model: {name: gpt, cfg: {d_model: 16, n_heads: 2, n_layers: 1, vocab_size: 32, max_seq_len: 8}}
optimizer: {name: decoupled_adamw, lr: 0.01, betas: [0.9, 0.95]}
scheduler: {name: inv_sqrt, t_warmup: 2ba, t_scale: 2ba}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}
callbacks: {lr_monitor: {}, speed_monitor: {window_size: 1}, logs_at_intervals: {interval: 3ba}}
trainer: {max_duration: 8ba, eval_interval: 4ba, save_interval: 4ba, seed: 17, device_train_microbatch_size: 2}
"""


def make(kind, settings, *arguments):
    settings = dict(settings)
    return REGISTRY[kind][settings.pop("name")](*arguments, **settings)


def train_from_yaml(folder, **changes):
    config = yaml.safe_load(PROJECT)
    reproducibility.seed_all(config["trainer"]["seed"])
    dist.initialize_dist("cpu", timeout=60)
    model = make("model", config["model"])
    train, held_out = Tokens(32), Tokens(8)
    trainer = Trainer(
        run_name="project",
        model=model,
        train_dataloader=DataLoader(train, 4, sampler=dist.get_sampler(train, shuffle=True)),
        eval_dataloader=[
            Evaluator(label="eval", dataloader=DataLoader(held_out, 4, sampler=dist.get_sampler(held_out)))
        ],
        optimizers=make("optimizer", config["optimizer"], model.parameters()),
        schedulers=make("scheduler", config["scheduler"]),
        algorithms=[make("algorithm", {"name": name, **given}) for name, given in config["algorithms"].items()],
        callbacks=[make("callback", {"name": name, **given}) for name, given in config["callbacks"].items()],
        loggers=InMemoryLogger(),
        save_folder=str(folder),
        autoresume=True,
        precision=Precision.FP32,
        progress_bar=False,
        device="cpu",
        **{**config["trainer"], **changes},
    )
    trainer.fit()
    trainer.close()
    return trainer


def test_a_trainer_of_language_models_with_registries_of_its_own(tmp_path):
    whole = train_from_yaml(tmp_path / "whole")
    train_from_yaml(tmp_path / "parts", max_duration="4ba")
    resumed = train_from_yaml(tmp_path / "parts")
    assert_equal(weights_of(resumed), weights_of(whole))
    (logged,) = [each for each in whole.logger.destinations if isinstance(each, InMemoryLogger)]
    assert [value for _, value in logged.data["project/tokens"]] == [96, 192, 256]
    assert "metrics/eval/LanguageCrossEntropy" in logged.data
    batch, model = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}, whole.state.model
    export_for_inference(model, "export", tmp_path / "gpt.pt2", sample_input=(batch,))
    exported = torch.export.load(tmp_path / "gpt.pt2").module()
    torch.testing.assert_close(exported(batch), model.eval()(batch))


# A BERT that is trained on one task after another in one process.


class Job:
    """One task, whose trainer is taken apart afterwards."""

    def __init__(self, folder, num_labels, load_path=None):
        config = transformers.BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=num_labels,
        )
        torch.manual_seed(17)
        module = transformers.BertForSequenceClassification(config)
        model = HuggingFaceModel(
            module, use_logits=True, metrics=[MulticlassAccuracy(num_classes=num_labels, average="micro")]
        )
        data = Tokens(16, num_labels)
        self.trainer = Trainer(
            model=model,
            optimizers=DecoupledAdamW(model.parameters(), lr=1e-3),
            train_dataloader=DataLoader(data, 4),
            eval_dataloader=Evaluator(
                label=f"task{num_labels}", dataloader=DataLoader(data, 8), metric_names=["MulticlassAccuracy"]
            ),
            max_duration="2ep",
            load_path=load_path,
            load_weights_only=load_path is not None,
            load_strict_model_weights=False,
            load_ignore_keys=["state/model/model.classifier*"] if load_path else None,
            save_folder=str(folder),
            save_num_checkpoints_to_keep=1,
            save_weights_only=True,
            progress_bar=False,
            device="cpu",
            seed=17,
        )

    def run(self):
        trainer = self.trainer
        trainer.fit()
        checkpoint = trainer.saved_checkpoints[-1]
        ((_, metrics),) = ((label, each) for label, each in trainer.state.eval_metrics.items() if each)
        values = {name: float(metric.compute()) for name, metric in metrics.items()}
        self.take_apart()
        return checkpoint, values

    def take_apart(self):
        trainer = self.trainer
        trainer.close()
        atexit.unregister(trainer.engine._close)
        for key in list(trainer.state.__dict__):
            delattr(trainer.state, key)
        for key in list(trainer.__dict__):
            delattr(trainer, key)
        del self.trainer
        gc.collect()


def test_tasks_one_after_another_each_from_the_weights_of_the_one_before(tmp_path):
    job = Job(tmp_path / "first", 3)
    is_alive = weakref.ref(job.trainer.state.model)
    checkpoint, values = job.run()
    assert set(values) == {"MulticlassAccuracy"}
    assert is_alive() is None  # nothing keeps the model of a task that has ended
    second = Job(tmp_path / "second", 2, load_path=str(checkpoint))
    name = "model.bert.encoder.layer.0.output.dense.weight"
    saved = torch.load(checkpoint, weights_only=True)["state"]["model"]
    assert torch.equal(second.trainer.state.model.state_dict()[name], saved[name])
    second.run()


# A diffusion model whose parts are named by `_target_`, as Hydra builds them.


class Denoiser(ComposerModel):
    def __init__(self, width):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))
        self.val_mse = MeanSquaredError()
        self.generator = None

    def forward(self, batch):
        noise = torch.randn(batch["image"].shape, generator=self.generator)
        return self.net(batch["image"] + noise), noise

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(*outputs)

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train=False):
        return {} if is_train else {"MeanSquaredError": self.val_mse}

    def update_metric(self, batch, outputs, metric):
        metric.update(*outputs)


class SeedsEvaluation(Callback):
    """Draw the same noise in each evaluation."""

    def eval_start(self, state, logger):
        state.model.generator = torch.Generator().manual_seed(state.rank_zero_seed)

    def eval_batch_end(self, state, logger):
        assert int(state.eval_timestamp.batch) >= 1

    def eval_end(self, state, logger):
        state.model.generator = None


class Images(Dataset):
    def __init__(self, count):
        self.images = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index]}


class ScalesImages(Algorithm):
    def match(self, event, state):
        return event == Event.AFTER_DATALOADER

    def apply(self, event, state, logger):
        state.batch = {"image": 0.5 * state.batch["image"]}


HYDRA = """
width: 8
here: tests_of_projects
model: {_target_: "${here}.Denoiser", width: "${width}"}
train: {_target_: torch.utils.data.DataLoader, batch_size: 4, dataset: {_target_: "${here}.Images", count: 16}}
eval: {_target_: torch.utils.data.DataLoader, batch_size: 4, dataset: {_target_: "${here}.Images", count: 8}}
optimizer: {_target_: torch.optim.AdamW, lr: 0.01}
scheduler: {_target_: composer.optim.LinearWithWarmupScheduler, t_warmup: 2ba}
callbacks: {seeds: {_target_: "${here}.SeedsEvaluation"}, lr: {_target_: composer.callbacks.LRMonitor}}
algorithms: {scales: {_target_: "${here}.ScalesImages"}}
trainer:
  _target_: composer.Trainer
  device: cpu
  seed: 17
  eval_interval: 2ba
  save_interval: 2ba
  save_filename: "ba{batch}.pt"
  run_name: denoiser
  progress_bar: false
"""


def instantiate(config, **more):
    """Build what `_target_` names, as `hydra.utils.instantiate` does."""
    if not isinstance(config, dict):
        return config
    values = {name: instantiate(value) for name, value in config.items()} | more
    if "_target_" not in values:
        return values
    module, _, name = values.pop("_target_").rpartition(".")
    found = globals()[name] if module == "tests_of_projects" else getattr(import_module(module), name)
    return found(**values)


def train_denoiser(folder, **changes):
    config = OmegaConf.to_container(OmegaConf.create(HYDRA), resolve=True)
    reproducibility.seed_all(17)
    model = instantiate(config["model"])
    trainer = instantiate(
        config["trainer"],
        model=model,
        train_dataloader=instantiate(config["train"]),
        eval_dataloader=instantiate(config["eval"]),
        optimizers=instantiate(config["optimizer"], params=model.parameters()),
        schedulers=instantiate(config["scheduler"]),
        callbacks=list(instantiate(config["callbacks"]).values()),
        algorithms=list(instantiate(config["algorithms"]).values()),
        save_folder=str(folder),
        **changes,
    )
    trainer.fit()
    trainer.close()
    return trainer


def test_a_diffusion_model_built_from_targets(tmp_path):
    whole = train_denoiser(tmp_path / "whole", max_duration="4ba")
    train_denoiser(tmp_path / "parts", max_duration="2ba")
    resumed = train_denoiser(tmp_path / "more", max_duration="4ba", load_path=str(tmp_path / "parts/ba2.pt"))
    assert_equal(weights_of(resumed), weights_of(whole))
    assert resumed.state.eval_metric_values == whole.state.eval_metric_values
    exported = torch.export.export(whole.state.model.net.eval(), (torch.zeros(2, 4),))
    torch.testing.assert_close(exported.module()(torch.ones(2, 4)), whole.state.model.net(torch.ones(2, 4)))


# Names that are gone.


def test_the_page_names_what_is_gone_and_what_to_take():
    rows = re.findall(r"^\| `(composer\.[\w.]+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == {name: text[0].upper() + text[1:] for name, text in sorted(GONE.items())}


@pytest.mark.parametrize("name", sorted(GONE))
def test_each_of_them_says_so_when_it_is_imported(name):
    module, _, last = name.rpartition(".")
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {last}" if last[0].isupper() else f"import {name}", {})
    assert GONE[name] in str(caught.value)
