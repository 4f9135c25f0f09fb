"""Which methods of a base class an object has made its own."""

__all__ = ["overrides"]


def overrides(thing: object, base: type, method: str) -> bool:
    """Answer whether calling the method on this object can do anything that the base's would not.

    An object that does not derive from `base` is only known by what it does, so the answer is yes.
    """
    cls = type(thing)
    if not issubclass(cls, base):
        return True
    return getattr(cls, method) is not getattr(base, method) or method in vars(thing)
