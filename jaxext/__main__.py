"""The entry point of `python -m jaxext` and of the script `jaxext`."""

import os
import sys

from jaxext.cli.command import INTERRUPTED, main


def run() -> None:
    """Run the command, and end the process with its exit status."""
    status = main()
    if status == INTERRUPTED:  # XLA's threads may still be running, and crash during the interpreter's shutdown
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":  # not in processes spawned to compile
    run()
