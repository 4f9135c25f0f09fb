"""Adapter from Hugging Face models to the training loop."""

import copy
import warnings
from collections.abc import Iterable, Mapping, Sized
from contextlib import nullcontext
from logging import getLogger
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn

from composer_dist import dist
from composer_hf.adapters import (
    adapter_of,
    filter_state_dict_peft,
    is_peft_model,
    maybe_get_underlying_model,
    peft_installed,
    trained_beside_adapter,
)
from composer_hf.model_traits import (
    as_written,
    compile_calls,
    forward_args,
    resolve_shift,
    take_out,
    warn_of_lost_surgery,
)
from composer_hf.published_weights import published_name
from composer_hf.publishing import write_huggingface_pretrained_from_composer_checkpoint
from composer_hf.saved_state import (
    describe,
    get_hf_config_from_composer_state_dict,
    get_peft_config_from_composer_state_dict,
    hf_from_composer_checkpoint,
    load_model,
    load_tokenizer,
)
from composer_hf.sharding_hints import add_sharding_hints
from composer_hf.tokenizer_files import fit_vocabulary
from composer_models import ComposerModel, MissingConditionalImportError
from composer_models.targets import IGNORED

__all__ = [
    "HuggingFaceModel",
    "filter_state_dict_peft",
    "get_hf_config_from_composer_state_dict",
    "get_peft_config_from_composer_state_dict",
    "maybe_get_underlying_model",
    "peft_installed",
    "write_huggingface_pretrained_from_composer_checkpoint",
    "continuations",
]

if TYPE_CHECKING:
    from peft import PeftConfig
    from torchmetrics import Metric
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
else:  # for typing.get_type_hints, without the import time of these libraries
    Metric = PeftConfig = PreTrainedModel = PreTrainedTokenizerBase = Any

log = getLogger(__name__)

_MAX_NAMES: Final = 5


