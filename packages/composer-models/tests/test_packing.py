import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from composer_models import ComposerGPT, PackedDataset, PackedStream, pack_window, packed_data_spec

SETTINGS = {"d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": 50, "max_seq_len": 12}
IGNORED = -100


def documents_of(lengths):
    """Return documents whose tokens are all different."""
    numbers = itertools.count(1)
    return [[next(numbers) for _ in range(length)] for length in lengths]


def segments(window):
    """Return the documents of a window, without padding, as lists of tokens and labels."""
    starts = [*(window["position_ids"] == 0).nonzero().flatten().tolist(), len(window["position_ids"])]
    pairs = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    return [(window["input_ids"][one].tolist(), window["labels"][one].tolist()) for one in pairs]


def packed(kind, documents, window_size, **arguments):
    made = {"first_fit": PackedDataset, "best_fit": PackedStream}
    if kind in made:
        return list(made[kind](documents, window_size, end_of_document=None, **arguments))
    cls = PackedDataset if kind == "concatenate, map" else PackedStream
    return list(cls(documents, window_size, end_of_document=None, method="concatenate", **arguments))


LENGTHS = st.lists(st.integers(0, 7), max_size=30)


@settings(deadline=None, max_examples=50)
@given(lengths=LENGTHS, kind=st.sampled_from(["first_fit", "best_fit"]), num_open=st.integers(1, 3))
def test_every_document_is_whole_in_exactly_one_window(lengths, kind, num_open):
    documents = documents_of(lengths)
    found = []
    for window in packed(kind, documents, 7, **({"num_open": num_open} if kind == "best_fit" else {})):
        assert {name: value.shape for name, value in window.items()} == dict.fromkeys(window, (7,))
        for tokens, labels in segments(window):
            assert len(labels) < 2 or labels == [IGNORED, *tokens[1:]]
            found += [tokens] if len(tokens) > 1 else []
    assert sorted(found) == [document for document in documents if len(document) > 1]


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(0, 20), max_size=12), kind=st.sampled_from(["map", "stream"]))
def test_concatenation_keeps_all_tokens_in_order_and_no_label_crosses_a_boundary(lengths, kind):
    documents = documents_of(lengths)
    windows = packed(f"concatenate, {kind}", documents, 6)
    tokens = [token for window in windows for token in window["input_ids"].tolist()]
    whole = list(itertools.chain.from_iterable(documents))
    assert tokens[: len(whole)] == whole
    assert set(tokens[len(whole) :]) <= {0}
    assert len(windows) == -(-len(whole) // 6)
    firsts = {document[0] for document in documents if document}
    assert firsts.isdisjoint(label for window in windows for label in window["labels"].tolist())


def test_first_fit_decreasing_is_that_of_the_textbook():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 60, (300,), generator=generator).tolist()
    bins = []
    for length in sorted(lengths, reverse=True):
        place = next((one for one in bins if sum(one) + length <= 64), None)
        if place is None:
            bins.append(place := [])
        place.append(length)
    windows = PackedDataset(documents_of(lengths), 64, end_of_document=None)
    found = [sorted(len(tokens) for tokens, _ in segments(window) if len(tokens) > 1) for window in windows]
    assert found == [sorted(one) for one in bins]
    assert windows.num_tokens == sum(lengths)
    assert windows.efficiency == sum(lengths) / (len(bins) * 64) > 0.95


@pytest.mark.parametrize("kind", ["first_fit", "best_fit"])
@pytest.mark.parametrize(
    ("too_long", "expected"),
    [("split", [[1, 2, 3, 4], [5, 6], [7, 8]]), ("truncate", [[1, 2, 3, 4], [7, 8]]), ("drop", [[7, 8]])],
)
def test_a_document_longer_than_the_window_is_cut_or_left_out_as_asked(kind, too_long, expected):
    windows = packed(kind, documents_of([6, 2]), 4, too_long=too_long)
    assert sorted(tokens for one in windows for tokens, _ in segments(one) if len(tokens) > 1) == expected


@pytest.mark.parametrize("cls", [PackedDataset, PackedStream])
def test_the_end_token_is_appended_and_learned_and_masked_tokens_are_left_out(cls):
    document = {"input_ids": [0, 5, 6, 7], "labels": [0, 5, -100, 7], "attention_mask": [0, 1, 1, 1], "text": "a"}
    (window,) = cls([document], 6, end_of_document=SimpleNamespace(eos_token_id=9))
    assert window["input_ids"].tolist() == [5, 6, 7, 9, 9, 9]
    assert window["labels"].tolist() == [-100, -100, 7, 9, -100, -100]
    assert window["position_ids"].tolist() == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("num_read", range(12))
