"""The server around one engine: admission, versions, token provenance, membership in the fleet.

Must not know which engine it serves, nor how a gateway routes.
"""