class HuggingFaceModel(ComposerModel):
    """A transformers model, with or without peft adapters, that takes whole batches and computes its own loss.

    Batches are mappings, as tokenizers and data collators return them; keys that the model's `forward` does not name
    are dropped. The loss is the one that the model computes if the batch has `labels`. Every checkpoint describes the
    model and its tokenizer, so that both can be restored from it.

    Args:
        model: Any transformers model, or a `peft.PeftModel`. A model wrapped by `torch.compile` is unwrapped and
            compiled in place; `generate` runs it uncompiled.
        tokenizer: Saved in checkpoints, and needed to generate. Must have `len()` and `save_pretrained`.
        use_logits: Whether metrics get the logits instead of the model's whole output. Evaluation then computes no
            loss.
        metrics: Metrics of torchmetrics for training; copies of them are used for evaluation.
        eval_metrics: Metrics for evaluation, instead of those copies.
        shift_labels: Whether metrics compare each logit with the following label. Default: whether the model is causal,
            since such a model shifts the labels of its loss itself.
        allow_embedding_resizing: Whether to grow the embeddings if the tokenizer has more tokens.
        peft_config: A `peft.LoraConfig` of an adapter to add to the model.
        should_save_peft_only: Whether checkpoints of a model with an adapter hold only what training changes: the
            adapter, parameters made trainable by hand, and buffers such as the statistics of BatchNorm.
        extra_forward_args: Keys of batches to pass although the model's `forward` takes them only as `**kwargs`.

    Attributes:
        model: The model, wrapped by peft if there is an adapter. Its weights have the prefix `model.`.
        config: Configuration of the model.
        labels: Labels of the last evaluated batch, as metrics get them.
        model_forward_args: Keys of a batch that are passed to the model.
        using_peft: Whether there is an adapter.

    Raises:
        TypeError: If the model or the tokenizer has the wrong type, such as its name.
        ValueError: If the tokenizer has more tokens than the model, or the adapter is not LoRA.
        MissingConditionalImportError: If `peft_config` is given and peft is not installed.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
        >>> model = HuggingFaceModel(GPT2LMHeadModel(config), use_logits=True)
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> batch = {"input_ids": tokens, "labels": tokens}
        >>> model.loss(model(batch), batch).ndim
        0
        >>> model.eval_forward(batch).shape, model.labels
        (torch.Size([1, 4, 16]), tensor([[   2,    3,    4, -100]]))
    """

    checkpoint_integration: ClassVar[str] = "huggingface"  # the entry of checkpoints with the result of `get_metadata`

    def __init__(
        self,
        model: "PreTrainedModel | Any",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        use_logits: bool | None = False,
        metrics: "Iterable[Metric] | None" = None,
        eval_metrics: "Iterable[Metric] | None" = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: "PeftConfig | None" = None,
        should_save_peft_only: bool = True,
        *,
        extra_forward_args: Iterable[str] = (),
    ) -> None:
        super().__init__()
        model, compiler = take_out(model)  # the wrapper would prefix all names in checkpoints with `_orig_mod.`
        _check_parts(model, tokenizer)
        if tokenizer is None:
            log.warning(
                "The tokenizer was not provided. This means the tokenizer config will not be saved in the checkpoint."
            )
        else:
            fit_vocabulary(maybe_get_underlying_model(model), tokenizer, may_resize=allow_embedding_resizing)
        self.model = _with_adapter(model, peft_config)
        self.config = self.model.config
        self.tokenizer = tokenizer
        self.use_logits = bool(use_logits)
        self.using_peft = is_peft_model(self.model)
        self.should_save_peft_only = should_save_peft_only
        self._trained = set[str]()  # only grows: weights that an algorithm freezes later were trained before
        self.names_trained_beside_adapter()
        self.dummy_forward_called = False
        self.labels: Tensor | None = None
        inner = maybe_get_underlying_model(self.model)
        warn_of_lost_surgery(inner)
        self.shift_labels = resolve_shift(inner, shift_labels)
        self.model_forward_args = forward_args(inner)
        self.extra_forward_args = frozenset(extra_forward_args)
        self.train_metrics = _by_name(metrics)
        self.val_metrics = _by_name(eval_metrics) if eval_metrics is not None else copy.deepcopy(self.train_metrics)
        add_sharding_hints(self.model)
        self._came_compiled = compiler is not None
        if compiler is not None:
            compile_calls(self.model, compiler)  # of the wrapped model, adapter included
        self.register_state_dict_post_hook(_leave_base_out)
        self.register_load_state_dict_post_hook(_forgive_missing_base)

    def forward(self, batch: Any) -> Any:
        """Compute the outputs, with the loss if the batch has `labels`.

        Args:
            batch: A mapping by the names of the model's arguments.

        Raises:
            ValueError: If the batch is not a mapping.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"Unexpected batch type {type(batch).__name__}: a HuggingFaceModel takes a dict or a BatchEncoding "
                f"with the names of the model's arguments. Use a collator of transformers, or let the dataset return "
                f"dicts."
            )
        names = self.model_forward_args | self.extra_forward_args
        arguments = {name: value for name, value in batch.items() if name in names}
        is_whole = self.model.training or "position_ids" in arguments
        if is_whole and "use_cache" in names and arguments.get("past_key_values") is None:
            # A generation cache only costs memory in training, and activation checkpointing would fill it twice. With
            # one, transformers ignores positions that start again, so packed documents would attend to each other.
            arguments.setdefault("use_cache", False)
        return self.model(**arguments)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss in the model's outputs.

        Raises:
            ValueError: If there is none, because the batch has no labels.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if loss is None:
            raise ValueError(
                f"the model computed no loss for a batch with {sorted(batch)}. Put 'labels' into it, as "
                f"transformers.DataCollatorForLanguageModeling does."
            )
        return loss

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Compute the outputs for metrics, and keep their labels in `labels`.

        Args:
            batch: A mapping. With `mode='generate'`, its `generation_kwargs` are passed to `generate`.
            outputs: Outputs of `forward`, if they are already computed.

        Returns:
            The logits with `use_logits`, else the model's whole output; with `mode='generate'`, the texts.

        Raises:
            ValueError: If `mode='generate'` and there is no tokenizer, or the outputs have no logits.
            RuntimeError: If an encoder-decoder model cannot make the decoder's inputs from the labels.
        """
        mode = batch.get("mode") if isinstance(batch, Mapping) else None
        if mode == "generate":
            self.labels = batch.get("labels")
            return continuations(self, batch)
        if not self.use_logits and mode != "icl_task":
            return outputs if outputs is not None else self.forward(batch)
        labels = batch.get("labels")
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if self.config.is_encoder_decoder and outputs is None and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self._decoder_inputs(labels)
        if labels is not None and (self.shift_labels or mode == "icl_task"):
            # The last token has no successor: its label is ignored.
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        self.labels = labels
        return self._logits_of(outputs if outputs is not None else self.forward(inputs))

    def get_metrics(self, is_train: bool = False) -> "dict[str, Metric]":
        """Return the metrics of training or of evaluation."""
        return (self.train_metrics if is_train else self.val_metrics) or {}

    def update_metric(self, batch: Any, outputs: Any, metric: "Metric") -> dict[str, Any]:
        """Update a metric with the outputs of `eval_forward` and the labels in `labels`.

        A metric with the attribute `needs_batch` also gets the batch, as a keyword argument.

        Returns:
            The return value of the metric's `update`, and the metric's name for each sample.
        """
        if self.labels is not None and metric.device.type == "cpu":
            # The labels are on the device of the batch, and a metric may stay on the host.
            self.labels = self.labels.to("cpu")
        if getattr(metric, "needs_batch", False):
            result: Any = metric.update(batch=batch, outputs=outputs, labels=self.labels)
        else:
            result = metric.update(outputs, self.labels)
        result = dict(result) if isinstance(result, Mapping) else {}
        inputs = batch.get("input_ids") if isinstance(batch, Mapping) else None
        result["metric_name"] = [type(metric).__name__] * (0 if inputs is None else len(inputs))
        return result

    def generate(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Generate tokens. With a sharded model, every rank must call this, with `synced_gpus=True`.

        Args:
            input_ids: Shape `(batch, tokens)`.
            **kwargs: Arguments of `generate` in transformers. `pad_token_id` defaults to the tokenizer's.

        Returns:
            The tokens, preceded by the prompt unless the model has an encoder.
        """
        pad = getattr(self.tokenizer, "pad_token_id", None)
        if pad is not None:
            kwargs.setdefault("pad_token_id", pad)
        with as_written(self.model) if getattr(self, "_came_compiled", False) else nullcontext():
            return self.model.generate(input_ids=input_ids, **kwargs)

    def get_metadata(self) -> dict[str, Any]:
        """Return the description of model and tokenizer for checkpoints; see `composer_hf.HuggingFaceMetadata`."""
        return describe(self.model, self.tokenizer, self.names_trained_beside_adapter())

    def names_trained_beside_adapter(self) -> set[str]:
        """Return the names, without `model.`, of trained weights outside the adapter; empty without an adapter."""
        if self.using_peft:
            self._trained |= trained_beside_adapter(self.model)
        return self._trained

    load_huggingface_tokenizer_from_saved_state = staticmethod(load_tokenizer)
    load_huggingface_model_from_saved_state = staticmethod(load_model)
    hf_from_composer_checkpoint = staticmethod(hf_from_composer_checkpoint)

    def _decoder_inputs(self, labels: Tensor | None) -> Tensor:
        prepare = getattr(maybe_get_underlying_model(self.model), "prepare_decoder_input_ids_from_labels", None)
        if prepare is None or labels is None:
            lacks = "labels" if labels is None else "prepare_decoder_input_ids_from_labels"
            raise RuntimeError(
                f"{type(self.model).__name__} has an encoder and a decoder, and the batch has no "
                f"decoder_input_ids, which cannot be made from the labels: no {lacks}. Add them to the batch."
            )
        return prepare(labels=labels)

    def _logits_of(self, outputs: Any) -> Any:
        if isinstance(outputs, Mapping):
            if "logits" not in outputs:
                raise ValueError(
                    f"use_logits=True, and the outputs of {type(self.model).__name__} have no 'logits', but "
                    f"{', '.join(outputs)}. Pass use_logits=False, with metrics that take all of them."
                )
            logits: Any = outputs["logits"]
        elif isinstance(outputs, tuple | list):
            # Outputs without `return_dict` begin with the loss, a scalar, if there were labels.
            has_loss = isinstance(outputs[0], Tensor) and outputs[0].ndim == 0
            logits = outputs[1] if has_loss else outputs[0]
        else:
            logits = outputs
        if isinstance(logits, Tensor) and logits.ndim == 2 and logits.shape[1] == 1:
            logits = logits.squeeze(dim=1)  # regression, where metrics expect shape (batch,)
        return logits


def _with_adapter(model: Any, peft_config: Any) -> Any:
    if peft_config is None:
        return model
    if not peft_installed:
        raise MissingConditionalImportError("peft", "peft", distribution="composer-hf")
    if is_peft_model(model):
        warnings.warn(
            "PEFT model was passed in directly. Ignoring the provided PEFT config.", UserWarning, stacklevel=3
        )
        return model
    kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type)).upper()
    if kind != "LORA":
        raise ValueError(f"PEFT type {kind} is not supported by HuggingFaceModel. Use LORA, with peft.LoraConfig.")
    peft_config.peft_type = kind  # peft looks up this and the task type in upper case
    if peft_config.task_type is not None:
        peft_config.task_type = str(getattr(peft_config.task_type, "value", peft_config.task_type)).upper()
    from peft import get_peft_model  # optional

    return get_peft_model(model, peft_config)


def _by_name(metrics: "Iterable[Metric] | None") -> "dict[str, Metric] | None":
    return None if metrics is None else {type(metric).__name__: metric for metric in metrics}


def _leave_base_out(module: torch.nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    """Remove untrained weights from a state dict if only trained weights are saved."""
    assert isinstance(module, HuggingFaceModel)
    if not (module.using_peft and module.should_save_peft_only):
        return
    own = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
    beside = module.names_trained_beside_adapter()
    for name in own.keys() - _adapter_weights(module, own).keys():
        if published_name(name.removeprefix(prefix)) not in beside:
            del state_dict[name]


def _forgive_missing_base(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Ignore missing base weights when only an adapter is loaded."""
    assert isinstance(module, HuggingFaceModel)
    if module.using_peft and module.should_save_peft_only:
        missing: list[str] = incompatible_keys.missing_keys
        adapter = _adapter_weights(module, dict.fromkeys(missing))
        beside = module.names_trained_beside_adapter()
        if lost := [name for name in missing if name not in adapter and published_name(name) in beside]:
            warnings.warn(
                f"the checkpoint has an adapter without {len(lost)} weights that training changes besides it, and they "
                f"stay as they are here: {', '.join(lost[:_MAX_NAMES])}. Load a checkpoint that has them, if they were "
                f"trained.",
                UserWarning,
                stacklevel=2,
            )
        missing[:] = [name for name in missing if name in adapter]  # in place: `load_state_dict` reads this list


def _adapter_weights(module: HuggingFaceModel, weights: Mapping[str, Any]) -> dict[str, Any]:
    peft_model: Any = module.model
    name = adapter_of(peft_model)
    return filter_state_dict_peft(weights, peft_model.peft_config[name], name, remove_adapter_names=False)


def continuations(model: "HuggingFaceModel", batch: Mapping[str, Any]) -> list[str]:
    """Return the generated text for each prompt of a batch. Every rank must call this.

    Raises:
        ValueError: If the model has no tokenizer.
    """
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise ValueError(
            "Generation eval cannot be used without providing a tokenizer to the model constructor. Pass "
            "tokenizer=... to HuggingFaceModel."
        )
    prompts = batch["input_ids"]
    generated = model.generate(
        prompts,
        attention_mask=batch.get("attention_mask"),
        synced_gpus=dist.get_world_size() > 1,  # shards are gathered in every step, so all ranks run equally many
        **batch.get("generation_kwargs", {}),
    )
    # Encoder-decoder models return only new tokens; the others repeat the prompt first.
    new = generated if model.config.is_encoder_decoder else generated[:, prompts.shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    if len(tokenizer(" a", add_special_tokens=False)["input_ids"]) != 1:
        return [f" {text}" for text in texts]  # such tokenizers strip the leading space when decoding
    return texts


def _check_parts(model: Any, tokenizer: Any) -> None:
    """Raise unless a model is a module with a configuration of transformers, and a tokenizer can be saved."""
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "to_json_string"):
        raise TypeError(
            f"model={model!r:.200} must be a module with a `config` of transformers, which every checkpoint keeps, and "
            f"not a name or a class. Give AutoModelForCausalLM.from_pretrained(...), another PreTrainedModel, or a "
            f"peft.PeftModel. Wrap another module with ComposerModel.from_module(module, loss_fn)."
        )
    if tokenizer is None or (isinstance(tokenizer, Sized) and hasattr(tokenizer, "save_pretrained")):
        return
    raise TypeError(
        f"tokenizer={tokenizer!r:.200} must be a tokenizer with len() and save_pretrained, and not a name or a class. "
        f"Give AutoTokenizer.from_pretrained(...), or PreTrainedTokenizerFast(tokenizer_object=...) around a "
        f"tokenizers.Tokenizer. With None, checkpoints have no tokenizer."
    )
