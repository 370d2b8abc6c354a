"""`python -m omnifleet`."""

from omnifleet.cli import main

main()
