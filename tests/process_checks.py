"""The checks of each of two processes with four devices: its own devices find what it computes alone, and all agree on their tables.

The checks run one after the other, in both processes at once, and small integers make comparisons exact.
"""

import functools
import os
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from bilinear import CONV2D, DOT, GROUPED, LAX, NHWC, OURS, ROLES, conv, integers, same, truth
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import parallel
from jaxext.tables import active, table_file
from jaxext.tables.table_format import Measurement


def mesh(kind=AxisType.Auto):
    """(4, 2), with devices of both processes along either axis."""
    first, second = jax.devices()[:4], jax.devices()[4:]
    rows = [(first[i], second[i]) if i % 2 == 0 else (second[i], first[i]) for i in range(4)]
    return jax.sharding.Mesh(np.array(rows), ("data", "model"), axis_types=(kind, kind))


def place(x, spec, mesh):
    """A global array, of which this process makes its own shards alone."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def same_here(got, want):
    """The shards of this process are those of the truth; as many as it has devices."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert len(g.addressable_shards) == 4 and g.shape == np.shape(w)
        for shard in g.addressable_shards:
            same(shard.data, np.asarray(w)[shard.index])


def spec(problem, slot, split):
    return P(*(split.get(label) for label in problem.labels(slot)))


def every_role(problem, split):
    """One program of the operation and both its transposes; where a contracted label is split, processes add up their parts."""
    slots = {"x": problem.operands("fprop")[0], "w": problem.operands("fprop")[1], "y": problem.operands("dgrad")[0]}
    placed = {slot: place(x, spec(problem, slot, split), mesh()) for slot, x in slots.items()}
    calls = {role: problem.slots(role) for role in ROLES}

    @jax.jit
    def roles(slots):
        return {role: problem.role(role)(slots[first], slots[second]) for role, (first, second, _) in calls.items()}

    got = roles(placed)
    same_here(got, {role: truth(problem, role, slots[first], slots[second]) for role, (first, second, _) in calls.items()})
    for role, (_, _, open) in calls.items():
        assert got[role].sharding.is_equivalent_to(placed[open].sharding, placed[open].ndim), role


def loss(ops, weights, x):
    """A convolution, what is not linear, a product; small integers in float64 stay exact."""
    filters, matrix = weights
    y = jnp.maximum(CONV2D.call(ops, x, filters), 0)
    return jnp.sum(ops.dot(jnp.sum(y, (1, 2)), matrix, (((1,), (0,)), ((), ()))) ** 2)


def net():
    x, filters = CONV2D.operands("fprop", dtype=np.float64)
    return (filters, np.arange(filters.shape[-1] * 8.0).reshape(-1, 8) % 5 - 2), x


def gradients():
    """Batch over "data", channels over "model": the convolution's outputs, and the rows of the matrix."""
    weights, x = net()
    places = (P(None, None, None, "model"), P("model", None)), P("data")
    placed = jax.tree.map(lambda x, spec: place(x, spec, mesh()), (weights, x), places)
    of_both = lambda ops: jax.jit(jax.value_and_grad(functools.partial(loss, ops), argnums=(0, 1)))
    same_here(of_both(OURS)(*placed), of_both(LAX)(weights, x))


def gradients_on_an_explicit_mesh():
    """Shardings are in the types, and so are the sums over processes that the filters' gradient needs."""
    (filters, _), x = net()
    square = lambda ops: jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(CONV2D.call(ops, x, w) ** 2), argnums=(0, 1)))
    explicit = mesh(AxisType.Explicit)
    got = square(OURS)(place(x, P("data"), explicit), place(filters, P(None, None, None, "model"), explicit))
    same_here(got, square(LAX)(x, filters))


def gradients_in_shard_map():
    """Check gradients of replicated weights, which shard_map adds up over processes."""
    weights, x = net()
    part = lambda weights, x: lax.psum(loss(OURS, weights, x), "data")
    whole = jax.shard_map(part, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    got = jax.jit(jax.value_and_grad(whole))(jax.tree.map(lambda w: place(w, P(), mesh()), weights), place(x, P("data"), mesh()))
    same_here(got, jax.jit(jax.value_and_grad(functools.partial(loss, LAX)))(weights, x))


def gradients_in_pmap():
    """Check gradients in pmap, to which each process hands its own devices' part."""
    weights, x = net()
    mine = np.split(x, jax.process_count())[jax.process_index()][:, None]

    def step(weights, x):
        return lax.psum(jax.value_and_grad(functools.partial(loss, OURS))(weights, x), "all")

    got = jax.pmap(step, axis_name="all", in_axes=(None, 0))(weights, mine)
    want = jax.jit(jax.value_and_grad(functools.partial(loss, LAX)))(weights, x)
    same([shard.data[0] for leaf in jax.tree.leaves(got) for shard in leaf.addressable_shards],
         [leaf for leaf in jax.tree.leaves(want) for _ in range(4)])  # fmt: skip


def local_data():
    """A global array of what each process has, multiplied by a matrix that lies on all: the result's parts need no other process."""
    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 4, 8)
    a, b = DOT.operands("fprop")
    rows = slice(4 * jax.process_index(), 4 * jax.process_index() + 4)
    lined_up = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.make_array_from_process_local_data(NamedSharding(lined_up, P("data")), a[rows])
    got = jax.jit(jaxext.matmul)(split, place(b, P(), lined_up))
    same_here(got, a @ b)
    same(np.concatenate([shard.data for shard in got.addressable_shards]), (a @ b)[rows])


