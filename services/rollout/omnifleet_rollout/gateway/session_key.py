"""Session keys: who a client is, signed, in the place of its API key. Nothing is stored, so a key outlives the gateway.

With one, an environment needs nothing but an OpenAI client: `OpenAI(base_url=..., api_key=KEY)`.
"""

from __future__ import annotations

import base64
import hmac
import json
import time
from dataclasses import asdict, replace

from blake3 import blake3

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Identity

PREFIX = "ofs."
_MAC_BYTES = 16


class SessionKeys:
    """Signs with `secret` ("" = the open gateway of tests)."""

    def __init__(self, secret: str) -> None:
        self._key = blake3(f"omnifleet/session-key/v1\n{secret}".encode()).digest()

    def mint(self, who: Identity, expires_unix: float) -> str:
        """A key for `who` until a time in Unix seconds."""
        body = {key: value for key, value in asdict(who).items() if value}
        payload = _text(json.dumps({**body, "expires": int(expires_unix)}, separators=(",", ":")).encode())
        return f"{PREFIX}{payload}.{_text(self._mac(payload))}"

    def read(self, key: str) -> Identity:
        """Whose key it is. Raises UNAUTHENTICATED for a key that is not ours, was changed or has expired."""
        payload, _, mac = key.removeprefix(PREFIX).partition(".")
        try:
            if not hmac.compare_digest(_bytes(mac), self._mac(payload)):
                raise ValueError("signature")
            body = json.loads(_bytes(payload))
        except ValueError as error:
            raise _refused(f"the session key is not valid: {error}") from error
        if body.pop("expires") < time.time():
            raise _refused("the session key has expired")
        return Identity(**body)

    def _mac(self, payload: str) -> bytes:
        return blake3(payload.encode(), key=self._key).digest(_MAC_BYTES)


def merged(who: Identity, proven: Identity | None) -> Identity:
    """The request's identity within what its key proves. Raises FORBIDDEN where both speak and differ."""
    if proven is None:
        return who
    fields = {name: value for name, value in asdict(proven).items() if value}
    for name, value in fields.items():
        said = getattr(who, name)
        if (
            said
            and said != value
            and not said.startswith(PREFIX)
            and not (name == "run" and said == "default")
        ):
            raise OmnifleetError(
                Reason.FORBIDDEN,
                f"identity.{name} {said!r} is not the session key's",
                knob="POST /v1/sessions",
            )
    return replace(who, **fields)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars="-_", validate=True)


def _refused(message: str) -> OmnifleetError:
    return OmnifleetError(Reason.UNAUTHENTICATED, message, knob="POST /v1/sessions")
