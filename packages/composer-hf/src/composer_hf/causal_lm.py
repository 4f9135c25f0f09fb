"""A causal language model built from its name or path and the settings of a configuration file."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from composer_dist import dist
from composer_hf.adapters import peft_installed
from composer_hf.model import HuggingFaceModel
from composer_hf.sharding_hints import prepare_hf_model_for_fsdp
from composer_models import LanguageCrossEntropy, LanguagePerplexity, MissingConditionalImportError
from composer_models.metrics import counting_from_zero

if TYPE_CHECKING:
    from torchmetrics import Metric
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
else:  # for typing.get_type_hints, without the import time of these libraries
    Metric = PretrainedConfig = PreTrainedTokenizerBase = Any

__all__ = ["ComposerHFCausalLM", "InitDevice", "hf_causal_lm"]

InitDevice = Literal["cpu", "meta", "mixed"]

_INIT_DEVICES: Final = ("cpu", "meta", "mixed")


class ComposerHFCausalLM(HuggingFaceModel):
    """A causal language model, given by its name on the Hub or its path, with language modeling metrics.

    Metrics compare each logit with the following token. In a distributed run, one rank of each node downloads first.
    With `init_device='mixed'`, only rank 0 holds weights, and FSDP broadcasts them.

    Args:
        tokenizer: Tokenizer of the model.
        pretrained_model_name_or_path: A name on the Hub, or a folder.
        pretrained: Whether to load the weights. Otherwise they are initialized randomly.
        pretrained_lora_id_or_path: An adapter to load onto the model and train further.
        trust_remote_code: Whether to run code that comes with the model.
        use_auth_token: Whether, or with which token, to log in to the Hub.
        use_flash_attention_2: Whether to use the attention of the package flash-attn.
        attn_implementation: Name of the attention implementation in transformers. Default: its fastest one that needs
            no further package.
        load_in_8bit: Whether to quantize the weights while loading, with the package bitsandbytes.
        init_device: `'cpu'`; `'meta'`, where FSDP initializes the weights; or `'mixed'`.
        config_overrides: Values that replace those of the configuration; dicts are merged.
        peft_config: Values of a `peft.LoraConfig`, with `peft_type` LORA and `task_type` CAUSAL_LM.
        use_train_metrics: Whether to compute metrics in training, too.
        allow_embedding_resizing: As in `HuggingFaceModel`.
        additional_train_metrics: Names of metrics of composer_models or torchmetrics.
        additional_eval_metrics: The same for evaluation.
        should_save_peft_only: As in `HuggingFaceModel`.

    Raises:
        ValueError: If settings are invalid or contradict each other.
        RuntimeError: On all ranks, with the failing ranks, if some rank cannot build the model.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        pretrained_model_name_or_path: str,
        pretrained: bool = True,
        pretrained_lora_id_or_path: str | None = None,
        trust_remote_code: bool = False,
        use_auth_token: bool | str = False,
        use_flash_attention_2: bool = False,
        attn_implementation: str | None = None,
        load_in_8bit: bool = False,
        init_device: InitDevice = "cpu",
        config_overrides: Mapping[str, Any] | None = None,
        peft_config: Mapping[str, Any] | None = None,
        use_train_metrics: bool = True,
        allow_embedding_resizing: bool = False,
        additional_train_metrics: Sequence[str] | None = None,
        additional_eval_metrics: Sequence[str] | None = None,
        should_save_peft_only: bool = True,
    ) -> None:
        if init_device not in _INIT_DEVICES:
            raise ValueError(f"init_device={init_device!r} must be 'cpu', 'meta' or 'mixed'.")
        if init_device == "meta" and pretrained:
            raise ValueError(
                "init_device='meta' begins without weights, and pretrained=True loads them. Set init_device='mixed' "
                "to load them on rank 0, or pretrained=False."
            )
        if peft_config is not None and pretrained_lora_id_or_path is not None:
            raise ValueError(
                f"peft_config adds a new adapter, and pretrained_lora_id_or_path={pretrained_lora_id_or_path!r} "
                f"loads an existing one. Give one of them."
            )
        options = _loading_options(use_auth_token, use_flash_attention_2, attn_implementation, load_in_8bit)
        path = pretrained_model_name_or_path

        def build() -> Any:
            model = _build(path, pretrained, trust_remote_code, options, config_overrides or {}, init_device)
            if pretrained_lora_id_or_path is None:
                return model
            return _peft().PeftModel.from_pretrained(model, pretrained_lora_id_or_path, is_trainable=True)

        model = _on_every_rank(build, path)
        with counting_from_zero():
            eval_metrics = [LanguageCrossEntropy(), LanguagePerplexity(), *_named(additional_eval_metrics)]
            train_metrics = [LanguageCrossEntropy(), LanguagePerplexity(), *_named(additional_train_metrics)]
        super().__init__(
            model,
            tokenizer,
            use_logits=True,
            metrics=train_metrics if use_train_metrics else None,
            eval_metrics=eval_metrics,
            shift_labels=True,
            allow_embedding_resizing=allow_embedding_resizing,
            peft_config=None if peft_config is None else _lora_config(peft_config),
            should_save_peft_only=should_save_peft_only,
        )
        prepare_hf_model_for_fsdp(self.model, init_device)  # after peft has wrapped the model, which gets the hints


def hf_causal_lm(tokenizer: Any, *, name: str = "hf_causal_lm", **settings: Any) -> ComposerHFCausalLM:
    """Build a model from the `model` section of a configuration file.

    Args:
        tokenizer: Tokenizer of the model.
        name: The kind of model that the section names.
        **settings: The rest of the section: arguments of `ComposerHFCausalLM`.

    Raises:
        ValueError: If `name` is another kind of model.
    """
    if name != "hf_causal_lm":
        raise ValueError(f"name={name!r} must be 'hf_causal_lm'. Use another builder for another kind of model.")
    return ComposerHFCausalLM(tokenizer, **settings)


