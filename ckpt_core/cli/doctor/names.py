"""Whether names are found soon: for its log, torch looks up who is at the other end of each connection."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from ckpt_core.cli.doctor.finding import Finding, ok, warning
from ckpt_core.coordination import own_address

_LOOKS = 5
_SLOW_S = 0.3
_LIMIT_S = 2.0
"""A resolver waits five seconds for each answer, unless it is told otherwise."""

_ADVICE = (
    "have `::ffff:ADDRESS NAME` for each machine in /etc/hosts, "
    "or start the job with RES_OPTIONS='timeout:1 attempts:1'"
)


def check_names() -> Finding:
    """How long it takes to find the name of this machine's address, as the store of the ranks has it.

    The store listens for IPv6 and IPv4 at once, so it has addresses of IPv4 as "::ffff:ADDRESS", which the
    usual lines of /etc/hosts do not answer for. A name server that is rarely slow is found by chance.
    """
    address = f"::ffff:{own_address()}"
    longest_s = _longest_s(address)
    if longest_s < _SLOW_S:
        return ok("names", f"{address} is looked up in {longest_s * 1000:.0f} ms")
    more = " or more" if longest_s >= _LIMIT_S else ""
    found = f"the name of {address} is looked up for {longest_s:.1f} s{more}"
    return warning("names", f"{found}, and ranks wait so long for each connection", _ADVICE)


def _longest_s(address: str) -> float:
    spent_s = [0.0]

    def look() -> None:
        for _ in range(_LOOKS):
            began_s = time.monotonic()
            with suppress(socket.gaierror):  # no name: what matters is how soon that is known
                socket.getnameinfo((address, 0), socket.NI_NUMERICSERV)
            spent_s.append(time.monotonic() - began_s)

    # A thread, since nothing ends a lookup.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(_LIMIT_S)
    return _LIMIT_S if looking.is_alive() else max(spent_s)
