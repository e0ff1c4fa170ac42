"""A large file on its way to a peer: in parts, each vouched for by a key of the job's token.

Idea: the client of object stores signs a SHA-256 of each part, and the peer computes it again: these two are
most of what a byte costs on its way. A peer takes an AES-GMAC as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_core.levels.far.causes import away
from ckpt_core.levels.far.clients import endpoint, peer_path, peer_settings
from ckpt_core.levels.far.door import Away
from ckpt_core.levels.far.part_sending import PartSending, Pieces, SendFailed, Way, cut
from ckpt_core.levels.far.parts import part_bytes
from ckpt_core.levels.signing import BodyMac, signer

_CREDENTIALS = re.compile("InvalidAccessKeyId|SignatureDoesNotMatch|RequestTimeTooSkewed")


class PeerParts:
    """Sends to one peer. Thread-safe."""

    def __init__(self, url: str, *, request_s: float, retries: int) -> None:
        self._url, self._request_s, self._retries = url, request_s, retries
        self._refused = False

    def takes(self, nbytes: int) -> bool:
        """Whether a file of so many bytes is to go this way."""
        return BodyMac.is_there() and nbytes > part_bytes(nbytes) and not self._refused

    def put(self, key: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        """Write an object. What `blocks` raises comes out, and nothing is there.

        Raises:
            Away: it could not be written. A peer that does not know such parts is sent others from then on.
        """
        settings = peer_settings()

        def vouch(pieces: Pieces) -> str:
            mac = BodyMac.begin(settings["secret_access_key"])
            for piece in pieces:
                mac.update(piece)
            return mac.content()

        home, place = endpoint(self._url), peer_path(self._url, key)
        way = Way(home, place, signer(settings), vouch, self._request_s, self._retries)
        sending = PartSending(way)
        try:
            sending.run(cut(blocks, nbytes))
        except SendFailed as exc:
            if _is_unknown(exc) and not self._refused:
                self._refused = True
                text = f"{self._url} takes no AES-GMAC: files are sent another way from now on"
                raise Away(text) from None
            raise away(self._url, f"write {key}", exc) from None
        finally:
            sending.close()


def _is_unknown(failure: SendFailed) -> bool:
    """Whether the peer may not know what the sum of a body is; of the token nothing is wrong."""
    refused = failure.status == 403 and not _CREDENTIALS.search(str(failure))
    return failure.status == 501 or refused
