"""What an HTTP upload asks for, from its query or from a JSON body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnifleet.config.base import config_error
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.types import MediaKind
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import kind_to_wire
from omnifleet_media.server.door import PutOptions


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    run: str = ""
    kind: MediaKind = MediaKind.IMAGE
    durable: bool = False
    lease_owner: str = ""
    lease_ttl_ms: int = Field(0, ge=0)
    url: str = ""
    contract: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """url: "" if the source is sent. kind: what the caller believes, as on the wire."""

    options: PutOptions
    kind: int
    contract: media_pb2.DecodeContract
    url: str = ""


def asked_by_query(parameters: Iterable[tuple[str, str]]) -> Asked:
    """From `?run=...&num_frames=8`: what is no option is a field of the contract; repeated fields are repeated."""
    body: dict[str, Any] = {}
    contract: dict[str, list[str]] = {}
    for name, value in parameters:
        if name in _Body.model_fields and name not in ("url", "contract"):
            body[name] = value
        else:
            contract.setdefault(name, []).append(value)
    fields = media_pb2.DecodeContract.DESCRIPTOR.fields_by_name
    repeated = {name for name in contract if name in fields and fields[name].is_repeated}
    body["contract"] = {name: v if name in repeated else v[-1] for name, v in contract.items()}
    return _asked(body)


def asked_by_json(body: Any) -> Asked:
    """From `{"url": ..., "contract": {...}, ...}`. Raises OmnifleetError(INVALID_REQUEST)."""
    if not isinstance(body, dict) or not body.get("url"):
        raise invalid('a JSON upload is an object with a "url"')
    return _asked(body)


def _asked(body: Mapping[str, Any]) -> Asked:
    try:
        read = _Body.model_validate(body)
        contract = ParseDict(read.contract, media_pb2.DecodeContract())
    except ValidationError as error:
        told = config_error(error, _Body, "upload")
        raise OmnifleetError(Reason.INVALID_REQUEST, told.message) from None
    except ParseError as error:
        raise invalid(f"upload: no such contract: {error}") from None
    options = PutOptions(read.run, read.durable, read.lease_owner, read.lease_ttl_ms)
    return Asked(options, kind_to_wire(read.kind), contract, read.url)
