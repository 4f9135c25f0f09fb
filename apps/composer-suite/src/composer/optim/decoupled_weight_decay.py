"""Optimizers whose weight decay does not depend on the learning rate."""

from composer_optim import DecoupledAdamW, DecoupledSGDW

__all__ = ["DecoupledSGDW", "DecoupledAdamW"]
