"""Where a peer listens: one address of this machine, and all of them only when that is said in words."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

import psutil

from ckpt_core.errors import ConfigError

ALL = "all"
"""The name of every address of this machine."""

_TEXT = re.compile(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:/]+)):([0-9]{1,5})")


@dataclass(frozen=True)
class Address:
    """An address of this machine (a number, or its name; `ALL`), and a port; 0: the system chooses one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, name: str = "--bind") -> Address:
    """What a person says after --bind, or as `name`.

    Raises:
        ConfigError: it is no address; or means every interface without saying so.
    """
    found = _TEXT.fullmatch(text)
    if found is None or int(found[3]) > 65535:
        raise ConfigError(f"{name} {text} is no address: write it like 10.0.0.5:7070")
    host = found[1] or found[2]
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = host == "*"
    if everywhere:
        raise ConfigError(
            f"{name} {text} listens on every network of this machine: name the address of the one between "
            f"the nodes, or say {ALL}:{found[3]} if all of them are meant"
        )
    return Address(host, int(found[3]))


def of_interface(address: Address) -> Address:
    """The same, where the host may be the name of a network interface of this machine: its first address.

    Raises:
        ConfigError: the interface has none.
    """
    found = psutil.net_if_addrs().get(address.host)
    if found is None:
        return address
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in found:
            if one.family == family and not one.address.startswith("fe80"):
                return Address(one.address, address.port)
    raise ConfigError(f"the interface {address.host} has no address: see `ip addr`")


def bound(address: Address) -> socket.socket:
    """A socket that has an address, and does not listen yet.

    Raises:
        ConfigError: the address is none of this machine's, or is taken.
    """
    try:
        if address.host == ALL:
            return _bound(socket.AF_INET, ("0.0.0.0", address.port))
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        return _bound(found[0][0], found[0][4])
    except OSError as exc:
        raise ConfigError(
            f"cannot listen at {address}: {exc.strerror or exc}: name an address that `ip addr` shows on "
            "this machine, and a port that is free"
        ) from exc


def _bound(family: int, place: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
    except BaseException:
        sock.close()
        raise
    return sock
