"""Packing: several documents in each sequence of a language model, every document by itself.

A packed batch has `input_ids`, `labels` and `position_ids` of shape `(batch, window_size)`, and no `attention_mask`.
Positions start from 0 in each document, and are 0 in the padding at the end of a window. `ComposerGPT` and most causal
models of transformers derive from them which tokens may attend to each other. The label of a document's first token is
-100, so that no document predicts the next one.
"""

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from composer_events import DataSpec
from composer_events.arguments import check_counts
from composer_models.base import model_eval_mode
from composer_models.targets import IGNORED

__all__ = ["PackedDataset", "PackedStream", "document_numbers", "pack_window", "packed_data_spec"]

_END = object()

# The tokens and the labels of a document.
Document: TypeAlias = tuple[Tensor, Tensor]
TooLong: TypeAlias = Literal[None, "split", "truncate", "drop"]


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Windows of a map-style dataset of documents.

    Which documents share a window follows from their lengths alone, so that it is the same in every epoch, on every
    rank and after a resume. Shuffle the windows with a sampler, such as `composer_dist.dist.get_sampler`.

    Args:
        dataset: Map-style dataset of documents: sequences of token ids, or mappings with `input_ids` and optionally
            `labels` of the same length and an `attention_mask`, whose zeros mark tokens to leave out. Other entries are
            not used.
        window_size: Tokens in a window.
        end_of_document: The token to append to each document: its id, or a tokenizer with an `eos_token_id`. `None`
            appends nothing.
        too_long: What to do with documents that are longer than a window: `'split'` into documents of at most that
            length, `'truncate'`, or `'drop'`. `None` raises an error.
        method: `'first_fit'` (decreasing) keeps documents whole and fills windows with documents of other lengths.
            `'concatenate'` joins the documents in their order and cuts every `window_size` tokens; a part of a document
            is then a document of its own, and `too_long` may be `None`.
        lengths: The number of tokens of each document, without the appended one. By default all documents are read
            once.

    Attributes:
        num_tokens: Tokens of documents in all windows.
        efficiency: The fraction of the windows that these fill.

    Raises:
        TypeError: If tokens are not whole numbers.
        ValueError: If an argument is invalid, the tokenizer has no end-of-document token, a document is too long, or
            its labels have another shape.

    Example:
        >>> packed = PackedDataset([[5, 6, 7], [8, 9], [3, 4, 2]], 6, end_of_document=None)
        >>> len(packed), packed[0]["input_ids"], packed[0]["position_ids"]
        (2, tensor([5, 6, 7, 3, 4, 2]), tensor([0, 1, 2, 0, 1, 2]))
        >>> packed[1]["labels"]
        tensor([-100,    9, -100, -100, -100, -100])

    Reference:
        Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021, arXiv:2107.02027.
    """

    def __init__(
        self,
        dataset: Any,
        window_size: int,
        *,
        end_of_document: Any,
        too_long: TooLong = None,
        method: Literal["first_fit", "concatenate"] = "first_fit",
        lengths: Sequence[int] | Tensor | None = None,
    ) -> None:
        self._end = _end_token(end_of_document, window_size, too_long, method, ("first_fit", "concatenate"))
        self.dataset = dataset
        self.window_size = window_size
        if lengths is None:
            sizes = torch.tensor([len(self._document(index)[0]) for index in range(len(dataset))], dtype=torch.long)
        else:
            sizes = torch.as_tensor(lengths, dtype=torch.long) + (self._end is not None)
        if sizes.shape != (len(dataset),):
            raise ValueError(f"lengths has {sizes.numel()} entries, and the dataset {len(dataset)} documents.")
        self._sizes = sizes
        if too_long is None and method == "first_fit" and (sizes > window_size).any():
            raise _too_long_error(int(sizes.argmax()), int(sizes.max()), window_size)
        pieces, window_of = (_concatenated if method == "concatenate" else _first_fit)(sizes, window_size, too_long)
        order = window_of.argsort(stable=True)
        self._pieces = pieces[order]  # rows of document, start, stop
        self._bounds = torch.searchsorted(
            window_of[order], torch.arange(int(window_of.amax()) + 2 if len(order) else 1)
        )
        self.num_tokens = int((pieces[:, 2] - pieces[:, 1]).sum())
        self.efficiency = self.num_tokens / max(len(self) * window_size, 1)

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a window, as `pack_window` does."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        index %= len(self)
        documents: list[Document] = []
        for document, start, stop in self._pieces[self._bounds[index] : self._bounds[index + 1]].tolist():
            tokens, labels = self._document(document)
            if len(tokens) != (expected := int(self._sizes[document])):
                raise ValueError(
                    f"document {document} has {len(tokens)} tokens, and {expected} were expected from lengths. Give "
                    f"the lengths of this dataset, or leave them out."
                )
            documents.append((tokens[start:stop], labels[start:stop]))
        return pack_window(documents, self.window_size, padding=self._end or 0)

    def _document(self, index: int) -> Document:
        return _read(self.dataset[index], index, self._end)


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """Windows of an iterable of documents, packed as they arrive.

    The documents must be divided among ranks and workers already, as for any iterable dataset. In torchdata's
    `StatefulDataLoader`, a resumed run continues from the open windows without packing again. The position in `dataset`
    is restored by its own `state_dict`, or else by reading that many documents again.

    Args:
        dataset: Iterable of documents, see `PackedDataset`.
        window_size: Tokens in a window.
        end_of_document: See `PackedDataset`.
        too_long: See `PackedDataset`.
        method: `'best_fit'` puts each document into the open window with the least sufficient room; for
            `'concatenate'`, see `PackedDataset`.
        num_open: The number of windows that `'best_fit'` keeps open. If one more is needed, the fullest is returned.

    Raises:
        TypeError: If tokens are not whole numbers.
        ValueError: As for `PackedDataset`, with errors in documents raised as they are read.

    Example:
        >>> stream = PackedStream([[5, 6, 7], [8, 9, 1, 2], [3, 4]], 6, end_of_document=None)
        >>> [window["position_ids"].tolist() for window in stream]
        [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        window_size: int,
        *,
        end_of_document: Any,
        too_long: TooLong = None,
        method: Literal["best_fit", "concatenate"] = "best_fit",
        num_open: int = 64,
    ) -> None:
        self.end_token = _end_token(end_of_document, window_size, too_long, method, ("best_fit", "concatenate"))
        check_counts(num_open=num_open)
        self.dataset = dataset
        self.window_size = window_size
        self.too_long: TooLong = too_long
        self.method = method
        self.num_open = num_open

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch of a StreamingDataset, which otherwise counts its own."""
        dataset: Any = self.dataset
        if hasattr(dataset, "next_epoch") and get_worker_info() is None:
            dataset.next_epoch = epoch

    def __iter__(self) -> "Iterator[dict[str, Tensor]]":
        """Return an iterator over the windows, which has `state_dict` and `load_state_dict`.

        Raises:
            ValueError: If each of several workers would read all documents of a map-style dataset.
        """
        worker = get_worker_info()
        has_index = hasattr(self.dataset, "__getitem__") and hasattr(self.dataset, "__len__")
        is_map_style = has_index and not isinstance(self.dataset, IterableDataset)
        if worker is not None and worker.num_workers > 1 and is_map_style:
            raise ValueError(
                f"each of the {worker.num_workers} workers would read all documents of PackedStream's dataset, a "
                f"{type(self.dataset).__name__}, which is not divided among them. Use PackedDataset for a dataset with "
                f"an index, or an IterableDataset that divides its documents."
            )
        return _Packing(self)


class _Packing(Iterator[dict[str, Tensor]]):
    """Iterator over the windows of a stream.

    Its state is that of the iterator, not of the dataset, so that a new epoch begins from the start.
    """

    def __init__(self, stream: PackedStream) -> None:
        self._stream = stream
        self._source = iter(stream.dataset)
        self._num_read, self._is_over = 0, False
        self._open: list[list[Document]] = []
        self._rooms: list[int] = []  # of the open windows
        self._ready: deque[list[Document]] = deque()

    def __next__(self) -> dict[str, Tensor]:
        stream = self._stream
        while not self._ready:
            sample = _END if self._is_over else next(self._source, _END)
            if sample is not _END:
                self._add(_read(sample, self._num_read, stream.end_token))
                self._num_read += 1
            else:
                self._is_over = True
                if not self._open:
                    raise StopIteration
                self._ready.extend(self._open)
                self._open, self._rooms = [], []
        return pack_window(self._ready.popleft(), stream.window_size, padding=stream.end_token or 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the documents, and the windows that have not been returned."""
        windows = {"open": self._open, "ready": self._ready}
        source = self._stateful()
        return {
            "num_read": self._num_read,
            "is_over": self._is_over,  # datasets begin again after their last document
            "source": None if source is None else source.state_dict(),
            **{
                name: [[[part.tolist() for part in document] for document in window] for window in held]
                for name, held in windows.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._open, ready = (
            [[(torch.tensor(tokens), torch.tensor(labels)) for tokens, labels in window] for window in state[name]]
            for name in ("open", "ready")
        )
        self._ready = deque(ready)
        sizes = ([len(tokens) for tokens, _ in window] for window in self._open)
        self._rooms = [self._stream.window_size - sum(of_window) for of_window in sizes]
        source = self._stateful()
        if source is None:
            self._source = islice(self._source, state["num_read"], None)
        else:
            source.load_state_dict(state["source"])
            if source is self._stream.dataset:
                self._source = iter(source)
        self._num_read, self._is_over = state["num_read"], state["is_over"]

    def _stateful(self) -> Any:
        """Return the iterator or the dataset of the documents, whichever restores its position."""
        for source in (self._source, self._stream.dataset):
            # The `state_dict` of a StreamingDataset needs the number of samples that were used.
            if hasattr(source, "state_dict") and not hasattr(source, "next_epoch"):
                return source
        return None

    def _add(self, document: Document) -> None:
        stream, size = self._stream, len(document[0])
        if stream.method == "concatenate":
            if stream.too_long in ("truncate", "drop") and size > stream.window_size:
                document = _part(document, 0, stream.window_size if stream.too_long == "truncate" else 0)
            self._concatenate(document)
        elif size <= stream.window_size:
            self._fit(document)
        elif stream.too_long == "split":
            for start in range(0, size, stream.window_size):
                self._fit(_part(document, start, start + stream.window_size))
        elif stream.too_long == "truncate":
            self._fit(_part(document, 0, stream.window_size))
        elif stream.too_long is None:
            raise _too_long_error(self._num_read, size, stream.window_size)

    def _concatenate(self, document: Document) -> None:
        start, size = 0, len(document[0])
        while start < size:
            if not self._open:
                self._begin()
            stop = min(size, start + self._rooms[0])
            self._put(0, _part(document, start, stop), least=1)
            start = stop

    def _fit(self, document: Document) -> None:
        size = len(document[0])
        if size < 2:  # a single token predicts nothing
            return
        _, place = min(((room, place) for place, room in enumerate(self._rooms) if room >= size), default=(0, None))
        if place is None:
            if len(self._open) == self._stream.num_open:
                self._close(self._rooms.index(min(self._rooms)))
            place = self._begin()
        self._put(place, document, least=2)

    def _begin(self) -> int:
        self._open.append([])
        self._rooms.append(self._stream.window_size)
        return len(self._open) - 1

    def _put(self, place: int, document: Document, least: int) -> None:
        """Add a document to an open window, and close it if it has less room than `least`."""
        self._open[place].append(document)
        self._rooms[place] -= len(document[0])
        if self._rooms[place] < least:
            self._close(place)

    def _close(self, place: int) -> None:
        self._ready.append(self._open.pop(place))
        del self._rooms[place]


def pack_window(documents: Iterable[Document], window_size: int, *, padding: int = 0) -> dict[str, Tensor]:
    """Return one sample with several documents.

    Args:
        documents: The tokens and the labels of each document, both of shape `(tokens,)`.
        window_size: Tokens in the window, at least as many as the documents have.
        padding: The token after the last document.

    Returns:
        `input_ids`, `labels` and `position_ids`, of shape `(window_size,)` and dtype int64.

    Raises:
        ValueError: If the documents are longer than the window.

    Example:
        >>> tokens = torch.tensor([5, 6])
        >>> pack_window([(tokens, tokens)] * 2, 5)["labels"]
        tensor([-100,    6, -100,    6, -100])
    """
    window = {
        "input_ids": torch.full((window_size,), padding),
        "labels": torch.full((window_size,), IGNORED),
        "position_ids": torch.zeros(window_size, dtype=torch.long),
    }
    start = 0
    for tokens, labels in documents:
        stop = start + len(tokens)
        if stop > window_size:
            raise ValueError(f"the documents have {stop} tokens or more, and window_size={window_size}.")
        window["input_ids"][start:stop] = tokens
        window["labels"][start + 1 : stop] = labels[1:]
        window["position_ids"][start:stop] = torch.arange(len(tokens))
        start = stop
    return window


def document_numbers(position_ids: Tensor) -> Tensor:
    """Number the documents in each row of a packed batch, by the places where positions do not increase by 1.

    Args:
        position_ids: Shape `(batch, tokens)`.

    Returns:
        The shape of `position_ids`; numbers count from 0.

    Example:
        >>> document_numbers(torch.tensor([[0, 1, 2, 0, 1, 0]]))
        tensor([[0, 0, 0, 1, 1, 2]])
    """
    starts = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return starts.cumsum(dim=-1)


def packed_data_spec(dataloader: Iterable[Any], model: nn.Module, **settings: Any) -> DataSpec:
    """Describe a dataloader of packed batches, for a model that keeps the documents apart.

    Tokens are counted without padding, and those that enter the loss by themselves, so that
    `accumulate_train_batch_on_tokens=True` weights each token equally. The model is run once, on three sequences of six
    tokens: an error is raised if its outputs for one document depend on another one. A model on the meta device, or
    with flash attention and not on a GPU, cannot be run and is not checked.

    Args:
        dataloader: Yields batches as `PackedDataset` and `PackedStream` have them, collated.
        model: The model to train or evaluate, such as a `ComposerGPT` or a `HuggingFaceModel`. It takes a batch and
            returns logits, or a mapping with `logits`.
        **settings: Other arguments of `DataSpec`.

    Raises:
        ValueError: If documents affect each other in the model, or tokens of one document do not, such as after
            `ZeroInit`.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=1, n_layers=1, vocab_size=16, max_seq_len=6))
        >>> packed = PackedDataset([[5, 6, 7], [8, 9]], 6, end_of_document=None)
        >>> spec = packed_data_spec(torch.utils.data.DataLoader(packed), model)
        >>> [spec.get_num_tokens_in_batch(batch) for batch in spec.dataloader]
        [5]
    """
    kernel = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    unable = {"meta", "cpu"} if kernel.startswith("flash") else {"meta"}
    if not any(weight.device.type in unable for weight in model.parameters()) and (leak := _leak(model)):
        raise ValueError(
            f"packed documents affect each other in this {type(getattr(model, 'model', model)).__name__}: the first "
            f"changes the logits of the second by {leak:.1%} of what its own first token does, because attention is "
            f"not masked where position_ids start again. Use ComposerGPT or a causal model of transformers that does "
            f"so, with attn_implementation 'sdpa', 'eager', 'flex_attention' or 'flash_attention_2'; or train on one "
            f"document in each sequence."
        )
    settings.setdefault("get_num_tokens_in_batch", _count_tokens)
    return DataSpec(dataloader, **settings)


def _count_tokens(batch: Mapping[str, Tensor]) -> dict[str, int]:
    positions, labels = batch["position_ids"], batch["labels"]
    return {
        # All tokens with a position above 0, and one before each at position 1.
        "total": int((positions > 0).sum() + (positions == 1).sum()),
        "loss_generating": int((labels[:, 1:] != IGNORED).sum()),
    }


def _leak(model: nn.Module) -> float:
    """Return how much a document depends on the one before it, relative to its own first token; 0 if not at all."""
    weight = next(model.parameters(), torch.empty(0))
    # The second row differs from the first in the first document, the third row in the second document.
    rows = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]], device=weight.device)
    positions = torch.tensor([0, 1, 2, 0, 1, 2], device=weight.device).expand(3, -1)
    with torch.no_grad(), model_eval_mode(model):
        outputs: Any = model({"input_ids": rows, "labels": rows, "position_ids": positions})
    logits = (outputs["logits"] if isinstance(outputs, Mapping) else outputs)[:, 3:].float()
    from_before = (logits[1] - logits[0]).abs().max().item()
    own = (logits[2] - logits[0]).abs().max().item()
    if own and not (logits[2] - logits[0])[1:].any():  # only the first token itself differs
        raise ValueError(
            "packed documents cannot be checked, because the tokens of a document do not affect each other in this "
            "model yet. Call packed_data_spec before ZeroInit and other methods that start attention from zero."
        )
    # Kernels of mixtures of experts may round differently; the model's own effect may be 0 before training.
    leak = from_before / own if own else float(from_before > 0)
    return leak if leak > 1e-4 else 0.0


