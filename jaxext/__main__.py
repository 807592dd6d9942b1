"""`python -m jaxext`, and the script `jaxext`: the command line as a process."""

import os
import sys

from jaxext.cli.command import INTERRUPTED, main


def run() -> None:
    """Ends the process with the command's exit status."""
    status = main()
    if status == INTERRUPTED:  # XLA's threads may still be at what was interrupted, and crash while the interpreter is taken down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":  # and not in a process that was spawned to compile
    run()
