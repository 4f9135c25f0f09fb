"""SGD and AdamW whose weight decay does not depend on how large the learning rate was chosen.

PyTorch's AdamW shrinks the weights by `lr * weight_decay` in every step, and its SGD mixes the decay into the
gradient, so whoever chooses another learning rate changes the decay too. Here the weights shrink by
`(lr / initial_lr) * weight_decay`: a schedule moves both alike, and the choice of the initial learning rate leaves
the decay alone. All arithmetic is done by PyTorch's own kernels.
"""

from composer_optim.decoupled_adamw import DecoupledAdamW
from composer_optim.decoupled_sgdw import DecoupledSGDW

__all__ = ["DecoupledSGDW", "DecoupledAdamW"]
