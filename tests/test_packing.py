"""Packed documents train a model as they do alone: each transformer, several ranks, every kind of dataset, resumed."""

import importlib.util
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from composer import Callback, Evaluator, Trainer
from composer.algorithms import Alibi, SeqLengthWarmup
from composer.callbacks import SpeedMonitor
from composer.functional import apply_alibi, apply_fused_cross_entropy
from composer.loggers import InMemoryLogger
from composer.models import ComposerGPT, HuggingFaceModel
from composer.utils import dist
from composer_dist.testing import run_ranks
from composer_models import LanguagePerplexity, PackedDataset, PackedStream, packed_data_spec

streaming = pytest.importorskip("streaming")
torchdata = pytest.importorskip("torchdata.stateful_dataloader")

_spec = importlib.util.spec_from_file_location(
    "text_to_mds", Path(__file__).resolve().parent.parent / "examples/text_to_mds.py"
)
text_to_mds = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(text_to_mds)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

WINDOW, VOCABULARY = 16, 50
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": WINDOW, "eos_token_id": 0}


def hugging_face(config, attention="sdpa", *, with_alibi=False):
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if with_alibi:
        apply_alibi(model, max_sequence_length=WINDOW)
    return HuggingFaceModel(model, use_logits=True)


def small_gpt(**settings):
    torch.manual_seed(3)
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": WINDOW}
    return ComposerGPT({**sizes, **settings})


SEPARATING = {
    "ComposerGPT": small_gpt,
    "Llama": lambda: hugging_face(transformers.LlamaConfig(**GROUPED)),
    "Llama, eager": lambda: hugging_face(transformers.LlamaConfig(**GROUPED), "eager"),
    "Mistral, sliding": lambda: hugging_face(transformers.MistralConfig(**GROUPED, sliding_window=3)),
    "Mixtral": lambda: hugging_face(transformers.MixtralConfig(**GROUPED, num_local_experts=4)),
    "GPT-2, no dropout": lambda: hugging_face(
        transformers.GPT2Config(**GPT2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    ),
    "GPT-2, ALiBi": lambda: hugging_face(
        transformers.GPT2Config(**GPT2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0), with_alibi=True
    ),
}


def random_documents(num, seed=0, longest=10):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (num,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def packed_batch(documents):
    windows = list(PackedDataset(documents, WINDOW, end_of_document=None))
    return {name: torch.stack([one[name] for one in windows]) for name in windows[0]}


def gradients(model):
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", SEPARATING)
def test_a_document_changes_no_bit_of_another_one(name, is_training):
    model = SEPARATING[name]().train(is_training)
    results = []
    for first in (1, 2):
        batch = packed_batch([[first] * 7, [3, 4, 5, 6, 7]])
        logits = model(batch) if isinstance(model, ComposerGPT) else model(batch)["logits"]
        of_second = logits[:, 7:12]
        torch.nn.functional.cross_entropy(of_second[0, :-1], batch["labels"][0, 8:12]).backward()
        results.append([of_second, *gradients(model).values()])
    # A kernel for all tokens of one expert multiplies other numbers of rows, which may be rounded otherwise.
    equal = torch.allclose if name == "Mixtral" else torch.equal
    assert all(itertools.starmap(equal, zip(*results, strict=True)))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", [name for name in SEPARATING if name != "Mixtral"])  # its kernels have no float64
def test_gradients_are_those_of_the_same_documents_unpacked(name, is_fused):
    model = SEPARATING[name]().double().train()
    if is_fused:
        apply_fused_cross_entropy(model)
    documents = random_documents(6)
    batch = packed_batch(documents)
    assert len(batch["input_ids"]) > 1
    model.loss(model(batch), batch).backward()
    packed, num_targets = gradients(model), sum(len(one) - 1 for one in documents)
    for one in documents:
        ids = torch.tensor([one])
        alone = {"input_ids": ids, "labels": ids}
        (model.loss(model(alone), alone) * (len(one) - 1) / num_targets).backward()
    for key, expected in gradients(model).items():
        # Of the largest gradient, since the norms of Llama compute in float32.
        torch.testing.assert_close(packed[key], expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_compiled_models_keep_documents_apart():
    model, batch = small_gpt().eval(), packed_batch(random_documents(4))
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch["input_ids"], None, batch["position_ids"]), model(batch))


@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(**{**SIZES, "pad_token_id": 0}, is_decoder=True),
        transformers.OPTConfig(**{**SIZES, "pad_token_id": 1}, ffn_dim=32, word_embed_proj_dim=16),
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2),
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_do_not_mask_documents_are_refused_before_training(config):
    model = hugging_face(config, "eager")
    with pytest.raises(ValueError, match=f"affect each other in this {type(model.model).__name__}.*not masked"):
        packed_data_spec([], model)