@pytest.mark.parametrize("method", ["best_fit", "concatenate"])
@pytest.mark.parametrize("restores", [False, True])
def test_a_stream_continues_from_its_state(num_read, method, restores):
    documents = documents_of([5, 2, 3, 6, 2, 2, 7, 4, 3, 2, 5, 6])
    source = Restoring(documents) if restores else documents
    stream = PackedStream(source, 8, end_of_document=None, method=method, num_open=2)
    windows = iter(stream)
    for _ in range(num_read):
        next(windows, None)
    state = copy.deepcopy(windows.state_dict())
    expected = list(windows)
    resumed = iter(PackedStream(copy.deepcopy(source), 8, end_of_document=None, method=method, num_open=2))
    resumed.load_state_dict(state)
    assert [one["input_ids"].tolist() for one in resumed] == [one["input_ids"].tolist() for one in expected]


class Restoring:
    """Documents that restore their position themselves."""

    def __init__(self, documents):
        self.documents, self.place = documents, 0

    def __iter__(self):
        while self.place < len(self.documents):
            self.place += 1
            yield self.documents[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("cls", [PackedDataset, PackedStream])
@pytest.mark.parametrize(
    ("documents", "arguments", "error", "message"),
    [
        ([[1, 2]], {"end_of_document": SimpleNamespace(eos_token_id=None)}, ValueError, "no end-of-document token"),
        ([[1, 2], [1] * 9], {}, ValueError, r"document 1 has 9 tokens .*window_size=8\. Pass too_long='split'"),
        ([[1] * 8], {"end_of_document": 0}, ValueError, "document 0 has 9 tokens"),
        ([[1, 2]], {"too_long": "cut"}, ValueError, "too_long='cut' must be one of None, 'split', 'truncate', 'drop'"),
        ([[1, 2]], {"method": "last_fit"}, ValueError, "method='last_fit' must be one of"),
        ([[1, 2]], {"window_size": 1}, ValueError, "window_size=1 must be 2 or more"),
        ([[[1, 2]]], {}, ValueError, r"document 0 has input_ids of shape \(1, 2\)"),
        ([[1.5, 2]], {}, TypeError, r"document 0 has tokens or labels \[1\.5, 2\]: they must be whole numbers"),
        ([[1, 2], "a text"], {}, TypeError, "document 1 has tokens or labels 'a text': they must be whole numbers"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, ValueError, r"input_ids of shape \(2,\), labels of shape \(1,\)"),
        ([{"tokens": [1, 2]}], {}, ValueError, r"entries \['tokens'\], and its tokens must be in input_ids"),
    ],
)
def test_bad_documents_and_arguments_are_refused(cls, documents, arguments, error, message):
    arguments = {"window_size": 8, "end_of_document": None, **arguments}
    with pytest.raises(error, match=message):
        list(cls(documents, **arguments))


def test_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match="lengths has 1 entries, and the dataset 2 documents"):
        PackedDataset([[1, 2], [3, 4]], 8, end_of_document=None, lengths=[2])
    wrong = PackedDataset([[1, 2], [3, 4, 5]], 8, end_of_document=None, lengths=[2, 2])
    with pytest.raises(ValueError, match="document 1 has 3 tokens, and 2 were expected from lengths"):
        wrong[0]


def windows_of(*documents, window_size=12):
    """Return one packed batch with a single window."""
    made = pack_window([(torch.tensor(one), torch.tensor(one)) for one in documents], window_size)
    return {name: value[None] for name, value in made.items()}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ComposerGPT(SETTINGS)


def of_second_document(model, batch):
    """Return the logits of tokens 5 to 8, and all gradients of the loss there."""
    model.zero_grad()
    logits = model(batch)
    labels = batch["labels"].clone()
    labels[:, :5] = IGNORED
    model.loss(logits, {**batch, "labels": labels}).backward()
    return [logits[:, 5:9], *(weight.grad for weight in model.parameters())]


