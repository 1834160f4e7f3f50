"""`python -m calib COMMAND ...` is `calib COMMAND ...`."""

import sys

from calib.cli import main

if __name__ == "__main__":
    sys.exit(main())
