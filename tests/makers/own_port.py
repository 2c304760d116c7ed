"""Ports for servers that are told one."""

import contextlib
import random
import socket


def find_port() -> int:
    """A free port below those that the system gives to whoever asks for any: no other test is given it meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("none of 100 ports is free")
