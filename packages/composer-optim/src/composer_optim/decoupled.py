"""SGD and AdamW with weight decay that does not depend on the choice of the learning rate.

PyTorch's AdamW shrinks the weights by `lr * weight_decay` in every step, and its SGD adds the decay to the gradient,
so another learning rate changes the decay too. Here the weights shrink by `(lr / initial_lr) * weight_decay`: a
schedule scales both alike, and the initial learning rate does not affect the decay. All arithmetic is done by
PyTorch's own kernels.
"""

from composer_optim.decoupled_adamw import DecoupledAdamW
from composer_optim.decoupled_sgdw import DecoupledSGDW

__all__ = ["DecoupledSGDW", "DecoupledAdamW"]