def _too_long_error(index: int, size: int, window_size: int) -> ValueError:
    return ValueError(
        f"document {index} has {size} tokens with the appended one, if any, and window_size={window_size}. Pass "
        f"too_long='split', 'truncate' or 'drop', or a larger window."
    )


def _end_token(
    end_of_document: Any, window_size: int, too_long: TooLong, method: str, methods: Sequence[str]
) -> int | None:
    """Validate the arguments of a packer, and return the id of the token to append."""
    check_counts(2, window_size=window_size)
    for name, value, accepted in (("too_long", too_long, get_args(TooLong)), ("method", method, methods)):
        if value not in accepted:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, accepted))}.")
    if end_of_document is None:
        return None
    if hasattr(end_of_document, "__index__") and not isinstance(end_of_document, bool):  # integers, also those of NumPy
        return operator.index(end_of_document)
    token = getattr(end_of_document, "eos_token_id", None)
    if token is None:
        raise ValueError(
            f"end_of_document, a {type(end_of_document).__name__}, has no end-of-document token: its eos_token_id is "
            f"None. Set the tokenizer's eos_token, pass the id of a token, or pass None to append nothing."
        )
    if not hasattr(token, "__index__"):
        raise ValueError(
            f"end_of_document, a {type(end_of_document).__name__}, has eos_token_id={token!r}, which must be one whole "
            f"number. Pass the id of the token to append."
        )
    return operator.index(token)


