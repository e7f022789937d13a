"""What is asked for its ranks and is no bootstrap server."""

import socket
import threading

import pytest

from encodepool_worker.client.routes import encode_tp_size
from encodepool_worker.errors import ClientError


def test_a_port_that_does_not_speak_http_is_named_as_the_wrong_one():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"\0\0\x06\x04 nothing of that kind\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        address = server.getsockname()[:2]
        with pytest.raises(ClientError, match=rf":{address[1]} is not the bootstrap server .* is not HTTP"):
            encode_tp_size(address)
        thread.join()
