"""A small network trained on several processes, each with its own part of the data.

    python examples/multi_process.py            # two processes on this computer, with four simulated devices each
    python examples/multi_process.py --gpus     # two processes on this computer, with one of its GPUs each
    python examples/multi_process.py --die 1    # process 1 is killed after two steps; JAX ends the other

On a cluster every process runs this script.  Under SLURM, Open MPI or Kubernetes JAX finds the others by itself.  With one process per GPU:

    srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --kill-on-bad-exit python examples/multi_process.py --cluster

By hand on two hosts, with one process per host for all of its GPUs (both know the first host as host0, whose port 1234 is free):

    host0$ python examples/multi_process.py --coordinator host0:1234 --processes 2 --process 0
    host1$ python examples/multi_process.py --coordinator host0:1234 --processes 2 --process 1

JAX connects GPUs of different processes by NCCL, CPUs by Gloo.
"""

import argparse
import contextlib
import functools
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext

FRAMES = DIRECTIONS = 8
STEPS, RATE = 10, 0.5

# --- data and net: one convolution, one mean and one product tell in which of eight directions a wave moves


def waves(seed, n, size):
    """(eight frames of each wave, as channels: (n, size, size, 8); the direction of each, from 0 to 7: (n,))"""
    rng = np.random.default_rng(seed)
    directions = rng.integers(0, DIRECTIONS, n, dtype=np.int32)
    angle = directions.reshape(-1, 1, 1, 1) * 2 * np.pi / DIRECTIONS
    y, x, time = np.ogrid[:size, :size, :FRAMES]
    phase = rng.uniform(0, 2 * np.pi, (n, 1, 1, 1)) - time * 2 * np.pi / FRAMES
    film = np.sin(np.cos(angle) * x + np.sin(angle) * y + phase) + rng.normal(0, 0.5, (n, size, size, FRAMES))
    return film.astype(np.float32), directions


def init(channels):
    rng = np.random.default_rng(0)
    shapes = {"filters": (5, 5, FRAMES, channels), "out": (channels, DIRECTIONS)}
    return {name: rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}


# The filters' output channels lie on "model", and so do the rows of the matrix that they meet: each device convolves into channels of its
# own, and the product with the matrix, which sums over channels, is a sum over "model" too.
PLACES = {"filters": P(None, None, None, "model"), "out": P("model", None)}


def mean_loss(dtype, params, films, directions):
    filters, out = params["filters"].astype(dtype), params["out"].astype(dtype)
    x = jaxext.conv_general_dilated(films.astype(dtype), filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    logits = jaxext.matmul(jax.nn.relu(x).mean((1, 2)), out).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), directions[:, None], axis=1).mean()


@functools.partial(jax.jit, static_argnums=0)
def step(dtype, params, films, directions):
    loss, grads = jax.value_and_grad(mean_loss, argnums=1)(dtype, params, films, directions)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def train(dtype, params, films, directions, after_step=lambda i: None):
    """(trained parameters, loss of each step).  It is the same for one device and for all: computation follows the data."""
    losses = []
    for i in range(STEPS):
        params, loss = step(dtype, params, films, directions)
        losses.append(float(loss))  # which every process has, once all have added up their parts of it
        after_step(i)
    return params, losses


# --- one process of several, which already know each other


def say(text):
    print(text, file=sys.stderr)  # on stdout Gloo tells of each of its connections


