"""What this machine's network looks like, seen with the standard library alone."""

import collections
import contextlib
import fcntl
import ipaddress
import os
import random
import socket
import struct
import sys

SIOCGIFADDR = 0x8915 if sys.platform == "linux" else 0xC0206921  # "the address of an interface"
PORTS = range(20_000, 32_000)  # below those that systems give to whoever asks for any


def interfaces():
    """Return {interface: its first IPv4 address, or None}, in the system's order."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                found[name] = None
    return found


def loopback():
    """Return the name of the interface that no other machine reaches: lo, on a Mac lo0."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def is_loopback(address):
    """Return whether only this machine can reach `address`, a number and not a name."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def outward():
    """Return the interfaces at which another machine may reach this one."""
    return [name for name, address in interfaces().items() if address and not is_loopback(address)]


def addresses_of(name):
    """Return the addresses that `name` resolves to, or []."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(answer[4][0] for answer in answers))


def address_towards(address):
    """Return this machine's own address on the way to `address`; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def interface_of(address):
    """Return the interface that has this address, or None; any 127.x.x.x is the loopback's."""
    for name, own in interfaces().items():
        if own == address or (own and is_loopback(own) and is_loopback(address)):
            return name
    return None


def gloo_address():
    """Return the address that gloo gives to the other ranks, as ProcessGroupGloo.cpp chooses it.

    That of the interface in GLOO_SOCKET_IFNAME; else the first one of the host's name that belongs
    to this machine; else 127.0.0.1. Raises OSError if there is no such interface.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if chosen:
        address = interfaces().get(chosen)
        if address is None:
            raise OSError(f"GLOO_SOCKET_IFNAME={chosen}: no such interface, or it has no address")
        return address
    for address in addresses_of(socket.gethostname()):
        with contextlib.suppress(OSError):
            listen_at(address).close()
            return address
    return "127.0.0.1"


def listen_at(address, port=0):
    """Return a socket that listens at this address alone, by default at a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


def free_ports(count):
    """Return `count` different ports of this machine on which nobody listens now.

    They lie below those that the operating system gives away by itself (from 32768 on Linux, from
    49152 on macOS). So no other program is given one of them before it is used; nor is another
    thread of this one, until some hundred others have been.
    """
    ports = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), listen_at("127.0.0.1", port):
            if port not in _given:  # while we listen there, no other thread can
                _given.append(port)
                ports.append(port)
    return ports


_given = collections.deque(maxlen=500)


def let_stores_listen_at_one_address():
    """Let PyTorch's stores listen at the address that they are given; by default it is at all.

    For notebooks, which open one for a moment: a store has no password.
    """
    from torch import distributed
    from torch.distributed import rendezvous
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    class Store(distributed.TCPStore):
        def __init__(self, host_name, port, world_size=None, is_master=False, *args, **options):
            if is_master:
                options["master_listen_fd"] = listen_at(host_name, port).detach()
            super().__init__(host_name, port, world_size, is_master, *args, **options)

    for module in (distributed, rendezvous, static_tcp_rendezvous):
        module.TCPStore = Store
