"""A causal language model behind the interface of lm-eval, which must be installed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from composer_dist import dist

__all__ = ["HarnessModel"]

_MAX_NEW_TOKENS: Final = 256  # as the harness generates for tasks that do not say how many


class HarnessModel(TemplateLM):
    """A causal model as lm-eval calls it. Every rank has all requests and gets all results.

    Args:
        model: Takes a batch with `input_ids` and `attention_mask`, and returns logits or a mapping with them.
        tokenizer: Tokenizer of transformers.
        device: The device of the model.
        max_length: Tokens in a sequence.
        batch_size: Requests per forward pass.
        divides: Whether the ranks divide the batches. If not, each rank evaluates all.
    """

    def __init__(
        self, model: Any, tokenizer: Any, device: Any, max_length: int, batch_size: int, *, divides: bool
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self._to = model, tokenizer, device.batch_to_device
        self.max_length, self.batch_size, self._divides = max_length, batch_size, divides
        # A model may end its texts with other tokens than the tokenizer names, such as those of a chat.
        generation = getattr(getattr(model, "model", None), "generation_config", None)
        ends = getattr(generation, "eos_token_id", None)
        self.end_token_ids = {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text; by default with the tokenizer's special tokens, and with one BOS at most."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        if too_long := [len(target) for *_, target in requests if len(target) > self.max_length]:
            raise ValueError(
                f"a continuation to score has {max(too_long)} tokens, more than max_length={self.max_length}. Use a "
                f"model with more positions, or leave the task out."
            )
        return self._on_ranks([(context, target) for _, context, target in requests], self._score)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows with as much context as possible."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            parts = list(map(make_disjoint_window, found))
            windows += parts
            owners += [owner] * len(parts)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._on_ranks(windows, self._score), strict=True):
            sums[owner] += value
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each prompt."""
        sampling = [options for _, options in (request.args for request in requests) if options.get("do_sample")]
        if sampling := [options for options in sampling if options.get("temperature") != 0]:
            raise ValueError(
                f"a task samples, with {sampling[0]!r}, and LMEvalHarness generates greedily. Write do_sample: false "
                f"in its generation_kwargs."
            )
        return self._on_ranks(
            [(self.tok_encode(text), options) for text, options in (r.args for r in requests)], self._generate
        )

    def _on_ranks(self, items: list[Any], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Return the result of each item, from batches of similar lengths that are divided among the ranks."""
        order = sorted(range(len(items)), key=lambda index: -sum(len(part) for part in items[index]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        rank, world_size = (dist.get_global_rank(), dist.get_world_size()) if self._divides else (0, 1)
        mine: dict[int, Any] = {}
        for start in range(0, len(batches), world_size):
            # Each forward pass of a sharded model is a collective: ranks without a batch repeat the last one.
            batch = batches[min(start + rank, len(batches) - 1)]
            mine.update(zip(batch, run([items[index] for index in batch]), strict=True))
        found: dict[int, Any] = {}
        for part in dist.all_gather_object(mine):
            found.update(part)
        return [found[index] for index in range(len(items))]

    def _logits(self, rows: list[list[int]], num_columns: int) -> Tensor:
        """Return logits of shape `(rows, columns, vocabulary)`. Padding is on the right, which no token sees."""
        tokens = torch.full((len(rows), num_columns), self.eot_token_id)
        mask = torch.zeros_like(tokens)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = torch.tensor(row)
            mask[place, : len(row)] = 1
        outputs = self.model(self._to({"input_ids": tokens, "attention_mask": mask}))
        return outputs["logits"] if isinstance(outputs, Mapping) else outputs

    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows = [(context + target)[-self.max_length - 1 : -1] for context, target in pairs]
        logits = self._logits(rows, max(map(len, rows)))
        results = []
        for (_, target), row, scores in zip(pairs, rows, logits, strict=True):
            logprobs = scores[len(row) - len(target) : len(row)].float().log_softmax(-1)
            labels = torch.tensor(target, device=logprobs.device)
            total = logprobs.gather(1, labels[:, None]).sum()
            results.append((float(total), bool((logprobs.argmax(-1) == labels).all())))
        return results

    def _generate(self, requests: list[tuple[list[int], dict[str, Any]]]) -> list[str]:
        writers = [_Greedy(self, context, options) for context, options in requests]
        while True:
            is_busy = torch.tensor([int(any(not writer.is_done for writer in writers))])
            is_busy = self._to(is_busy)
            dist.all_reduce(is_busy, "MAX")  # all ranks run as many forward passes
            if not is_busy.item():
                return [writer.text for writer in writers]
            rows = [writer.tokens[-self.max_length :] for writer in writers]
            logits = self._logits(rows, max(map(len, rows)))
            chosen = logits[torch.arange(len(rows)), [len(row) - 1 for row in rows]].argmax(-1).tolist()
            for writer, token in zip(writers, chosen, strict=True):
                writer.add(token)


class _Greedy:
    """The greedy continuation of one prompt."""

    def __init__(self, language_model: HarnessModel, context: list[int], options: Mapping[str, Any]) -> None:
        until = options.get("until") or []
        self._stops = [until] if isinstance(until, str) else list(until)
        self._left = int(options.get("max_gen_toks", options.get("max_new_tokens", _MAX_NEW_TOKENS)))
        self._tokenizer, self._ends = language_model.tokenizer, language_model.end_token_ids
        room = max(language_model.max_length - self._left, 1)
        self.tokens = (context or [language_model.prefix_token_id])[-room:]
        self._new: list[int] = []
        self.text, self.is_done = "", self._left < 1

    def add(self, token: int) -> None:
        if self.is_done:
            return
        self._left -= 1
        self.tokens = [*self.tokens, token]
        self._new.append(token)
        self.text = self._tokenizer.decode(self._new, skip_special_tokens=True)
        places = [place for stop in self._stops if stop and (place := self.text.find(stop)) >= 0]
        if places:
            self.text = self.text[: min(places)]
        self.is_done = bool(places) or token in self._ends or self._left < 1
