"""Runs a script as several processes of one cluster on this computer, and sees to it that none outlives the run."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time

from multi_process import reserved_address

STRICT = {"JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}  # as conftest.py has it


def run(script: str, *arguments: str, processes: int = 2, devices: int = 4, limit: float = 300) -> list[subprocess.CompletedProcess]:
    """Run `python script ADDRESS COUNT INDEX arguments...` in each process, and return how it ended and what it wrote.

    Each has its own simulated devices.  After `limit` seconds, which only a hang can take, those that are left are killed.
    """
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(reserved_address())
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"  # of two such flags the last counts
        environment = os.environ | STRICT | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_COORDINATOR_BIND_ADDRESS": address}
        started, logs = [], []
        for index in range(processes):
            command = [sys.executable, script, address, str(processes), str(index), *arguments]
            logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            started.append(subprocess.Popen(command, env=environment, stdout=logs[-1], stderr=subprocess.STDOUT))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        deadline = time.monotonic() + limit
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, deadline - time.monotonic()))
            process.kill()  # which does nothing to one that has ended
            process.wait()
        for log in logs:
            log.seek(0)
        return [subprocess.CompletedProcess(p.args, p.returncode, log.read()) for p, log in zip(started, logs, strict=True)]
