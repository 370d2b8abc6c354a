"""Pictures, clips and sounds that come inline or by URL -> references, by the media service, which decides what it takes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from omnifleet.auth import Scope, Tokens
from omnifleet.client.media import MediaClient
from omnifleet.config.services import GatewayConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import read_video_processor
from omnifleet.service import peer
from omnifleet.sounds import read_sound_config
from omnifleet.types import MediaKind, MediaRef
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import media_from_wire

_MEDIA_S = 10.0


def clip_contract(config: GatewayConfig, model: Path | None) -> media_pb2.DecodeContract:
    """How clips are sampled: the settings, and frames per temporal patch as the checkpoint's processor says."""
    try:
        patch = read_video_processor(model).temporal_patch if model is not None else 0
    except OmnifleetError:
        patch = 0  # it takes no clips anyway
    return media_pb2.DecodeContract(
        sampling=config.clip_sampling,
        num_frames=config.clip_frames,
        fps=config.clip_fps,
        temporal_patch=patch,
    )


def sound_contract(model: Path | None) -> media_pb2.DecodeContract:
    """How tracks are decoded: at the rate that the checkpoint's encoder of sounds takes."""
    try:
        rate = int(read_sound_config(model)["sampling_rate"]) if model is not None else 0
    except OmnifleetError:
        rate = 0  # it takes no sounds anyway
    return media_pb2.DecodeContract(sampling="audio@1", sample_rate=rate)


class MediaIn:
    """Connects to the media service at the first item, and again when it came up elsewhere."""

    def __init__(
        self,
        run_dir: Path,
        address: str,
        tokens: Tokens,
        clips: media_pb2.DecodeContract | None = None,
        sounds: media_pb2.DecodeContract | None = None,
    ) -> None:
        self._run_dir, self._address = run_dir, address
        self._secret = tokens.secret(Scope.SERVICE)
        self._contracts = {MediaKind.VIDEO: clips, MediaKind.AUDIO: sounds}
        self._opening = asyncio.Lock()
        self._client: MediaClient | None = None
        self._open = AsyncExitStack()

    async def put(self, url: str, kind: MediaKind, run: str) -> MediaRef:
        """Reference of what a URL holds: data:, http(s):, file: or a path. Raises INVALID_MEDIA, FORBIDDEN, UNAVAILABLE."""
        client = await self._connected()
        contract = self._contracts.get(kind)
        try:
            if url[:5].lower() == "data:":
                reply = await client.put(url.encode(), run, kind=kind, contract=contract)
            else:
                reply = await client.put_url(url, run, kind=kind, contract=contract)
        except OmnifleetError as error:
            if error.reason is Reason.UNAVAILABLE and client is self._client:
                await self.close()  # it may have come up elsewhere: the next item looks again
            raise
        return media_from_wire(reply.ref)

    async def _connected(self) -> MediaClient:
        async with self._opening:
            if self._client is None:
                address = await peer(self._run_dir, "media", given=self._address, deadline_s=_MEDIA_S)
                opened = MediaClient.open(address, self._secret, name="gateway", same_host=False)
                self._client = await self._open.enter_async_context(opened)
            return self._client

    async def close(self) -> None:
        """Disconnect."""
        self._client = None
        await self._open.aclose()
