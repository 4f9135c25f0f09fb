"""Interface between the training loop and models, and small reference models."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_hf import HuggingFaceModel as HuggingFaceModel
    from composer_hf import (
        write_huggingface_pretrained_from_composer_checkpoint as write_huggingface_pretrained_from_composer_checkpoint,
    )
    from composer_models import ComposerClassifier as ComposerClassifier
    from composer_models import ComposerGPT as ComposerGPT
    from composer_models import ComposerModel as ComposerModel
    from composer_models import Initializer as Initializer
    from composer_models import composer_resnet as composer_resnet
    from composer_models import composer_timm as composer_timm
    from composer_models import mnist_model as mnist_model

__all__ = [
    "ComposerModel",
    "ComposerClassifier",
    "HuggingFaceModel",
    "Initializer",
    "composer_resnet",
    "composer_timm",
    "mnist_model",
    "ComposerGPT",
    "write_huggingface_pretrained_from_composer_checkpoint",
]
if find_spec("composer_hf") is None:  # a star import asks for every name
    __all__.remove("HuggingFaceModel")
    __all__.remove("write_huggingface_pretrained_from_composer_checkpoint")

_WRAP = "wrap it with ComposerClassifier(module, num_classes=...)."
_SUBCLASS = "call it in the forward method of a ComposerModel."
_BERT = f"load transformers.AutoModelForMaskedLM, and {_SUBCLASS}"
_CLASSIFIER = f"load transformers.AutoModelForSequenceClassification, and {_SUBCLASS}"
_GPT = f"load transformers.AutoModelForCausalLM, and {_SUBCLASS}"
_FORMER_ZOO = {
    "composer_resnet_cifar": f"build a ResNet for small images, and {_WRAP}",
    "composer_efficientnetb0": f"make the network with torchvision.models.efficientnet_b0, and {_WRAP}",
    "vit_small_patch16": "call composer_timm('vit_small_patch16_224', num_classes=...).",
    "ComposerDeepLabV3": f"make the network with torchvision.models.segmentation, and {_SUBCLASS}",
    "composer_deeplabv3": f"make the network with torchvision.models.segmentation, and {_SUBCLASS}",
    "UNet": f"take a U-Net from a library for segmentation, and {_SUBCLASS}",
    "MMDetModel": f"make the network with torchvision.models.detection, and {_SUBCLASS}",
    "SSD": f"make the network with torchvision.models.detection, and {_SUBCLASS}",
    "ComposerResNet": "it is what composer_resnet(model_name=...) makes.",
    "MNIST_Classifier": "it is what mnist_model() makes.",
    "ComposerBERT": _BERT,
    "BERTModel": _BERT,
    "create_bert_mlm": _BERT,
    "BERTForClassification": _CLASSIFIER,
    "create_bert_classification": _CLASSIFIER,
    "GPT2Model": _GPT,
    "create_gpt2": _GPT,
}

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_models": [
            "ComposerModel",
            "ComposerClassifier",
            "Initializer",
            "composer_resnet",
            "composer_timm",
            "mnist_model",
            "ComposerGPT",
        ],
        "composer.models.huggingface": [
            "HuggingFaceModel",
            "write_huggingface_pretrained_from_composer_checkpoint",
        ],
    },
    submodules=["base", "huggingface", "initializers", "loss", "tasks"],
    removed=_FORMER_ZOO,
)
