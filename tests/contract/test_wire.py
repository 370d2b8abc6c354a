"""The wire: stubs are what proto/ says; errors, tokens and limits cross it whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from omnifleet.auth import Scope, Tokens
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WeightVersion
from omnifleet.wire import common_pb2, fleet_pb2, fleet_pb2_grpc, reward_pb2, reward_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.errors import HTTP_STATUS, STATUS, from_detail, remote_errors, to_detail
from omnifleet.wire.server import MESSAGE_BYTES, handshake, serving

ROOT = Path(__file__).resolve().parents[2]


def test_regenerating_the_stubs_gives_the_committed_files(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_wire.py", tmp_path], check=True, capture_output=True
    )
    committed = {p.name: p.read_text() for p in (ROOT / "omnifleet" / "wire").glob("*_pb2*")}
    assert committed == {p.name: p.read_text() for p in tmp_path.glob("*_pb2*")}
    assert len(committed) == 24


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_survives_the_wire(reason: Reason) -> None:
    error = OmnifleetError(reason, "why", True, "knob", 7, WeightVersion("r", "l", 3, "d"))
    back = from_detail(to_detail(error))
    assert (
        back.reason,
        back.message,
        back.retryable,
        back.knob,
        back.retry_after_ms,
        back.current_version,
    ) == (
        reason,
        "why",
        True,
        "knob",
        7,
        WeightVersion("r", "l", 3, "d"),
    )
    assert reason in STATUS and HTTP_STATUS.get(reason, 503) >= 400


class Echo(reward_pb2_grpc.RewardServicer):
    async def Handshake(self, request, context):
        return handshake(request, "reward", frozenset({"batch"}))

    async def Score(self, request, context):
        raise OmnifleetError(Reason.OVERLOADED, "full", retryable=True, retry_after_ms=50, knob="queue")

    async def ListScorers(self, request, context):
        raise RuntimeError("a bug")

    async def ReachableMaximum(self, request, context):
        return reward_pb2.ReachableMaximumReply(example=request.prompt_suffix)


class Registry(fleet_pb2_grpc.FleetServicer):
    async def Scale(self, request, context):
        return fleet_pb2.ScaleReply(desired=request.desired)


TOKENS = Tokens.generate()


@pytest.fixture
async def address() -> AsyncIterator[str]:
    def register(server) -> None:
        reward_pb2_grpc.add_RewardServicer_to_server(Echo(), server)
        fleet_pb2_grpc.add_FleetServicer_to_server(Registry(), server)

    async with serving("127.0.0.1:0", register, tokens=TOKENS, knob="test.listen") as bound:
        yield bound


async def failure(call) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught, remote_errors():
        await call
    return caught.value


async def test_typed_errors_cross_whole(address: str) -> None:
    async with open_channel(address, TOKENS.secret(Scope.ENV)) as channel:
        error = await failure(reward_pb2_grpc.RewardStub(channel).Score(reward_pb2.ScoreRequest(), timeout=5))
    assert (error.reason, error.retryable, error.retry_after_ms, error.knob) == (
        Reason.OVERLOADED,
        True,
        50,
        "queue",
    )


async def test_a_bug_is_internal_and_never_retryable(address: str) -> None:
    async with open_channel(address, TOKENS.secret(Scope.ENV)) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        error = await failure(stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=5))
    assert error.reason is Reason.INTERNAL and not error.retryable and "a bug" in error.message


@pytest.mark.parametrize(
    ("code", "text", "retryable"),
    [
        (
            "INTERNAL",
            "Internal error from Core",
            True,
        ),  # seen when a service was killed while a picture was sent
        ("INTERNAL", "Received RST_STREAM with error code 2", True),
        ("UNKNOWN", "Stream removed", True),
        ("UNKNOWN", "Unexpected <class 'ValueError'>: a bug", False),
        ("INTERNAL", "Exception deserializing response!", False),
    ],
)
def test_a_peer_that_dies_while_we_send_is_unreachable_not_a_bug(
    code: str, text: str, retryable: bool
) -> None:
    nothing = grpc.aio.Metadata()
    with pytest.raises(OmnifleetError) as caught, remote_errors():
        raise grpc.aio.AioRpcError(grpc.StatusCode[code], nothing, nothing, details=text)
    assert caught.value.retryable is retryable
    assert caught.value.reason is (Reason.UNAVAILABLE if retryable else Reason.INTERNAL)


async def test_no_token_is_refused(address: str) -> None:
    async with open_channel(address, "wrong") as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        assert (
            await failure(stub.Score(reward_pb2.ScoreRequest(), timeout=5))
        ).reason is Reason.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("scope", "allowed"), [(Scope.OPERATOR, True), (Scope.SERVICE, True), (Scope.ENV, False)]
)
async def test_scopes_guard_operator_verbs(address: str, scope: Scope, allowed: bool) -> None:
    async with open_channel(address, TOKENS.secret(scope)) as channel:
        call = fleet_pb2_grpc.FleetStub(channel).Scale(fleet_pb2.ScaleRequest(desired=2), timeout=5)
        if allowed:
            assert (await call).desired == 2
        else:
            assert (await failure(call)).reason is Reason.FORBIDDEN


async def test_handshake_refuses_another_contract_and_missing_features(address: str) -> None:
    async with open_channel(address, TOKENS.secret(Scope.ENV)) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        good = await stub.Handshake(
            common_pb2.HandshakeRequest(contract="v1alpha", features=["batch"]), timeout=5
        )
        assert good.service == "reward" and good.instance
        for bad in (
            common_pb2.HandshakeRequest(contract="v2"),
            common_pb2.HandshakeRequest(contract="v1alpha", features=["teleport"]),
        ):
            assert (await failure(stub.Handshake(bad, timeout=5))).reason is Reason.CONTRACT_MISMATCH


@pytest.mark.parametrize("size", [4_191_372, 4_194_918])
async def test_rpc_01_messages_around_the_default_limit_pass_both_ways(address: str, size: int) -> None:
    async with open_channel(address, TOKENS.secret(Scope.ENV)) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        reply = await stub.ReachableMaximum(
            reward_pb2.ReachableMaximumRequest(prompt_suffix="x" * size), timeout=20
        )
    assert len(reply.example) == size


async def test_rpc_01_above_our_own_limit_is_a_typed_refusal(address: str) -> None:
    async with open_channel(address, TOKENS.secret(Scope.ENV)) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        call = stub.ReachableMaximum(
            reward_pb2.ReachableMaximumRequest(prompt_suffix="x" * MESSAGE_BYTES), timeout=20
        )
        error = await failure(call)
    assert error.reason is Reason.LIMIT_EXCEEDED and error.knob


async def test_a_taken_port_is_one_clear_error(address: str) -> None:
    with pytest.raises(OmnifleetError) as caught:
        async with serving(address, lambda _: None, tokens=TOKENS, knob="reward.listen"):
            pass
    assert caught.value.reason is Reason.PORT_TAKEN and caught.value.knob == "reward.listen"


def test_a_tokens_file_is_private_and_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    TOKENS.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Tokens.load(path) == TOKENS
    path.write_text("[]")
    with pytest.raises(OmnifleetError, match="tokens file"):
        Tokens.load(path)
