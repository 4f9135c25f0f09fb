"""Gated linear units: feed-forward layers of BERT in which one projection gates another one."""

from composer_algorithms.gated_linear_units.algorithm import (
    BERTGatedFFOutput,
    GatedLinearUnits,
    apply_gated_linear_units,
)
from composer_algorithms.metadata import Metadata

__all__ = ["BERTGatedFFOutput", "GatedLinearUnits", "apply_gated_linear_units", "METADATA"]

METADATA = Metadata(
    name="Gated Linear Units",
    class_name="GatedLinearUnits",
    functional="apply_gated_linear_units",
    tldr="Swaps the feed-forward layers of BERT for gated linear units",
    attribution="(Shazeer, 2020)",
    link="https://arxiv.org/abs/2002.05202",
    domains=("nlp",),
    summary=(
        "Replaces the first projection of each feed-forward layer by two, one of which passes through the activation "
        "and is multiplied with the other."
    ),
    use=(
        "Before pretraining, as the new weights are untrained. Use GELU or ReLU and no biases. It converges better, at "
        "a slightly lower throughput and with half more parameters in these layers; lower the model's intermediate "
        "size to 2/3, to a multiple of 8, for equally many."
    ),
)