class Seen(Callback):
    """Keep the tokens and the loss of each batch."""

    def __init__(self):
        self.batches = {}

    def after_train_batch(self, state, logger):
        loss = float(state.loss.detach()).hex()
        self.batches[int(state.timestamp.batch)] = (state.batch["input_ids"].tolist(), loss)


def train(dataloader, model=None, **settings):
    torch.set_num_threads(1)
    model = small_gpt(attn_pdrop=0.1) if model is None else model
    seen = Seen()
    settings = {"optimizers": torch.optim.SGD(model.parameters(), lr=0.1), "max_duration": "2ep", **settings}
    with Trainer(
        model=model,
        train_dataloader=packed_data_spec(dataloader, model),
        accumulate_train_batch_on_tokens=True,
        callbacks=[seen, *settings.pop("callbacks", [])],
        device="cpu",
        progress_bar=False,
        seed=5,
        run_name="packed",
        **settings,
    ) as trainer:
        trainer.fit()
    return model, seen.batches, trainer


class Documents(IterableDataset):
    """Documents divided among ranks and workers."""

    def __init__(self, documents):
        self.documents = documents

    def __iter__(self):
        info = get_worker_info()
        num, place = (1, 0) if info is None else (info.num_workers, info.id)
        rank, world_size = dist.get_global_rank(), dist.get_world_size()
        yield from self.documents[rank * num + place :: num * world_size]


class Shards(streaming.StreamingDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)["tokens"]


def map_loader(folder, num_workers, documents=None):
    packed = PackedDataset(documents or random_documents(24), WINDOW, end_of_document=0)
    size = 4 // dist.get_world_size()
    return DataLoader(packed, size, sampler=dist.get_sampler(packed, shuffle=True), num_workers=num_workers)


def shard_loader(folder, num_workers):
    packed = PackedDataset(Shards(local=str(folder), batch_size=1, shuffle=False), WINDOW, end_of_document=0)
    return DataLoader(packed, 4, shuffle=True, num_workers=num_workers)


