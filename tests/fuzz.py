"""Random calls of jaxext against their definition in float64: `python tests/fuzz.py --seeds 20000 --start 0 --jobs 2`.

Each even seed is one call of a product of lax (see fuzz_calls.py): its value, both gradients and its jvp, under jit, must be those of the
direct sum in numpy, bit for bit where the operands are small integers.  Each odd seed is one of another operation (fuzz_operations.py):
ragged, fused, causal, scaled, declared and so on, in derivatives of up to the second order, in contexts, and split over simulated devices
(fuzz_functions.py).  A call that lax refuses must be refused with an exception of the same class.  Seeds run in chunks, each a process of
its own: one that dies or hangs is a failure of the seed that it was in, and a new one goes on after that seed.
The exit status is 1 if a seed failed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

# XLA_FLAGS of the environment come after these, so they win.
FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1 --xla_force_host_platform_device_count=4"
# Compiling is most of the time.  What hangs so is tried as users compile: without optimisation XLA's program for many groups of integers
# does not skip the zeros that it puts between groups, and 289 groups take ten minutes in place of 20 ms, for lax too.
QUICKLY = "--xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"  # halves the time; later versions do not know it, and end the process
HANGS = "hangs"
# Fresh and freed memory is not zero, so that an element that is read out of bounds shows.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "1", "MALLOC_PERTURB_": "128"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--start", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--chunk", type=int, default=250, help="seeds per process (default: 250)")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a seed counts as hanging (default: 120)")
    parser.add_argument("--operations", default="jaxext", help="the module that has the operations (default: jaxext; jax.lax tests lax)")
    parser.add_argument("--others", action="store_true", help="only the operations that are no products of lax: odd seeds")
    parser.add_argument("--planned", action="store_true", help="only the algorithms that `plan` names, else others for one product in four")
    parser.add_argument("--infinities", action="store_true", help="look only at where an infinity or NaN in one element spreads to")
    parser.add_argument("--optimised", action="store_true", help="compile as users do, which takes twice as long")
    parser.add_argument("--verbose", action="store_true", help="print every call")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        import fuzz_worker

        seeds = [seed for seed in range(options.start, options.start + options.seeds) if seed % 2 or not options.others]
        fuzz_worker.work(seeds, options.operations, options.planned, options.infinities)
        return 0
    return Run(options).result()


class Run:
    """All chunks, some at a time, and what they said."""

    def __init__(self, options):
        self.options, self.lock = options, threading.Lock()
        self.cache = ""  # an empty one: no table of measurements of this user decides
        self.counts = collections.defaultdict(collections.Counter)
        self.failed = []

    def result(self) -> int:
        options, began = self.options, time.monotonic()
        stop = options.start + options.seeds
        chunks = [range(first, min(first + options.chunk, stop)) for first in range(options.start, stop, options.chunk)]
        with tempfile.TemporaryDirectory() as self.cache, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(self.chunk, chunks))
        for kind, counter in sorted(self.counts.items()):
            print(f"{kind}: " + ", ".join(f"{name} {count}" for name, count in sorted(counter.items())))
        seconds = time.monotonic() - began
        failed = f"{len(self.failed)} failed: {sorted(self.failed)}" if self.failed else "none failed"
        print(f"{options.seeds} seeds from {options.start}, {failed} ({seconds:.0f} s)")
        return bool(self.failed)

    def chunk(self, seeds: range) -> None:
        """A process for these seeds, and one more after each seed that one does not survive."""
        while seeds:
            last, died = self.process(seeds, self.options.optimised)
            hung = bool(died) and died.startswith(HANGS)
            if hung and not self.options.optimised:
                last, died = self.process(range(last["seed"], last["seed"] + 1), optimised=True)
            if died:
                self.say({"call": "before any call", "seed": seeds[0]} | last | {"outcome": "wrong", "wrong": died})
            if not last or not (died or hung):
                return  # what does not start would not start for the next seed either
            seeds = range(last["seed"] + 1, seeds.stop)

    def process(self, seeds: range, optimised: bool) -> tuple[dict, str | None]:
        """Runs these seeds in a process; the seed that it was in last, and how it died if it did."""
        options = self.options
        command = [sys.executable, __file__, "--worker", "--start", str(seeds[0]), "--seeds", str(len(seeds))]
        command += [
            "--operations",
            options.operations,
            *(f"--{name}" for name in ("others", "planned", "infinities") if getattr(options, name)),
        ]
        flags = [FLAGS, *([] if optimised else [QUICKLY]), os.environ.get("XLA_FLAGS", "")]
        environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": " ".join(flags), "XDG_CACHE_HOME": self.cache}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout and process.stderr
        end = collections.deque(maxlen=20)  # of what it writes to stderr
        reader = threading.Thread(target=end.extend, args=[process.stderr])
        reader.start()
        last, watch = {}, Watch(process, options.limit)
        for line in process.stdout:
            watch.restart()
            if line.startswith("{"):
                last = json.loads(line)
                if "outcome" in last:
                    self.say(last)
        code = process.wait()
        watch.stop()
        reader.join()
        process.stdout.close()
        process.stderr.close()
        if not code:
            return last, None
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        if watch.hung:
            return last, f"{HANGS}: nothing for {options.limit:g} s"
        return last, f"the process {how}: {' | '.join(line.strip() for line in end if line.strip())[-300:]}"

    def say(self, message: dict) -> None:
        """Counts what a worker said about a seed, and prints a failure."""
        with self.lock:
            outcome = message["outcome"]
            self.counts["outcomes"][outcome] += 1
            for kind in ("op", "dtype"):
                if kind in message:
                    self.counts[f"{kind}s"][message[kind]] += 1
            for name in message.get("reached", ()):
                kind, _, algorithm = name.rpartition(" ")
                self.counts[f"seeds with {kind}"][algorithm] += 1
            if outcome == "wrong":
                self.failed.append(message["seed"])
                algorithms = ", ".join(message.get("reached", ()))
                print(f"seed {message['seed']} FAILED: {message['wrong']}\n  {message['call']}; {algorithms}", flush=True)
            elif self.options.verbose:
                print(f"seed {message['seed']} {outcome}: {message['call']}; {', '.join(message['reached'])}", flush=True)


class Watch:
    """Kills a process that says nothing for `limit` seconds after it said something."""

    def __init__(self, process, limit):
        self.process, self.limit, self.hung, self.timer = process, limit, False, None

    def restart(self):
        self.stop()
        self.timer = threading.Timer(self.limit, self.kill)
        self.timer.start()

    def stop(self):
        if self.timer:
            self.timer.cancel()

    def kill(self):
        self.hung = True
        self.process.kill()


if __name__ == "__main__":
    sys.exit(main())
