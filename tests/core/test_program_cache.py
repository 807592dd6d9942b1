"""The persistent cache of compiled programs: one for several devices is found again by another process, and no other is taken for it.

Such a program hides a product behind a callback, so its text is all that the cache knows of it.
"""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from bilinear import same
from jax.sharding import PartitionSpec as P
from test_sharding import place

import jaxext
from jaxext import extend
from jaxext.core import partition
from jaxext.tables import active, environment
from jaxext.tables.table_format import Measurement, Table

# Two convolutions of the same shapes under each setting; of each the last row, and whether the cache had it.
PROGRAMS = """
import sys, jax, numpy as np, jaxext
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxext.core import partition
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
x = jax.device_put(np.ones((8, 5, 1), np.float32), NamedSharding(mesh, P("data")))
w = np.arange(3, dtype=np.float32).reshape(3, 1, 1)

def both():
    for padding in ((0, 2), (2, 0)):
        f = jax.jit(lambda x, w: jaxext.conv_general_dilated(x, w, (1,), [padding], dimension_numbers=("NWC", "WIO", "NWC")))
        compiled = f.lower(x, w)
        events.clear()
        print(*np.asarray(compiled.compile()(x, w))[7, :, 0].astype(int), events.count("/jax/compilation_cache/cache_hits"))

both()
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
both()
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", False)
partition._code = lambda: sys.argv[1]
both()
"""


def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    """The cache found none under jax's default settings, and took convolutions that differ in their padding for one when its key left out
    the address of the callback."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
    }

    def hits(code):
        run = subprocess.run([sys.executable, "-c", PROGRAMS, code], env=env, check=True, capture_output=True, text=True)
        rows = [[int(number) for number in line.split()] for line in run.stdout.splitlines()]
        assert [row[:-1] for row in rows] == [[3, 3, 3, 1, 0], [2, 3, 3, 3, 3]] * 3
        return [row[-1] for row in rows]

    assert hits("some code") == [0] * 6
    assert hits("other code") == [1, 1, 1, 1, 0, 0]


def test_the_code_is_every_source_of_the_package(tmp_path, monkeypatch):
    code = partition._code.__wrapped__
    monkeypatch.setattr(partition, "__file__", str(tmp_path / "forms" / "partition.py"))
    assert code() is None  # it is not there
    (tmp_path / "_compat.py").write_text("a")
    (tmp_path / "forms").mkdir()
    seen = [code()]
    for text in ("b", "c"):
        (tmp_path / "forms" / "form.py").write_text(text)
        seen.append(code())
    assert len({*seen}) == 3
    (tmp_path / "forms" / "form.py").unlink()
    assert code() == seen[0]


def names(lowered) -> list[str]:
    return re.findall(r'backend_config = "(.*?)"', lowered.as_text())


def test_programs_share_a_callback_by_its_name():
    """It outlives the program that was lowered first; another product, other shapes, or another mesh have another."""
    a, b = place(np.ones((8, 4), np.float32), P("data")), np.ones((4, 2), np.float32)
    lower = lambda f, *args: jax.jit(f).lower(*args)
    plus = lambda n: lambda a, b: jaxext.matmul(a, b) + n
    first, second, wide = lower(plus(1), a, b), lower(plus(2), a, b), lower(plus(3), b.T, a.T)
    assert names(first) == names(second) != names(wide) and len(names(first)) == 1
    del first
    gc.collect()
    same(np.asarray(second.compile()(a, b)), np.full((8, 2), 6, np.float32))
    same(np.asarray(wide.compile()(b.T, a.T)), np.full((2, 8), 7, np.float32))
    turned = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    gradient = lower(jax.grad(lambda b, a: jaxext.matmul(a, b).sum()), b, a)
    others = gradient, lower(jaxext.matmul, place(a, P("data"), turned), b), lower(jax.vmap(jaxext.matmul), a[:, None], np.stack([b] * 8))
    assert len({name for lowered in (second, *others) for name in names(lowered)}) == 4
    same(np.asarray(gradient.compile()(b, a)), np.full((4, 2), 8, np.float32))


def test_code_of_a_user_without_a_version_is_compiled_anew():
    """All that is known of it is the file of its class, and a kernel may lie in another."""

    class Einsum(extend.Implementation):
        name = "einsum"

        def __init__(self, version):
            self.version = version

        def refuses(self, call):
            return None

        def run(self, call, config, operands):
            letters = {slot: "".join(labels) for slot, labels in call.labels.items()}
            equation = f"{','.join(letters[slot] for slot in operands)}->{letters[call.open]}"
            return jnp.einsum(equation, *call.flatten(operands).values()).reshape(call.shape)

    u, v = place(np.ones((8, 4), np.float32), P("data")), np.ones((8, 2), np.float32)
    for version, named in (("1", True), (None, False)):
        outer = extend.define(f"outer_product_{named}", u="B I K", v="B J K", t="B I J")
        extend.register(outer, Einsum(version))
        lowered = jax.jit(lambda u, v, outer=outer: outer(u, v, K=0)).lower(u, v)
        assert [name.startswith("jaxext ") for name in names(lowered)] == [named]
        same(np.asarray(lowered.compile()(u, v)), np.ones((8, 4, 2), np.float32))


def test_programs_tell_tables_and_code_apart(monkeypatch):
    """The cache would otherwise give a program that another table decided: XLA asks for the parts only when it compiles."""
    a, b = place(np.ones((8, 4), np.float32), P("data")), np.ones((4, 2), np.float32)

    def known_as():
        return re.findall(r'product = "(.*?)"', jax.jit(lambda a, b: jaxext.matmul(a, b)).lower(a, b).as_text())

    measured = Measurement(implementation="xla", config={"algorithm": "dot_general"}, ms=(1.0, 1.0, 1.0), error=0.0)
    tables = {}, {"one": [measured]}, {"another": [measured]}
    texts = []
    for source, rows in [(source, rows) for source in ("made up", "a copy of it") for rows in tables]:
        with jaxext.use_table(Table(active.context("cpu"), rows, source)):
            texts.append(*known_as())
    assert len(set(texts)) == 3 and texts[:3] == texts[3:]
    before, codes = known_as(), environment.codes("cpu")
    monkeypatch.setattr(environment, "codes", lambda platform: codes | {"triton": "another"})
    assert known_as() != before
    monkeypatch.setattr(environment, "codes", lambda platform: codes)
    assert known_as() == before


def test_numbers_that_print_alike_are_told_apart():
    """Several devices took the second product for the first: their scales agree in six digits."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.enable_x64(True):
        x = jax.device_put(np.random.default_rng(0).normal(size=(8, 16)), jax.NamedSharding(mesh, P("a")))
        coefficients = (3.0, -4.775, 2.0315), (3.0, -4.775003, 2.0315)
        one, other = jax.jit(lambda x: [jaxext.newton_schulz(x, 1, each) for each in coefficients])(x)
        alone = [jax.jit(lambda x, each=each: jaxext.newton_schulz(x, 1, each))(np.asarray(x)) for each in coefficients]
    np.testing.assert_allclose(one, alone[0], rtol=1e-12)
    np.testing.assert_allclose(other, alone[1], rtol=1e-12)
    assert np.abs(np.asarray(alone[0]) - alone[1]).max() > 1e-8
