"""`python -m jaxext`: the command line."""

import sys

from jaxext._command import main

if __name__ == "__main__":  # and not in a process that was spawned to compile
    sys.exit(main())