def overlapped_products():
    """Rows of one process travel to the other and back, beside the products."""
    a, b = DOT.operands("fprop")
    over = functools.partial(jax.shard_map, mesh=mesh())
    gathered = over(lambda a, b: parallel.all_gather_matmul(a, b, axis_name="data"), in_specs=(P("data"), P()), out_specs=P("data"))
    scattered = over(
        lambda a, b: parallel.matmul_reduce_scatter(a, b, axis_name="data"), in_specs=(P(None, "data"), P("data")), out_specs=P("data")
    )
    got = jax.jit(gathered)(place(a, P("data"), mesh()), place(b, P(), mesh()))
    same_here(got, np.concatenate([a @ b] * 4))
    same_here(jax.jit(scattered)(place(a, P(None, "data"), mesh()), place(b, P("data"), mesh())), a @ b)


def halo_exchange():
    """Rows at the edge of a device's part of the image come from the other process."""
    x, w = integers((2, 16, 5, 3)), integers((3, 3, 3, 4), 1)
    same_size = conv((1, 1), "SAME", NHWC)
    split = lambda x, w: same_size(types.SimpleNamespace(conv=parallel.halo_conv), x, w, axis_names=("data", None))
    rows = P(None, "data")
    whole = jax.shard_map(split, mesh=mesh(), in_specs=(rows, P()), out_specs=rows)
    square = lambda f: jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(f(x, w) ** 2), argnums=(0, 1)))
    got = square(whole)(place(x, rows, mesh()), place(w, P(), mesh()))
    same_here(got, square(functools.partial(same_size, LAX))(x, w))


def tables(folder):
    """Check that processes agree on a table from one file, and again when it has changed; at least one raises if own tables differ."""

    def meet(what):
        multihost_utils.sync_global_devices(what)

    def refusal(rows):
        try:
            jax.jit(lambda a, b: jaxext.matmul(a, b)).lower(jnp.ones((rows, 5)), jnp.ones((5, 6)))
        except RuntimeError as error:
            return str(error)
        return ""

    def write(path, *problems):
        measurement = Measurement("xla", {"algorithm": "lax"}, (1.0, 1.5, 2.0), 0.0)
        table_file.write(path, active.context("cpu"), {problem: [measurement] for problem in problems})

    with active.collecting() as calls, jaxext.use_table(None):
        refusal(4)
    problem, named, own, first = calls[0].problem, folder / "named.json", table_file.default_path(), jax.process_index() == 0
    if first:
        write(named, problem)
        write(own, problem)
    meet("both tables are written")
    with jaxext.use_table(named):
        assert refusal(4) == ""

    heard = refusal(5)
    assert multihost_utils.process_allgather(np.array(heard != "")).any()
    if heard:
        assert "processes have different tables" in heard
        assert "process 0 has 1 rows, " in heard and "process 1 has 0 rows, " in heard and str(own) in heard

    if first:
        table_file.clear(named)
        write(named, "another", problem)
    meet("the named table is another")
    with jaxext.use_table(named):
        if not first:
            meet("process 0 has read it")
        assert refusal(6) == ""
        if first:
            meet("process 0 has read it")


CHECKS = {
    "local data": local_data,
    **{
        f"{problem} {'-'.join(split)}": functools.partial(every_role, problem, split)
        for problem, split in (
            (DOT, {"C": "data"}),
            (CONV2D, {"N": "data", "K": "model"}),
            (GROUPED, {"N": "model", "G": "data"}),
        )
    },
    "gradients": gradients,
    "gradients on an explicit mesh": gradients_on_an_explicit_mesh,
    "gradients in shard_map": gradients_in_shard_map,
    "gradients in pmap": gradients_in_pmap,
    "overlapped products": overlapped_products,
    "halo exchange": halo_exchange,
}


def main(address, count, index, folder):
    """Notes each check that has passed.  The first that fails ends this process, and thereby the others, which may be waiting for it."""
    jax.distributed.initialize(address, int(count), int(index), heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20)
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{index}"
    with open(f"{folder}/passed.{index}", "w", buffering=1) as passed:
        with jaxext.use_table(None):  # for `tables` nobody has looked yet at the user's own, which are read but once
            for name, check in CHECKS.items():
                check()
                print(name, file=passed)
        tables(pathlib.Path(folder))
        print("tables", file=passed)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
