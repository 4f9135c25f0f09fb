import socket

from composer_dist import get_free_tcp_port


def test_somebody_can_listen_on_a_free_port():
    port = get_free_tcp_port()
    with socket.create_server(("127.0.0.1", port)) as listener:
        assert listener.getsockname()[1] == port