def _loading_options(
    use_auth_token: bool | str, use_flash_attention_2: bool, attn_implementation: str | None, load_in_8bit: bool
) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that both transformers 4 and 5 accept."""
    options: dict[str, Any] = {"token": use_auth_token} if use_auth_token else {}
    if use_flash_attention_2:
        from transformers.utils.import_utils import is_flash_attn_2_available

        if attn_implementation not in (None, "flash_attention_2") or not is_flash_attn_2_available():
            raise ValueError(
                f"use_flash_attention_2=True needs the package flash-attn, a CUDA device, and no other attention; got "
                f"{attn_implementation=}. Leave the setting out to use PyTorch's attention, which computes the same."
            )
        attn_implementation = "flash_attention_2"
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if load_in_8bit:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise MissingConditionalImportError("bitsandbytes", "bitsandbytes", distribution="transformers")
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    return options


def _build(
    path: str,
    pretrained: bool,
    trust_remote_code: bool,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any],
    init_device: InitDevice,
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    # The arguments that every download needs.
    access: dict[str, Any] = {name: value for name, value in options.items() if name == "token"}
    access["trust_remote_code"] = trust_remote_code

    # Local rank 0 fills the cache, from which the other ranks of the node read.
    with dist.run_local_rank_zero_first():
        config = AutoConfig.from_pretrained(path, **access)
        if config.model_type == "mpt":
            raise ValueError(f"{path!r} is an MPT model, which is trained by its own class. Choose another model.")
        config.use_cache = False  # a generation cache only costs memory in training
        _override(config, overrides)
        has_weights = init_device == "cpu" or (init_device == "mixed" and dist.get_global_rank() == 0)
        if has_weights and pretrained:
            # The dtype of training must not depend on the dtype of the file.
            return AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code, **options
            )
        own = {name: value for name, value in options.items() if name == "attn_implementation"}
        with contextlib.nullcontext() if has_weights else _empty_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=trust_remote_code, **own
            )
        model.tie_weights()
        with contextlib.suppress(OSError):  # an optional file, which `from_pretrained` reads and `from_config` does not
            model.generation_config = GenerationConfig.from_pretrained(path, **access)
        return model


@contextlib.contextmanager
def _empty_weights() -> Iterator[None]:
    """Build models without allocating memory for their weights.

    In transformers 4, constructors compute the non-persistent buffers, so these are kept; in 5, the initialization of
    the weights computes them.
    """
    import transformers

    if int(transformers.__version__.partition(".")[0]) >= 5:
        with torch.device("meta"):
            yield
    else:
        from transformers.integrations.accelerate import (
            init_empty_weights,  # pyright: ignore[reportAttributeAccessIssue]  # gone in transformers 5
        )

        with init_empty_weights(include_buffers=False):
            yield


def _override(config: "PretrainedConfig | Any", overrides: Mapping[str, Any]) -> None:
    """Set values in a configuration, or in its text part if only that has them."""
    # Multimodal models keep the settings of their language model in `text_config`.
    for name, value in overrides.items():
        text = getattr(config, "text_config", None)
        owner = config if hasattr(config, name) or text is None or not hasattr(text, name) else text
        if not hasattr(owner, name):
            raise ValueError(
                f"config_overrides has {name!r}, which the {type(config).__name__} of a {config.model_type!r} model "
                f"does not have. Use one of: {', '.join(sorted(config.to_dict()))}."
            )
        current = getattr(owner, name)
        if isinstance(current, dict) and isinstance(value, Mapping):
            if unknown := value.keys() - current.keys():
                raise ValueError(
                    f"config_overrides[{name!r}] has {sorted(unknown)}, and known are {', '.join(sorted(current))}."
                )
            value = {**current, **value}
        setattr(owner, name, value)


def _on_every_rank(build: Callable[[], Any], path: str) -> Any:
    """Build a model, and raise on all ranks if any rank fails. Every rank must call this."""
    model: Any = None
    error: Exception | None = None
    try:
        model = build()
    except Exception as raised:  # of any kind: the other ranks would hang in the next collective
        error = raised
    told = dist.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    failures = {rank: text for rank, text in enumerate(told) if text}
    if not failures:
        return model
    if error is not None and len(told) == 1:
        raise error
    raise RuntimeError(f"{path!r} could not be built on ranks {list(failures)}: {failures}") from error


def _peft() -> Any:
    if not peft_installed:
        raise MissingConditionalImportError("peft", "peft", distribution="composer-hf")
    import peft

    return peft


def _lora_config(values: Mapping[str, Any]) -> Any:
    settings = {**values, "peft_type": str(values.get("peft_type", "")).upper()}
    settings["task_type"] = str(values.get("task_type", "")).upper()
    if settings["peft_type"] != "LORA" or settings["task_type"] != "CAUSAL_LM":
        raise ValueError(
            f"peft_config has peft_type={values.get('peft_type')!r} and task_type={values.get('task_type')!r}. Give "
            f"'LORA' and 'CAUSAL_LM'."
        )
    del settings["peft_type"]  # `LoraConfig` sets it itself
    return _peft().LoraConfig(**settings)


def _named(names: Sequence[str] | None) -> "list[Metric]":
    import torchmetrics

    import composer_models

    kinds: dict[str, Any] = {
        name: getattr(composer_models, name, getattr(torchmetrics, name, None)) for name in names or ()
    }
    if unknown := [name for name, kind in kinds.items() if kind is None]:
        raise ValueError(f"no metric is called {unknown[0]!r}, neither in composer_models nor in torchmetrics.")
    return [kind() for kind in kinds.values()]
