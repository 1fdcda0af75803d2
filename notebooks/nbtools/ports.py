"""Ports for those who have to name one."""

import contextlib
import random
import socket


def free_ports(count):
    """Return `count` different ports of this machine on which nobody listens now.

    They lie below those that the operating system gives away by itself (from 32768 on Linux, from
    49152 on macOS). So no other program is given one of them before it is used.
    """
    ports = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 12_000):
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports
