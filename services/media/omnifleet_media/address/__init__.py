"""What is addressed: manifests and decode contracts. Digests themselves are `omnifleet.address`. Touches no file."""
