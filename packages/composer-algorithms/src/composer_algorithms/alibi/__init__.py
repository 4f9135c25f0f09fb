"""ALiBi: attention with a position bias that grows with distance and extrapolates to longer sequences."""

from composer_algorithms.alibi.algorithm import Alibi
from composer_algorithms.alibi.surgery import apply_alibi
from composer_algorithms.metadata import Metadata

__all__ = ["Alibi", "apply_alibi", "METADATA"]

METADATA = Metadata(
    name="Alibi",
    class_name="Alibi",
    functional="apply_alibi",
    tldr="Replaces position embeddings by a bias of the attention",
    attribution="(Press et al, 2021)",
    link="https://arxiv.org/abs/2108.12409v1",
    domains=("nlp",),
    summary=(
        "Takes the position embeddings out of a transformer and lowers each attention score by an amount that grows "
        "with the distance of the two tokens. Models trained on short sequences work on longer ones."
    ),
    use=(
        "Recommended for GPT-2 and BERT. Trained at a quarter of the length, GPT-2 is better at the whole one and "
        "trains 1.16 to 1.19 times as fast. Do not train on fewer than 256 tokens."
    ),
)