def take_part(dtype, die):
    here, everywhere = jax.local_devices(), jax.devices()
    kind = here[0].device_kind
    say(f"process {jax.process_index()} of {jax.process_count()}: {len(here)} of {len(everywhere)} devices ({kind}) belong to it")
    size, channels, total = (12, 16, 64) if jax.default_backend() == "cpu" else (64, 256, 512)
    examples = max(1, total // len(everywhere))  # on a device; however many there are, one can hold the whole, as it does below

    # Where each process has pairs of devices, pairs share a part of the batch and split the channels.
    pair = 1 if len(here) % 2 else 2
    mesh = jax.make_mesh((len(everywhere) // pair, pair), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))

    # One global array of what each process has: nobody holds all of it.  Its shape is that of the whole; its shards here are ours.
    mine = waves(seed=jax.process_index(), n=examples * len(here), size=size)
    films, directions = (jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), x) for x in mine)
    say(f"films: {films.shape} in all, {mine[0].shape} in this process, {films.addressable_shards[0].data.shape} on a device")

    # What every process has alike becomes a global array too: each keeps the shards of its devices.
    params = jax.device_put(init(channels), {name: NamedSharding(mesh, place) for name, place in PLACES.items()})

    def after_step(i):
        if i == 1 and die == jax.process_index():
            say("here the process is killed")
            os.kill(os.getpid(), signal.SIGKILL)

    params, losses = train(dtype, params, films, directions, after_step)
    say("losses: " + " ".join(f"{loss:.4f}" for loss in losses))

    # All processes hold the same: the losses and, device by device, the parameters, to the last bit.
    shards = {name: [np.asarray(shard.data) for shard in x.addressable_shards] for name, x in params.items()}
    multihost_utils.assert_equal((np.array(losses), shards), "processes hold different results")

    # It is also what one device finds alone, from the whole batch, which for this once is brought together.
    whole = multihost_utils.process_allgather(mine, tiled=True)
    _, alone = train(dtype, *jax.device_put((init(channels), *whole), here[0]))
    error = np.abs(np.subtract(losses, alone)).max()
    say(f"the other processes have the same; the losses of a single device differ by {error:.0e} at most")
    if not error <= (1e-4 if dtype == jnp.float32 else 2e-2):  # nor may it be NaN
        raise ArithmeticError(f"losses of all devices: {losses}; of one alone: {alone}")
    if not losses[-1] < 0.7 * losses[0]:
        raise ArithmeticError(f"nothing was learned: {losses}")


# --- several processes on this computer, in place of a cluster's launcher


def follow(index, child, ended):
    for line in child.stderr:
        print(f"[{index}] {line}", end="", flush=True)
    ended.put((index, child.wait()))


@contextlib.contextmanager
def reserved_address():
    """Yield a local address for the coordinator.  Its port stays bound, but shareable, so that no other program gets it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield "{}:{}".format(*held.getsockname())


def launch(arguments, processes, gpus, timeout):
    """The script itself, as so many processes.  Once one has failed the others have time to find that out; then they are killed."""
    ended = queue.Queue()
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(reserved_address())
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
        for i in range(processes):
            devices = {"JAX_PLATFORMS": "cuda", "JAX_LOCAL_DEVICE_IDS": str(i)} if gpus else {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            environment = os.environ | devices | {"JAX_COORDINATOR_BIND_ADDRESS": address}
            command = [sys.executable, __file__, *arguments, f"--coordinator={address}", f"--processes={processes}", f"--process={i}"]
            child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            reader = threading.Thread(target=follow, args=(i, stack.enter_context(child), ended))
            reader.start()
            stack.callback(reader.join)
            stack.callback(child.kill)  # which comes first, and does nothing to a process that has ended

        statuses = {}
        with contextlib.suppress(queue.Empty):
            while len(statuses) < processes:
                i, statuses[i] = ended.get(timeout=2 * timeout if any(statuses.values()) else None)
                how = f"exit status {statuses[i]}" if statuses[i] >= 0 else f"killed by {signal.Signals(-statuses[i]).name}"
                print(f"process {i} ended: {how}", flush=True)
    for i in set(range(processes)) - statuses.keys():
        print(f"process {i} was still running {2 * timeout} seconds later, and was stopped")
    return 0 if list(statuses.values()) == [0] * processes else 1


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="store_true", help="this is a process of a cluster which JAX can ask for all that follows")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="this is a process of a cluster: where process 0 listens to the others")
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are (default: 2, on this computer)")
    parser.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")
    parser.add_argument("--gpus", action="store_true", help="those on this computer have one GPU each (default: four simulated devices)")
    parser.add_argument("--timeout", type=int, default=10, help="seconds without a sign of life that others take for death (%(default)s)")
    parser.add_argument("--die", type=int, metavar="I", help="which process is killed after two steps (default: none)")
    parser.add_argument("--implementation", choices=["triton", "cuda", "xla"], help="of both operations (default: what jaxext prefers)")
    args = parser.parse_args(argv)
    launching = not args.cluster and args.coordinator is None
    processes = 2 if launching and args.processes is None else args.processes
    if processes is not None and processes < 1:
        parser.error(f"argument --processes: it is {processes}, want at least 1")
    if args.die is not None and not 0 <= args.die < (processes or math.inf):
        parser.error(f"argument --die: it is {args.die}, want one of the processes, from 0")
    if args.timeout < 1:
        parser.error(f"argument --timeout: it is {args.timeout}, want at least 1 second")
    if launching:
        try:
            return launch(sys.argv[1:] if argv is None else argv, processes, args.gpus, args.timeout)
        except KeyboardInterrupt:
            return 130

    # Processes give each other signs of life, also while they compute or wait.  Where one is dead JAX ends the others, which would wait for
    # it in their next collective for ever: they abort (SIGABRT, status 134), and say which process it was, or, where it was process 0, with
    # whom all of them talk, that this connection is lost ("Socket closed", "Connection reset").  One that fails with an exception prints it
    # and waits for the others to be done; when it has waited for `shutdown_timeout_seconds`, all of them end likewise.  One that lives but
    # never comes is no failure to JAX: it is waited for.  So is one that died before it met the others here, for `initialization_timeout`,
    # 300 seconds; `launch` stops them sooner.
    jax.distributed.initialize(
        args.coordinator,
        processes,
        args.process,
        heartbeat_timeout_seconds=args.timeout,  # JAX's own default is 100: a long run forgives a pause
        shutdown_timeout_seconds=args.timeout,
    )
    # The CUDA kernels take operands of 16 bits.  Those of 32 bits GPUs would round to TF32, if they were not told otherwise.
    dtype = jnp.bfloat16 if args.implementation == "cuda" else jnp.float32
    with jax.default_matmul_precision("highest"), jaxext.use_implementation(args.implementation):
        take_part(dtype, args.die)
    jax.distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
