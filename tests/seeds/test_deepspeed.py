"""DeepSpeed, of which two guides have the same script."""

import re
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.models import ComposerClassifier
from composer_dist.testing import run_ranks

GUIDES = ["trainer_guide", "distributed_guide"]
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


def train(sources):
    """Return for each script which strategy trained, and whether all weights changed."""
    warnings.simplefilter("ignore")  # DeepSpeed's own, and that the guides name no optimizer
    loader = DataLoader(TensorDataset(torch.rand(2048, 4), torch.arange(2048) % 3), batch_size=2048)
    seen = []
    for source in sources:
        model = ComposerClassifier(nn.Linear(4, 3), num_classes=3)
        before = model.module.weight.detach().clone()
        names = {"model": model, "train_dataloader": loader, "eval_dataloader": loader}
        exec(source, names)
        with names["trainer"] as trainer:
            trainer.fit(duration="2ba")
            seen.append((type(trainer.strategy).__name__, bool((before != model.module.weight).all())))
    return seen


@pytest.mark.slow
def test_the_configuration_of_the_guides_trains(text, tmp_path):
    sources = [text(guide, "DeepSpeed") for guide in GUIDES]
    # "Providing an empty dictionary to DeepSpeed is also valid."
    sources.append(re.sub(r"deepspeed_config=\{.*\}\)", "deepspeed_config={})", sources[0], flags=re.DOTALL))
    assert run_ranks(train, sources, store=tmp_path / "store", world_size=1) == [[("DeepSpeed", True)] * 3]


@pytest.mark.filterwarnings("ignore:No optimizer was specified:UserWarning")
@pytest.mark.parametrize("guide", GUIDES)
def test_the_configuration_must_not_conflict_with_the_dataloader(run, model, dataloader, guide):
    with pytest.raises(ValueError, match=r"train_batch_size.*2048"):
        run(guide, "DeepSpeed", model=model, train_dataloader=dataloader, eval_dataloader=dataloader)
