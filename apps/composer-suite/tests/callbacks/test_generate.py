"""Generate with a model that counts: after each letter comes the next one of the alphabet."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.callbacks import Generate
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.utils import dist
from composer_dist.testing import run_ranks

PAD, END = 0, 1
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Tokenizer:
    """Letters as tokens, in the way of Hugging Face's tokenizers."""

    def __init__(self, pad_token="<pad>"):
        self.padding_side = "right"
        self.eos_token = "<end>"
        self.pad_token = pad_token
        self.sides = []

    @property
    def pad_token_id(self):
        return {None: None, "<pad>": PAD, "<end>": END}[self.pad_token]

    def __call__(self, prompts, return_tensors, padding):
        assert return_tensors == "pt"
        assert padding
        self.sides.append(self.padding_side)
        longest = max(map(len, prompts))
        rows = [[self.pad_token_id] * (longest - len(text)) + [2 + LETTERS.index(c) for c in text] for text in prompts]
        tokens = torch.tensor(rows)
        return {"input_ids": tokens, "attention_mask": (tokens > END).long()}

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(LETTERS[token - 2] for token in row if token > END) for row in rows]


class Counter(ComposerModel):
    def __init__(self, tokenizer=None, gives_prompt_back=True):
        super().__init__()
        self.embedding = nn.Embedding(32, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)
        self.tokenizer = tokenizer or Tokenizer()
        self.gives_prompt_back = gives_prompt_back
        self.calls = []

    def forward(self, batch):
        return self.head(self.dropout(self.embedding(batch[0])))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def generate(self, input_ids, attention_mask, synced_gpus, max_new_tokens=3, do_sample=False):
        self.calls.append((len(input_ids), self.training, synced_gpus, torch.is_grad_enabled()))
        steps = torch.randint(5, (max_new_tokens,)).cumsum(0) if do_sample else torch.arange(1, max_new_tokens + 1)
        new = input_ids[:, -1:] + steps
        return torch.cat([input_ids, new], dim=1) if self.gives_prompt_back else new


def train(generate, model=None, duration="2ep", **settings):
    """Train on three batches an epoch; return the table that was logged and the trainer."""
    model = model or Counter()
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    kept = InMemoryLogger()
    data = TensorDataset(torch.arange(6), torch.arange(6) % 2)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=2, sampler=dist.get_sampler(data)),
        max_duration=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=generate,
        loggers=kept,
        device="cpu",
        progress_bar=False,
        seed=7,
        **settings,
    ) as trainer:
        trainer.fit()
    return json.loads(kept.tables["generations"]) if "generations" in kept.tables else None, trainer


def weights_after(callbacks):
    _, trainer = train(callbacks, Counter())
    return copy.deepcopy(trainer.state.model.state_dict())


def test_what_follows_on_each_prompt_is_logged_in_the_order_of_the_prompts():
    table, _ = train(Generate(["a", "bcd", "x"], "1ep", batch_size=2, max_new_tokens=2))
    assert table == {"columns": ["prompt", "generation"], "data": [["a", "bc"], ["bcd", "ef"], ["x", "yz"]]}


def test_models_that_do_not_give_the_prompt_back_log_the_same():
    table, _ = train(Generate(["a", "bcd"], "1ep", max_new_tokens=2), Counter(gives_prompt_back=False))
    assert table["data"] == [["a", "bc"], ["bcd", "ef"]]


@pytest.mark.parametrize(
    ("interval", "firings"),
    [("1ba", 6), ("4ba", 2), (1, 2), ("1ep", 2), ("9ep", 1), ("0.5dur", 2)],
)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_every_interval_and_the_end_of_training_generate_once(interval, firings, batch_size):
    model = Counter()
    train(Generate(["a", "b", "c"], interval, batch_size=batch_size), model)
    assert len(model.calls) == firings * (1 if batch_size is None else 2)


def test_the_last_batch_generates_once_however_many_events_end_it():
    generate = Generate(["a"], "1ba")
    model = Counter()
    _, trainer = train(generate, model, duration="3ba")
    assert trainer.state.timestamp.epoch == 1  # the end of the epoch, of training and of the batch are one
    assert len(model.calls) == 3


def test_the_model_evaluates_without_gradients_and_trains_on_as_before():
    model = Counter()
    model.dropout.eval()  # frozen by its user
    train(Generate(["a"], "1ba"), model)
    assert set(model.calls) == {(1, False, False, False)}
    assert model.training
    assert model.head.training


@pytest.mark.parametrize("do_sample", [False, True])
def test_training_goes_on_as_if_nothing_had_been_generated(do_sample):
    generate = Generate(["a"], "1ba", do_sample=do_sample)
    without, with_it = weights_after([]), weights_after(generate)
    assert all(torch.equal(without[name], with_it[name]) for name in without)  # dropout drew the same


@pytest.mark.parametrize("pad_token", [None, "<pad>"])
def test_prompts_are_padded_on_the_left_and_the_tokenizer_is_as_before(pad_token):
    tokenizer = Tokenizer(pad_token)
    train(Generate(["a", "bcd"], "9ep"), Counter(tokenizer))
    assert tokenizer.sides == ["left"]
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("right", pad_token)


def test_modes_are_restored_when_generating_fails():
    model = Counter()
    with pytest.raises(TypeError, match="no_such_setting"):
        train(Generate(["a"], "1ba", no_such_setting=1), model)
    assert model.training
    assert model.tokenizer.padding_side == "right"


def test_a_model_that_cannot_generate_is_named(make_trainer):
    with pytest.raises(ValueError, match="ComposerClassifier cannot generate text: it needs a method 'generate'"):
        make_trainer(callbacks=Generate(["a"], "1ba"), max_duration="1ep").fit()


def test_a_model_without_a_tokenizer_is_named():
    model = Counter()
    model.tokenizer = None
    with pytest.raises(ValueError, match="Counter cannot generate text: it needs"):
        train(Generate(["a"], "1ba"), model)


@pytest.mark.parametrize(("settings", "said"), [({"prompts": []}, "prompts="), ({"batch_size": 0}, "batch_size=0")])
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Generate(**{"prompts": ["a"], "interval": "1ba", **settings})


def rows_of_this_rank():
    table, trainer = train(Generate(["a", "b"], "9ep", batch_size=1), duration="1ep")
    return table and table["data"], trainer.state.model.module.calls


def test_every_rank_generates_and_rank_zero_logs(tmp_path):
    (rows, calls), (nothing, other_calls) = run_ranks(rows_of_this_rank, store=tmp_path / "store")
    assert rows == [["a", "bcd"], ["b", "cde"]]
    assert nothing is None
    assert calls == other_calls == [(1, False, True, False)] * 2
