"""The names of parameters, as the model that was not wrapped yet had them."""

__all__ = ["clean_name"]

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # of torch's checkpoint wrapper and of torch.compile


def clean_name(name: str) -> str:
    """Return a parameter's name without what wrappers add to it.

    Example:
        >>> clean_name("blocks.0._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
