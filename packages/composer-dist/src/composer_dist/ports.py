"""Ports on which processes can meet."""

import socket

__all__ = ["get_free_tcp_port"]


def get_free_tcp_port() -> int:
    """Return the number of a TCP port on which nobody listens on this machine.

    It is not reserved: another process may take it before you do. Where you can, let the system choose by listening
    on port 0, and ask which it was.

    Example:
        >>> 0 < get_free_tcp_port() < 65536
        True
    """
    with socket.socket() as listener:
        listener.bind(("", 0))  # all addresses, since whoever gets the number may listen on any
        return listener.getsockname()[1]