def stream_loader(folder, num_workers, kind=torchdata.StatefulDataLoader, **settings):
    documents = Documents(random_documents(30))
    stream = PackedStream(documents, WINDOW, end_of_document=0, num_open=4, **settings)
    return kind(stream, 4 // dist.get_world_size(), num_workers=num_workers)


def shard_stream_loader(folder, num_workers):
    shards = Shards(local=str(folder), batch_size=4, shuffle=True, num_canonical_nodes=1)
    return DataLoader(PackedStream(shards, WINDOW, end_of_document=0, num_open=4), 4, num_workers=num_workers)


def window_loader(folder, num_workers):
    windows = text_to_mds.Windows(local=str(folder / "windows"), batch_size=4, shuffle=True, num_canonical_nodes=1)
    return DataLoader(windows, 4, num_workers=num_workers)


LOADERS = {
    "windows": window_loader,
    "map": map_loader,
    "shards, map": shard_loader,
    "stream": stream_loader,
    "stream, concatenate": lambda *args: stream_loader(*args, method="concatenate"),
    "stream, DataLoader": lambda *args: stream_loader(*args, kind=DataLoader),
    "shards, stream": shard_stream_loader,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    with streaming.MDSWriter(out=str(folder), columns={"tokens": "ndarray:int32"}) as writer:
        for document in random_documents(24):
            writer.write({"tokens": torch.tensor(document, dtype=torch.int32).numpy()})
    packed = PackedDataset(random_documents(24), WINDOW, end_of_document=0)
    text_to_mds.write_windows(packed, folder / "windows", range(VOCABULARY), WINDOW)
    return folder


@pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 2) for kind in LOADERS), ("map", 0), ("stream", 0)])
def test_a_run_continues_inside_an_epoch_to_the_last_bit(tmp_path, shards, kind, num_workers):
    settings = {"save_folder": str(tmp_path), "save_interval": "1ba"}
    _, expected, _ = train(LOADERS[kind](shards, num_workers), **settings)
    per_epoch = len(expected) // 2
    for batch in (2, per_epoch + 2):
        path = tmp_path / f"ep{batch // per_epoch}-ba{batch}-rank0.pt"
        _, resumed, _ = train(LOADERS[kind](shards, num_workers), load_path=str(path))
        assert resumed == {number: expected[number] for number in range(batch, len(expected))}


def train_on_ranks(degree):
    """Return the weights and the number of tokens, with tensors split over some ranks."""
    model = small_gpt()
    documents = random_documents(40)
    num_shares = dist.get_world_size() // degree
    packed = PackedDataset(documents, WINDOW, end_of_document=0)
    sampler = dist.get_sampler(packed, num_replicas=num_shares, rank=dist.get_global_rank() // degree)
    plan = {"model.blocks.*.mlp.0": ColwiseParallel(), "model.blocks.*.mlp.2": RowwiseParallel()}
    settings = {"parallelism_config": {"fsdp": {}, "tp": {"tensor_parallel_degree": degree, "layer_plan": plan}}}
    loader = DataLoader(packed, 4 // num_shares, sampler=sampler, drop_last=True)
    shared = {"device_train_microbatch_size": 1, "max_duration": "1ep"}
    model, _, trainer = train(loader, model, **shared, **(settings if degree > 1 else {}))
    weights = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    return [weight.detach() for weight in weights], int(trainer.state.timestamp.token)


def train_on_two_ranks(folder):
    """Train with replicas, with split tensors, and on a stream that is resumed, of which each rank has a share."""
    weights = train_on_ranks(1), train_on_ranks(2)
    _, whole, _ = train(stream_loader(None, 0), save_folder=str(folder), save_interval="2ba", max_duration="1ep")
    _, resumed, _ = train(stream_loader(None, 0), load_path=str(folder / "ep0-ba2-rank0.pt"), max_duration="1ep")
    return weights, whole, resumed


def test_two_ranks_train_as_one(tmp_path):
    weights, num_tokens = train_on_ranks(1)
    shares = []
    for results, whole, resumed in run_ranks(train_on_two_ranks, tmp_path / "runs", store=tmp_path / "store"):
        for of_rank, tokens in results:
            assert tokens == num_tokens
            for one, expected in zip(of_rank, weights, strict=True):
                torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)
        assert len(whole) > 2
        assert resumed == {number: whole[number] for number in range(2, len(whole))}
        shares.append([tokens for tokens, _ in whole.values()])
    assert shares[0] != shares[1]


def test_metrics_of_packed_windows_are_those_of_the_documents():
    documents, log = random_documents(40), InMemoryLogger()
    network = hugging_face(transformers.LlamaConfig(**GROUPED)).model
    model = HuggingFaceModel(network, use_logits=True, metrics=[LanguagePerplexity()])
    packed = PackedDataset(documents, WINDOW, end_of_document=None)
    losses, num_targets = 0.0, 0
    with torch.no_grad():
        for one in documents:
            ids = torch.tensor([one])
            losses += float(network(input_ids=ids, labels=ids)["loss"]) * (len(one) - 1)
            num_targets += len(one) - 1
    train(
        DataLoader(packed, 4),
        model,
        eval_dataloader=Evaluator(label="packed", dataloader=packed_data_spec(DataLoader(packed, 2), model)),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=[SpeedMonitor(window_size=2)],
        loggers=log,
    )
    ((_, perplexity), *_) = log.data["metrics/packed/LanguagePerplexity"]
    assert perplexity == pytest.approx(math.exp(losses / num_targets), rel=1e-5)
    efficiencies = [value for _, value in log.data["throughput/packing_efficiency"]]
    assert sum(efficiencies) / len(efficiencies) == pytest.approx(packed.efficiency, rel=0.05)


def perplexity_on_ranks(documents):
    log, model = InMemoryLogger(), perplexity_model()
    packed = PackedDataset(documents, WINDOW, end_of_document=None)
    loader = DataLoader(packed, 2, sampler=dist.get_sampler(packed))
    evaluator = Evaluator(label="packed", dataloader=packed_data_spec(loader, model))
    with Trainer(model=model, loggers=log, device="cpu", progress_bar=False) as trainer:
        trainer.eval(eval_dataloader=evaluator)
    ((_, perplexity),) = log.data["metrics/packed/LanguagePerplexity"]
    return len(packed), float(perplexity)


def perplexity_model():
    torch.manual_seed(3)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, initializer_range=0.5))
    return HuggingFaceModel(network, use_logits=True, metrics=[LanguagePerplexity()])


