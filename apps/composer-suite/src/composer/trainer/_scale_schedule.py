"""Making PyTorch's own schedules longer or shorter."""

from composer_optim import scale_pytorch_scheduler

__all__ = ["scale_pytorch_scheduler"]
