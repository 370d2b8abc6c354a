"""Vocabulary types <-> messages. One pair of functions a type; nothing here decides anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from omnifleet.types import (
    Digest,
    Identity,
    InFlight,
    Lease,
    MediaKind,
    MediaRef,
    Sampling,
    VersionBound,
    VersionSpan,
    WeightVersion,
    WorkerState,
)
from omnifleet.wire import common_pb2, fleet_pb2, refit_pb2, rollout_pb2

_KINDS = {
    MediaKind.IMAGE: common_pb2.MEDIA_KIND_IMAGE,
    MediaKind.VIDEO: common_pb2.MEDIA_KIND_VIDEO,
    MediaKind.AUDIO: common_pb2.MEDIA_KIND_AUDIO,
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}
_IN_FLIGHT = {
    InFlight.KEEP: refit_pb2.KEEP,
    InFlight.RECOMPUTE: refit_pb2.RECOMPUTE,
    InFlight.DRAIN: refit_pb2.DRAIN_FIRST,
}
_IN_FLIGHT_BACK = {number: policy for policy, number in _IN_FLIGHT.items()}


def version_to_wire(version: WeightVersion | None) -> common_pb2.WeightVersion | None:
    """A version as its message."""
    if version is None:
        return None
    return common_pb2.WeightVersion(
        run=version.run,
        lineage=version.lineage,
        number=version.number,
        manifest_digest=version.manifest_digest,
    )


def version_from_wire(message: common_pb2.WeightVersion) -> WeightVersion:
    """A message as its version."""
    return WeightVersion(message.run, message.lineage, message.number, message.manifest_digest)


def bound_to_wire(bound: VersionBound) -> common_pb2.VersionBound:
    """A bound as its message."""
    if bound.exact is not None:
        return common_pb2.VersionBound(exact=version_to_wire(bound.exact))
    if bound.min is not None:
        return common_pb2.VersionBound(min=version_to_wire(bound.min))
    return common_pb2.VersionBound()


def bound_from_wire(message: common_pb2.VersionBound) -> VersionBound:
    """A message as its bound."""
    match message.WhichOneof("bound"):
        case "min":
            return VersionBound(min=version_from_wire(message.min))
        case "exact":
            return VersionBound(exact=version_from_wire(message.exact))
        case _:
            return VersionBound()


def spans_to_wire(spans: Iterable[VersionSpan]) -> list[common_pb2.VersionSpan]:
    """Spans as messages."""
    return [
        common_pb2.VersionSpan(version=version_to_wire(s.version), start=s.start, end=s.end, worker=s.worker)
        for s in spans
    ]


def spans_from_wire(messages: Iterable[common_pb2.VersionSpan]) -> list[VersionSpan]:
    """Messages as spans."""
    return [VersionSpan(version_from_wire(m.version), m.start, m.end, m.worker) for m in messages]


def media_to_wire(ref: MediaRef) -> common_pb2.MediaRef:
    """A media as its message."""
    return common_pb2.MediaRef(kind=_KINDS[ref.kind], digest=ref.digest)


def media_from_wire(message: common_pb2.MediaRef) -> MediaRef:
    """A message as its media."""
    return MediaRef(_KINDS_BACK.get(message.kind, MediaKind.IMAGE), Digest(message.digest))


def kind_to_wire(kind: MediaKind) -> common_pb2.MediaKind:
    """A kind as its message."""
    return _KINDS[kind]


def kind_from_wire(number: int) -> MediaKind | None:
    """A message as its kind."""
    return _KINDS_BACK.get(number)  # type: ignore[call-overload, no-any-return]


def identity_to_wire(identity: Identity) -> common_pb2.Identity:
    """An identity as its message."""
    return common_pb2.Identity(
        run=identity.run,
        environment=identity.environment,
        session=identity.session,
        episode=identity.episode,
        turn=identity.turn,
        prompt_id=identity.prompt_id,
        group_id=identity.group_id,
        sample=identity.sample,
        attempt=identity.attempt,
    )


def identity_from_wire(m: common_pb2.Identity) -> Identity:
    """A message as its identity."""
    return Identity(
        m.run, m.environment, m.session, m.episode, m.turn, m.prompt_id, m.group_id, m.sample, m.attempt
    )


def lease_to_wire(lease: Lease) -> common_pb2.Lease:
    """A lease as its message."""
    return common_pb2.Lease(
        id=lease.id, owner=lease.owner, run=lease.run, expires_unix_ms=lease.expires_unix_ms
    )


def lease_from_wire(message: common_pb2.Lease) -> Lease:
    """A message as its lease."""
    return Lease(message.id, message.owner, message.run, message.expires_unix_ms)


def sampling_to_wire(sampling: Sampling) -> rollout_pb2.Sampling:
    """A sampling as its message."""
    return rollout_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        n=sampling.n,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        banned_token_ids=sampling.banned_token_ids,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
    )


def sampling_from_wire(message: rollout_pb2.Sampling) -> Sampling:
    """A message as its sampling."""
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        max_tokens=message.max_tokens,
        n=message.n,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
    )


def state_to_wire(state: WorkerState) -> fleet_pb2.WorkerState:
    """A state as its message."""
    return cast("fleet_pb2.WorkerState", fleet_pb2.WorkerState.Value(state.name))


def state_from_wire(number: int) -> WorkerState | None:
    """None for UNSPECIFIED."""
    name = fleet_pb2.WorkerState.Name(number)
    return WorkerState[name] if name in WorkerState.__members__ else None


def in_flight_to_wire(policy: InFlight) -> refit_pb2.InFlight:
    """An in-flight policy as its message."""
    return _IN_FLIGHT[policy]


def in_flight_from_wire(number: int) -> InFlight:
    """UNSPECIFIED means KEEP."""
    return _IN_FLIGHT_BACK.get(number, InFlight.KEEP)  # type: ignore[call-overload, no-any-return]


def counters_to_wire(counters: Mapping[str, float]) -> list[common_pb2.Counter]:
    """Counters as messages, sorted by name."""
    return [common_pb2.Counter(name=name, value=value) for name, value in sorted(counters.items())]


def counters_from_wire(messages: Iterable[common_pb2.Counter]) -> dict[str, float]:
    """Messages as a mapping."""
    return {m.name: m.value for m in messages}
