"""The `omnifleet` command. Services add their own commands through entry points; this room imports none of them."""
