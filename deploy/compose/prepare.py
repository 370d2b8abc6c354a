"""Makes the run's folder once, before any service starts: the resolved recipe and one set of tokens for all.

prepare.py RECIPE [section.field=value]…
"""

import sys

from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError
from omnifleet.launch.plan import prepare_run

if __name__ == "__main__":
    try:
        print(prepare_run(load_recipe(sys.argv[1], sys.argv[2:])))
    except OmnifleetError as error:
        raise SystemExit(f"omnifleet: {error}") from None