def test_perplexity_of_packed_windows_on_two_ranks_is_that_of_the_documents(tmp_path):
    documents, network = random_documents(43), perplexity_model().model
    losses, num_targets = 0.0, 0
    with torch.no_grad():
        for one in documents:
            ids = torch.tensor([one])
            losses += float(network(input_ids=ids, labels=ids)["loss"]) * (len(one) - 1)
            num_targets += len(one) - 1
    results = run_ranks(perplexity_on_ranks, documents, store=tmp_path / "store")
    num_windows, _ = results[0]
    assert num_windows % 2 == 1  # so that the sampler repeats a window, which must not count
    assert [value for _, value in results] == [pytest.approx(math.exp(losses / num_targets), rel=1e-5)] * 2


class Boundaries(Callback):
    """Keep the lengths of sequences, and check that each label is of the document of the token before it."""

    def __init__(self):
        self.lengths = set()

    def batch_start(self, state, logger):
        positions, labels = state.batch["position_ids"], state.batch["labels"]
        self.lengths.add(positions.shape[1])
        assert (positions.diff(dim=1) == 1)[labels[:, 1:] != -100].all()
        assert (labels == state.batch["input_ids"])[labels != -100].all()


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("scaling", [1, 0.5])
def test_packed_sequences_are_shortened_by_warmup_and_alibi(truncate, scaling):
    model, boundaries = hugging_face(transformers.GPT2Config(**GPT2)), Boundaries()
    warmup = SeqLengthWarmup(0.5, min_seq_length=4, max_seq_length=WINDOW, step_size=4, truncate=truncate)
    alibi = Alibi(max_sequence_length=WINDOW, train_sequence_length_scaling=scaling)
    train(map_loader(None, 0), model, algorithms=[alibi, warmup], callbacks=[boundaries])
    assert boundaries.lengths == {int(scaling * length) for length in (4, 8, 12, 16)}
    packed_data_spec([], model)


@pytest.fixture
def corpus(tmp_path):
    """Write documents as JSON lines and as text, and return the paths and the texts."""
    texts = [f"{number} " + "low lower lowest " * (number % 5) for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    (tmp_path / "b.txt").write_text("néwer " * 40)
    return [tmp_path / "a.jsonl", tmp_path / "b.txt"], [*texts, "néwer " * 40]


@pytest.fixture
def trained_tokenizer(tmp_path, corpus):
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    bytewise.train_from_iterator(corpus[1], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_text_becomes_the_same_shards_after_an_interruption(tmp_path, corpus, trained_tokenizer, monkeypatch, capsys):
    paths, texts = corpus
    arguments = [*map(str, paths), "--field", "body", "--window", "64", "--group", "8"]
    arguments += ["--tokenizer", str(tmp_path / "tokenizer"), "--out"]
    text_to_mds.main([*arguments, str(tmp_path / "once")])
    written = []

    def interrupted(self, sample):
        written.append(sample)
        if len(written) == 5:
            raise KeyboardInterrupt
        return write(self, sample)

    write = text_to_mds.MDSWriter.write
    monkeypatch.setattr(text_to_mds.MDSWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text_to_mds.main([*arguments, str(tmp_path / "twice")])
    assert not (tmp_path / "twice/index.json").exists()
    text_to_mds.main([*arguments, str(tmp_path / "twice")])
    assert contents(tmp_path / "twice") == contents(tmp_path / "once")
    with pytest.raises(SystemExit):
        text_to_mds.main([*arguments, str(tmp_path / "twice"), "--window", "32"])
    assert "was begun with other arguments" in capsys.readouterr().err

    windows = text_to_mds.Windows(local=str(tmp_path / "once"), batch_size=1)
    end, found = trained_tokenizer.eos_token_id, ""
    for window in windows:
        starts = window["position_ids"].diff(prepend=torch.tensor([1])) != 1
        assert (window["labels"][starts] == -100).all()
        kept = window["input_ids"][(window["position_ids"] > 0) | starts]
        found += trained_tokenizer.decode(kept[kept != end])
    assert sorted(found.split()) == sorted(" ".join(texts).split())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n\n{"text": ', r"a\.jsonl, line 3: not JSON"),
        ("a.jsonl", '["one"]', r"a\.jsonl, line 1: must be a mapping with a text in 'text'"),
        ("a.jsonl", '{"txt": "one"}', r"a\.jsonl, line 1: must be a mapping with a text in 'text'"),
        ("a.md", "one", r"Only files .txt and .jsonl are read; got .*a\.md"),
        ("a.jsonl", "\n", r"The files have no document: .*a\.jsonl"),
        ("a.txt", "one", r"has no end-of-document token: its eos_token_id"),
    ],
)
def test_after_text_that_cannot_be_converted_the_corrected_command_works(
    tmp_path, name, text, message, trained_tokenizer, capsys
):
    (tmp_path / name).write_text(text)
    arguments = ["--out", str(tmp_path / "out"), "--window", "8"]
    trained_tokenizer.eos_token = None
    trained_tokenizer.save_pretrained(tmp_path / "endless")
    without_end = ["--tokenizer", str(tmp_path / "endless")] if "eos_token_id" in message else []
    with pytest.raises(SystemExit) as ended:
        text_to_mds.main([str(tmp_path / name), *arguments, *without_end])
    assert ended.value.code == 2
    assert re.search(f"error: .*{message}", capsys.readouterr().err)
    assert not (tmp_path / "out/index.json").exists()
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    text_to_mds.main([str(tmp_path / "a.jsonl"), *arguments])
    assert len(text_to_mds.Windows(local=str(tmp_path / "out"), batch_size=1)) == 1


def test_a_file_that_has_changed_is_not_taken_for_the_one_that_was_converted(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    arguments = [str(file), "--out", str(tmp_path / "out"), "--window", "8"]
    file.write_text('{"text": "one"}\n')
    text_to_mds.main(arguments)
    text_to_mds.main(arguments)
    file.write_text('{"text": "other"}\n')
    with pytest.raises(SystemExit):
        text_to_mds.main(arguments)
    assert "files have changed since" in capsys.readouterr().err
