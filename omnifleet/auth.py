"""Bearer tokens with scopes. Embedded default: one generated file a run, readable by its owner only."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason


class Scope(StrEnum):
    """ENV: generate, media, scores. OPERATOR: fleet verbs, stop. TRAINER: refits and all of ENV. SERVICE: between services."""

    ENV = "env"
    OPERATOR = "operator"
    TRAINER = "trainer"
    SERVICE = "service"


_SERVICE = frozenset({Scope.SERVICE})
_EVERYONE = frozenset(Scope)
_RULES: dict[str, frozenset[Scope]] = {
    "Fleet/Act": frozenset({Scope.OPERATOR}),
    "Fleet/Scale": frozenset({Scope.OPERATOR, Scope.SERVICE}),
    "Fleet/Assign": frozenset({Scope.OPERATOR}),
    "Fleet/AnnounceVersion": frozenset({Scope.TRAINER}),
    "Fleet/Join": _SERVICE,
    "Fleet/Heartbeat": _SERVICE,
    "Fleet/Leave": _SERVICE,
    "Refit/Describe": frozenset({Scope.TRAINER, Scope.OPERATOR}),
    "Refit/Stage": frozenset({Scope.TRAINER}),
    "Refit/Commit": frozenset({Scope.TRAINER}),
    "Refit/Abort": frozenset({Scope.TRAINER}),
    "Turns/Sleep": frozenset({Scope.TRAINER}),
    "Turns/Wake": frozenset({Scope.TRAINER, Scope.OPERATOR}),
    "Refit/Fetch": frozenset({Scope.SERVICE, Scope.TRAINER}),
    "Refit/Quarantine": frozenset({Scope.TRAINER, Scope.OPERATOR}),
    "Rollout/SetBudget": frozenset({Scope.TRAINER}),
    "Trainer/Pause": frozenset({Scope.OPERATOR}),
    "Trainer/Resume": frozenset({Scope.OPERATOR}),
    "Trainer/Checkpoint": frozenset({Scope.OPERATOR}),
    "Trainer/Stop": frozenset({Scope.OPERATOR}),
    "Media/Collect": frozenset({Scope.OPERATOR}),
    "Media/Verify": frozenset({Scope.OPERATOR}),
}


def allowed(method: str) -> frozenset[Scope]:
    """Scopes that may call `/omnifleet.v1alpha.Service/Method`; methods without a rule are open to every token."""
    service, _, name = method.rpartition("/")
    return _RULES.get(f"{service.rpartition('.')[2]}/{name}", _EVERYONE)


@dataclass(frozen=True, slots=True)
class Tokens:
    """scope -> secret."""

    by_scope: dict[Scope, str]

    @staticmethod
    def generate() -> Tokens:
        """Fresh random secrets, 32 bytes each."""
        return Tokens({scope: secrets.token_urlsafe(32) for scope in Scope})

    @staticmethod
    def load(path: Path) -> Tokens:
        """Read a tokens file. Raises OmnifleetError(INVALID_CONFIG) if it is missing or malformed."""
        try:
            raw = json.loads(path.read_text())
            return Tokens({Scope(scope): str(secret) for scope, secret in raw.items()})
        except (OSError, ValueError, AttributeError) as error:
            raise OmnifleetError(
                Reason.INVALID_CONFIG, f"tokens file {path} cannot be read: {error}", knob="auth.tokens_file"
            ) from error

    def save(self, path: Path) -> None:
        """Write with mode 0600, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            json.dump({str(scope): secret for scope, secret in self.by_scope.items()}, out)
        scratch.replace(path)

    def scope_of(self, secret: str) -> Scope | None:
        """The scope that `secret` proves, or None. Compares in constant time."""
        found = None
        for scope, known in self.by_scope.items():
            if hmac.compare_digest(known.encode(), secret.encode()):
                found = scope
        return found

    def secret(self, scope: Scope) -> str:
        """The secret of one scope, or "" if this file has none (the peer then refuses the call)."""
        return self.by_scope.get(scope, "")


OPEN = Tokens({})
"""No authentication: for tests on loopback only."""
