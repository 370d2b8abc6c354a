"""From source bytes to canonical frames, inside decoder processes. Knows no digest, no store and no index."""
