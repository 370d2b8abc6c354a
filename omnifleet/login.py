"""Links and cookies that stand for a token in a browser, without carrying it.

A ticket is `SCOPE.EXPIRES.MAC`: HMAC-SHA256 with the scope's secret over its purpose, scope and end. Whoever holds the
secret can make and check one; a ticket does not give the secret away, ends by itself, and is good for one purpose.
"""

from __future__ import annotations

import hashlib
import hmac
import time

from omnifleet.auth import Scope, Tokens
from omnifleet.errors import OmnifleetError, Reason

LINK = "login-link"
COOKIE = "login-cookie"
LINK_S = 600
COOKIE_S = 12 * 3600


def make_ticket(tokens: Tokens, scope: Scope, purpose: str, ttl_s: float) -> str:
    """A ticket that is good for `ttl_s` seconds. Raises OmnifleetError(FORBIDDEN) if there is no token of that scope."""
    secret = tokens.secret(scope)
    if not secret:
        raise OmnifleetError(Reason.FORBIDDEN, f"there is no token of scope {scope} here")
    expires = int(time.time() + ttl_s)
    return f"{scope}.{expires}.{_mac(secret, purpose, scope, expires)}"


def read_ticket(tokens: Tokens, ticket: str, purpose: str) -> Scope | None:
    """The scope that a ticket stands for; None if it is forged, for another purpose, or over."""
    name, _, rest = ticket.partition(".")
    expires, _, mac = rest.partition(".")
    if name not in Scope.__members__.values() or not expires.isascii() or not expires.isdigit():
        return None
    scope = Scope(name)
    secret = tokens.secret(scope)
    if not secret or len(expires) > 12 or int(expires) < time.time():
        return None
    known = _mac(secret, purpose, scope, int(expires))
    return scope if hmac.compare_digest(known.encode(), mac.encode()) else None


def _mac(secret: str, purpose: str, scope: Scope, expires: int) -> str:
    text = f"omnifleet/{purpose}/v1\n{scope}\n{expires}"
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
