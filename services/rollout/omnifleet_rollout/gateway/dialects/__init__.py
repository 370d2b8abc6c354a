"""OpenAI's dialects, one file each: a body in, samples out. `fields`, `reply` and `serving` are what they share."""
