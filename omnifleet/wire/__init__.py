"""The wire: stubs generated from proto/ (never edited) and codecs between them and `omnifleet.types`."""

import os

# gRPC's C core writes its own lines to stderr (ports in use, forks); every such failure reaches us as an error as well.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
