"""python -m omnifleet_media: the same as `omnifleet media`."""

from omnifleet_media.cli import app

app()