def _read(sample: Any, index: int, end: int | None) -> Document:
    """Return a document's tokens and labels, with the end token."""
    entries = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in entries:
        raise ValueError(f"document {index} has the entries {sorted(entries)}, and its tokens must be in input_ids.")
    tokens = _whole_numbers(entries["input_ids"], index)
    labels = _whole_numbers(entries["labels"], index) if "labels" in entries else tokens
    is_real = torch.as_tensor(entries.get("attention_mask", torch.ones_like(tokens))).bool()
    if tokens.ndim != 1 or not tokens.shape == labels.shape == is_real.shape:
        raise ValueError(
            f"document {index} has input_ids of shape {tuple(tokens.shape)}, labels of shape {tuple(labels.shape)} and "
            f"an attention_mask of shape {tuple(is_real.shape)}: each must be one number for each token."
        )
    if not is_real.all():
        tokens, labels = tokens[is_real], labels[is_real]
    if end is not None:
        last = torch.tensor([end])
        tokens, labels = torch.cat([tokens, last]), torch.cat([labels, last])
    return tokens, labels


def _whole_numbers(values: Any, index: int) -> Tensor:
    try:  # with a copy, since the arrays of shards are read-only
        numbers = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None or (numbers.is_floating_point() and numbers.numel()):
        raise TypeError(f"document {index} has tokens or labels {values!r:.100}: they must be whole numbers.")
    return numbers.long()


