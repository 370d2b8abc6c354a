"""What all omnifleet services share and what users import. Knows no torch, no vLLM, and no service."""

__version__ = "0.1.0"
CONTRACT = "v1alpha"
