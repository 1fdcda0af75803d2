"""The sockets of a process: where it listens, and with whom it is connected."""

import os
import socket
import stat


def of_this_process():
    """Return {"listens": [end], "connections": [(here, there)]}; an end is (address, port)."""
    listens, connections = [], []
    for number in map(int, os.listdir("/dev/fd")):
        try:
            if number < 3 or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue  # (to make a socket object of a file fails, and leaves its copy open)
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listens.append(copy.getsockname()[:2])
                else:
                    connections.append((copy.getsockname()[:2], copy.getpeername()[:2]))
        except OSError:
            pass  # closed since, or not connected
    return {"listens": listens, "connections": connections}
