"""A worker hands out the weights that it serves, to a worker that has none: as they were sent, with what proves them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.manifest import UNVERIFIED
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.refit.receiver import Receiver

CHUNK_BYTES = 1 << 20


class Lending:
    """One loan at a time: each takes host memory for one copy of the weights."""

    def __init__(self, engine: Engine, receiver: Receiver) -> None:
        self._engine, self._receiver = engine, receiver
        self._lent = asyncio.Lock()

    async def lend(self, version: WeightVersion) -> AsyncGenerator[refit_pb2.FetchReply, None]:
        """The manifest that made `version`, then its tensors. Raises VERSION_MOVED, UNSUPPORTED, OVERLOADED.

        If the weights move on meanwhile, the bytes are a mixture; whoever asked finds out by the manifest's digests.
        """
        manifest = self._manifest(version)
        if self._lent.locked():
            raise retryable(Reason.OVERLOADED, "another worker is being served", retry_after_ms=1000)
        async with self._lent:
            # An anonymous file: nothing is left behind by whoever dies. The engine's process opens it by our name for it.
            file = os.memfd_create("omnifleet-loan", os.MFD_CLOEXEC)
            try:
                tensors = [(spec.name, spec.dtype) for spec in manifest.tensors]
                with self._receiver.rest.reading():
                    await self._engine.export(f"/proc/{os.getpid()}/fd/{file}", tensors)
                yield refit_pb2.FetchReply(manifest=manifest)
                os.lseek(file, 0, os.SEEK_SET)
                while chunk := await asyncio.to_thread(os.read, file, CHUNK_BYTES):
                    yield refit_pb2.FetchReply(data=chunk)
            finally:
                os.close(file)

    def _manifest(self, version: WeightVersion) -> refit_pb2.Manifest:
        serves, manifest = self._receiver.serves()
        if serves != version:
            raise retryable(Reason.VERSION_MOVED, f"this worker serves {serves or 'nothing'}, not {version}")
        if manifest is None:
            raise OmnifleetError(Reason.UNSUPPORTED, f"{version} is the checkpoint's own")
        if manifest.checksum_algorithm == UNVERIFIED or not all(spec.digest for spec in manifest.tensors):
            raise OmnifleetError(Reason.UNSUPPORTED, f"{version} came without digests")
        return manifest
