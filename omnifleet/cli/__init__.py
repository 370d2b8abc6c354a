"""The `omnifleet` command. Services add their own commands through entry points; this room imports none of them."""

from omnifleet.cli.main import main

__all__ = ["main"]
