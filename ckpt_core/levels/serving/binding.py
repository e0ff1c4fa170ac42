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
    if host == "*" or _is_everywhere(_number(host)):
        raise _everywhere(f"{name} {text} listens on", found[3])
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
        ConfigError: the address is none of this machine's, or is taken; or turns out to be every one of them,
            which was not said in words.
    """
    try:
        if address.host == ALL:
            return _bound(socket.AF_INET, ("0.0.0.0", address.port))
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        sock = _bound(found[0][0], found[0][4])
    except OSError as exc:
        raise ConfigError(
            f"cannot listen at {address}: {exc.strerror or exc}: name an address that `ip addr` shows on "
            "this machine, and a port that is free"
        ) from exc
    # What a name means is known only now; nobody can have come yet.
    if _is_everywhere(str(sock.getsockname()[0])):
        sock.close()
        raise _everywhere(f"cannot listen at {address}: that is", str(address.port))
    return sock


def _number(host: str) -> str:
    """A number as the system reads it (`0`, `0x0` and `0.0` are 0.0.0.0); a name as it is. Asks nobody."""
    try:
        return str(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][4][0])
    except (OSError, ValueError):
        return host


def _is_everywhere(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_unspecified


def _everywhere(what: str, port: str) -> ConfigError:
    return ConfigError(
        f"{what} every network of this machine: name the address of the one between the nodes, or say "
        f"{ALL}:{port} if all of them are meant"
    )


def _bound(family: int, place: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
    except BaseException:
        sock.close()
        raise
    return sock
