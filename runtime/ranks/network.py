"""Which network interface ranks of several hosts should talk over."""

import array
import contextlib
import os
import socket

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def use_route_to(address: str, port: int) -> str | None:
    """Have gloo and NCCL's sockets talk over the interface that reaches `address`, where the ranks meet; what
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME say goes first.

    Gloo would look up this host's own name, which often means the loopback interface; NCCL takes the first interface.
    Returns this host's address there, and None where it cannot be told.
    """
    interface = interface_to(address, port)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one, not all that begin so
    return own_address(address, port)


def interface_to(address: str, port: int) -> str | None:
    """The name of the interface whose IPv4 address the system would use to reach `address`; None when unknown."""
    own = own_address(address, port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        names = (name for _, name in socket.if_nameindex() if _address_of(name, probe) == own)
        return None if own is None else next(names, None)


def own_address(address: str, port: int) -> str | None:
    """This host's address on the way to `address`, IPv4 where there is a choice; None when there is no way."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
    except OSError:  # a name that nobody knows
        return None
    for family, _, _, _, place in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # datagrams: picks a route, sends nothing
            return probe.getsockname()[0]
    return None


def _address_of(interface: str, any_socket: socket.socket) -> str | None:
    try:
        import fcntl

        request = array.array("B", interface.encode()[:15].ljust(40, b"\0"))
        fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
    except (ImportError, OSError):  # not this system, or an interface without address
        return None
    return socket.inet_ntoa(request.tobytes()[20:24])
