"""What a command says before it starts anything."""

from __future__ import annotations

import socket

import pytest

from omnifleet.cli.run import check_ports
from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError, Reason


@pytest.mark.parametrize("field", ["media.listen", "gateway.http_listen", "trainer.listen"])
def test_a_taken_port_is_said_at_once(field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OmnifleetError) as caught:
            check_ports(load_recipe("cpu-tiny", [f"{field}=127.0.0.1:{port}"]))
    assert (caught.value.reason, caught.value.knob) == (Reason.PORT_TAKEN, field)
    check_ports(load_recipe("cpu-tiny", [f"{field}=127.0.0.1:{port}"]))
