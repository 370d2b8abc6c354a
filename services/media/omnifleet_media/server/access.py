"""Who may call which HTTP route: the same tokens and scopes as over gRPC; browsers read with a cookie instead."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from omnifleet.auth import Scope, Tokens, allowed
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.login import COOKIE, COOKIE_S, LINK, LINK_S, make_ticket, read_ticket

COOKIE_NAME = "omnifleet_media"
_READS = frozenset({"GET", "HEAD"})
_USED = 4096


class Access:
    """Checks a bearer token or, for reads, the cookie that a login link gave. Without tokens, everybody may."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._used: dict[str, float] = {}

    def may(self, method: str) -> Callable[[Request], None]:
        """A dependency that lets through what may call `Media/<method>` over gRPC.

        Raises OmnifleetError: UNAUTHENTICATED, FORBIDDEN.
        """
        rule = allowed(f"/omnifleet.v1alpha.Media/{method}")

        def check(request: Request) -> None:
            scope = self.scope_of(request)
            if scope is None and self._tokens.by_scope:
                raise OmnifleetError(
                    Reason.UNAUTHENTICATED,
                    "no valid bearer token; in a browser, open the link that `omnifleet media browse` prints",
                    knob="OMNIFLEET_TOKENS (tokens file)",
                )
            if scope is not None and scope not in rule:
                raise OmnifleetError(
                    Reason.FORBIDDEN,
                    f"{method} takes a token of scope {', '.join(sorted(rule))}, not {scope}",
                )

        return check

    def scope_of(self, request: Request) -> Scope | None:
        """The scope that a request proves. A cookie proves none for anything but a read: other sites can send it."""
        bearer = request.headers.get("authorization", "")
        if bearer:
            return self._tokens.scope_of(bearer.removeprefix("Bearer "))
        if request.method not in _READS:
            return None
        return read_ticket(self._tokens, request.cookies.get(COOKIE_NAME, ""), COOKIE)

    def log_in(self, ticket: str, *, secure: bool) -> Response:
        """Trade the ticket of a login link, once, for a cookie. Raises OmnifleetError(UNAUTHENTICATED)."""
        scope = read_ticket(self._tokens, ticket, LINK)
        if scope is None or not self._first_use(ticket):
            raise OmnifleetError(
                Reason.UNAUTHENTICATED,
                f"this link is over: it is good once, for {LINK_S // 60} minutes; `omnifleet media browse` prints another",
            )
        answer = RedirectResponse("/", status_code=303)
        value = make_ticket(self._tokens, scope, COOKIE, COOKIE_S)
        answer.set_cookie(
            COOKIE_NAME, value, max_age=COOKIE_S, httponly=True, samesite="lax", secure=secure, path="/"
        )
        return answer

    def _first_use(self, ticket: str) -> bool:
        now = time.time()
        self._used = {used: end for used, end in self._used.items() if end > now}
        if ticket in self._used or len(self._used) >= _USED:
            return False
        self._used[ticket] = now + LINK_S + 1
        return True
