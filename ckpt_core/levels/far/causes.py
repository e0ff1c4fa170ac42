"""What an error of a client of object stores means for people.

    raise away("s3://bucket/run", "list the steps", error) from None

No text of ours repeats what a client or a server said: it may hold a signed URL or a key. Only what the table
here knows is said.
"""

from __future__ import annotations

import re

from ckpt_core.levels.far.clients import CREDENTIALS, endpoint, split
from ckpt_core.levels.far.door import Away
from ckpt_core.options import PEER

_CAUSES = (
    # Order matters: the first that fits is said. (pattern, what happened, what to do, hopeless)
    (
        r"NoSuchBucket|ContainerNotFound|<Code>ResourceNotFound|specified bucket does not exist",
        "there is no such bucket",
        "create {place}, or correct the URL and the endpoint",
        True,
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|AuthenticationFailed|"
        r"TokenRefreshRequired|InvalidAuthenticationInfo|Unauthenticated|Server failed to authenticate",
        "the credentials are refused",
        "{credentials}; and look at the clock of this machine",
        True,
    ),
    (
        r"InvalidBucketName|InvalidResourceName",
        "no bucket can have this name",
        "correct the URL",
        True,
    ),
    (
        r"RequestTimeTooSkewed",
        "the clock there and that of this machine are minutes apart",
        "set the one that is wrong, as signatures hold for a quarter of an hour at most",
        True,
    ),
    (
        r"QuotaExceeded|StorageFull|InsufficientStorage|status: 507",
        "it is full",
        "make room there, or keep fewer steps (keep_last of the level)",
        False,
    ),
    (
        r"169\.254\.169\.254|169\.254\.170|/latest/api/token|/latest/meta-data|metadata\.google|Missing(Account|Credential)|TokenRequest|"
        r"NoCredentials|must be specified|Error performing token request",
        "there are no credentials",
        "{credentials}",
        True,
    ),
    (
        r"PermissionDenied|status: 403|AccessDenied",
        "it is not permitted",
        "let these credentials read, write, list and delete under {place}",
        True,
    ),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|BareRedirect|status: 30[127]",
        "the bucket is in another region",
        "set AWS_REGION to the bucket's",
        True,
    ),
    (
        r"kind: Timeout|TimedOut|timed out",
        "no answer came in time",
        "it is tried again; look at the network and at the store's own state",
        False,
    ),
    (
        r"kind: Connect,|dns error|ConnectionRefused|tcp connect",
        "it cannot be reached",
        "look at the endpoint ({endpoint}), the network and the proxy",
        False,
    ),
    (
        r"kind: Interrupted|kind: Request|kind: Body|ConnectionReset|IncompleteMessage",
        "the connection was cut",
        "it is tried again; look at the network",
        False,
    ),
    (
        r"NotImplemented|status: 501",
        "it cannot do what a level needs",
        "use a store that writes on conditions (If-None-Match, If-Match)",
        True,
    ),
    (
        r"status: 5\d\d|SlowDown|status: 429",
        "it is out of order, or asks for less haste",
        "it is tried again; look at the store's own state",
        False,
    ),
    (
        r"URL scheme is not allowed|BadScheme",
        "plain http is not allowed",
        "let the endpoint begin with https://, or set it to http:// in the environment",
        True,
    ),
)


def away(url: str, what: str, error: BaseException, *, step: int | None = None) -> Away:
    """What a client's error means. To be raised `from None`: the client's own text may hold secrets.

    Args:
        what: was asked for, as in "it could not list the steps".
    """
    scheme, bucket, _ = split(url)
    said = f"{type(error).__name__} {error}"
    names = {
        "place": url if scheme == PEER else f"{scheme}://{bucket}",
        "credentials": CREDENTIALS[scheme],
        "endpoint": re.sub(r"//.*@", "//", endpoint(url).partition("?")[0]) or "the store's own",
    }
    cause, remedy, hopeless = _cause(said)
    told = f"{cause}; committed steps are untouched: {remedy.format(**names)}"
    return Away(f"{url}: could not {what}: {told}", hopeless=hopeless, step=step)


def is_missing(error: BaseException) -> bool:
    """Whether an object is not there, though its bucket is, as far as the answer says."""
    return isinstance(error, FileNotFoundError) and not re.search(_CAUSES[0][0], str(error))


def _cause(said: str) -> tuple[str, str, bool]:
    for pattern, cause, remedy, hopeless in _CAUSES:
        if re.search(pattern, said):
            return cause, remedy, hopeless
    status = re.search(r"status: (\d{3})", said)
    answer = f"it answered {status[1]}" if status else f"the client reports {said.split()[0]}"
    return answer, "look at the store's own log", False
