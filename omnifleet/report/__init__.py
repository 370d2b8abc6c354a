"""Curves and samples of a run as PNG and HTML. Reads metrics and ledger exports; never a service's internals."""
