"""Who the workers are, in which state and at which weights. Knows no requests and no tokens; starts no process."""