def test_a_document_changes_no_bit_of_the_next_one(model):
    results = [of_second_document(model, windows_of(first, [7, 8, 9, 6])) for first in ([1, 2, 3, 4, 5], [11] * 5)]
    assert all(map(torch.equal, *results))
    unmasked = {**windows_of([11] * 5, [7, 8, 9, 6]), "position_ids": torch.arange(12)[None]}
    assert not torch.equal(results[0][0], of_second_document(model, unmasked)[0])


@pytest.mark.parametrize("window", [None, 2])
def test_gradients_are_those_of_the_same_documents_unpacked(model, window):
    model.double().model.window = window
    documents = [[1, 2, 3, 4, 5], [7, 8, 9, 6], [10, 11]]
    model.loss(model(batch := windows_of(*documents)), batch).backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    num_targets = sum(len(one) - 1 for one in documents)
    for one in documents:
        ids = torch.tensor([one])
        alone = {"input_ids": ids, "labels": ids}
        (model.loss(model(alone), alone) * (len(one) - 1) / num_targets).backward()
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-6, atol=1e-12)


def test_padding_and_documents_are_masked_together(model):
    batch = windows_of([1, 2, 3, 4, 5], [7, 8, 9, 6])
    mask = torch.ones(1, 12)
    mask[:, 9:] = 0
    torch.testing.assert_close(model({**batch, "attention_mask": mask})[:, :9], model(batch)[:, :9])


def test_flash_attention_refuses_packed_batches():
    flash = ComposerGPT({**SETTINGS, "attn_impl": "flash"})
    with pytest.raises(ValueError, match="position_ids, which separate documents, and attn_impl='flash'"):
        packed_data_spec([windows_of([1, 2])], flash)


def test_tokens_are_counted_without_padding_and_without_the_first_of_each_document(model):
    spec = packed_data_spec([], model)
    batch = windows_of([1, 2, 3, 4, 5], [7, 8, 9, 6])
    assert spec.get_num_tokens_in_batch(batch) == 9
    assert spec.get_num_tokens_in_batch(batch, token_type="loss_generating") == 7


def test_a_model_that_does_not_separate_documents_is_refused(model):
    class Unmasked(ComposerGPT):
        def forward(self, batch):
            return self.model(batch["input_ids"])

    with pytest.raises(ValueError, match="packed documents affect each other in this GPT: the first changes"):
        packed_data_spec([], Unmasked(SETTINGS))
    model.train()
    packed_data_spec([], model)
    assert model.training
    packed_data_spec([], ComposerGPT({**SETTINGS, "device": "meta"}))


def test_workers_return_the_windows_of_the_main_process():
    dataset = PackedDataset(documents_of([5, 2, 3, 6, 2, 2]), 8, end_of_document=None)
    plain, parallel = (
        [one["input_ids"].tolist() for one in DataLoader(dataset, batch_size=2, num_workers=n)] for n in (0, 2)
    )
    assert plain == parallel


@pytest.mark.parametrize("cls", [PackedDataset, PackedStream])
@pytest.mark.parametrize(
    "end", [3, torch.tensor(3), torch.tensor(3).numpy()[()], SimpleNamespace(eos_token_id=3)], ids=repr
)
def test_the_end_token_may_be_any_whole_number(cls, end):
    (window,) = cls([[1, 2]], 4, end_of_document=end)
    assert window["input_ids"].tolist() == [1, 2, 3, 3]


@pytest.mark.parametrize("cls", [PackedDataset, PackedStream])
@pytest.mark.parametrize("token", [[1, 2], "3", 3.0], ids=repr)
def test_an_end_token_that_is_not_one_whole_number_is_refused(cls, token):
    with pytest.raises(ValueError, match=r"eos_token_id=.* must be one whole number"):
        cls([[1, 2]], 4, end_of_document=SimpleNamespace(eos_token_id=token))


def test_documents_that_each_of_several_workers_would_read_are_refused():
    stream = PackedStream([[1, 2, 3]] * 4, 6, end_of_document=None)
    assert len(list(DataLoader(stream, batch_size=None, num_workers=1))) == 2
    with pytest.raises(ValueError, match=r"each of the 2 workers would read all documents .* a list"):
        list(DataLoader(stream, batch_size=None, num_workers=2))


class WithoutAttention(torch.nn.Module):
    def forward(self, batch):
        return torch.nn.functional.one_hot(batch["input_ids"], 2).float()


def test_a_model_whose_attention_has_no_effect_yet_cannot_be_checked():
    with pytest.raises(ValueError, match="Call packed_data_spec before ZeroInit"):
        packed_data_spec([], WithoutAttention())