def _part(document: Document, start: int, stop: int) -> Document:
    tokens, labels = document
    return tokens[start:stop], labels[start:stop]


def _first_fit(sizes: Tensor, window_size: int, too_long: TooLong) -> tuple[Tensor, Tensor]:
    """Return the pieces of documents, rows of document, start and stop, and the window of each."""
    documents = torch.arange(len(sizes))
    if too_long == "drop":
        documents = documents[sizes <= window_size]
    if too_long == "split":
        counts = sizes.add(window_size - 1).div(window_size, rounding_mode="floor")
        documents = documents.repeat_interleave(counts)
        firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        starts = (torch.arange(len(documents)) - firsts) * window_size
    else:
        starts = torch.zeros_like(documents)
    stops = torch.minimum(sizes[documents], starts + window_size)
    pieces = torch.stack([documents, starts, stops], dim=1)
    pieces = pieces[stops - starts >= 2]  # a single token predicts nothing
    lengths = pieces[:, 2] - pieces[:, 1]
    order = lengths.argsort(descending=True, stable=True)
    window_of = torch.empty_like(lengths)
    found, numbers = lengths[order].unique_consecutive(return_counts=True)
    # All pieces of one length at once: first fit fills the windows in order with as many as each has room for.
    # Consecutive windows with equal room are one entry of `rooms` and `counts`.
    rooms = counts = lengths.new_empty(0)
    for length, same in zip(found.tolist(), order.split(numbers.tolist()), strict=True):
        lacking = len(same) - int((rooms // length * counts).sum())
        if lacking > 0:
            rooms = torch.cat([rooms, rooms.new_tensor([window_size])])
            counts = torch.cat([counts, counts.new_tensor([-(-lacking // (window_size // length))])])
        fits = rooms // length
        until = (fits * counts).cumsum(0)
        places = torch.arange(len(same))
        run = torch.searchsorted(until, places, right=True)
        within = places - (until - fits * counts)[run]
        window_of[same] = (counts.cumsum(0) - counts)[run] + within // fits[run]
        # The last entry is divided into windows that are filled, one that is filled partly, and the rest.
        last = int(run[-1])
        num_filled, num_more = divmod(int(within[-1]) + 1, int(fits[last]))
        divided = [num_filled, int(num_more > 0), int(counts[last]) - num_filled - int(num_more > 0)]
        left = rooms[last] - length * rooms.new_tensor([int(fits[last]), num_more, 0])
        rooms = torch.cat([rooms[:last] - length * fits[:last], left, rooms[last + 1 :]])
        counts = torch.cat([counts[:last], counts.new_tensor(divided), counts[last + 1 :]])
        rooms, counts = rooms[counts > 0], counts[counts > 0]
    return pieces, window_of


def _concatenated(sizes: Tensor, window_size: int, too_long: TooLong) -> tuple[Tensor, Tensor]:
    """Return the pieces and their windows, as `_first_fit` does."""
    if too_long in ("truncate", "drop"):
        sizes = torch.where(sizes > window_size, window_size if too_long == "truncate" else 0, sizes)
    ends = sizes.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    cuts = torch.cat([ends - sizes, torch.arange(0, total, window_size), torch.tensor([total])]).unique()
    documents = torch.searchsorted(ends, cuts[:-1], right=True)
    begins = (ends - sizes)[documents]
    pieces = torch.stack([documents, cuts[:-1] - begins, cuts[1:] - begins], dim=1)
    return pieces, cuts[:-1].div(window_size, rounding_mode="floor")
