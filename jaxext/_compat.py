"""The only file that uses jax internals: shims for features without a public name, or whose name depends on the version.

Supported: jax 0.10.2 up to 0.12.x.  Each shim says what would make it obsolete."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

MINIMUM_JAX = (0, 10, 2)

if jax.__version_info__ < MINIMUM_JAX:
    raise ImportError(f"jaxext needs jax {'.'.join(map(str, MINIMUM_JAX))} or newer, this is jax {jax.__version__}: pip install -U jax")

# ruff: noqa: E402
try:
    from jax._src import config, dispatch, distributed, sharding_impls, traceback_util
    from jax._src.ad_checkpoint import name_p as name_p
    from jax._src.ad_checkpoint import primal_left_tangent_right as primal_left_tangent_right
    from jax._src.core import ShardingTypeError as ShardingTypeError
    from jax._src.core import auto_insert_reshard, mem_kind_to_space, standard_vma_rule
    from jax._src.custom_partitioning import _sharding_callbacks
    from jax._src.interpreters import remat
    from jax._src.interpreters.partial_eval import Offloadable, RecomputeType
    from jax._src.lax.lax import ragged_dot_general_p as ragged_dot_general_p
    from jax._src.lax.scaled_dot import scaled_dot_p as scaled_dot_p
    from jax._src.lax.utils import standard_primitive
except ImportError as error:
    raise ImportError(f"jaxext was tested up to jax 0.12 and does not fit jax {jax.__version__}: update jaxext ({error})") from error
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_rules, partial_eval_jaxpr_custom_rules
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxext import _scope
from jaxext._target import compute_capability

# Each name that is imported "as" itself is for the other files:
# ShardingTypeError: raised by lax for shardings in types that do not match; removed once jax.errors exports it.
# name_p: the primitive of `checkpoint_name`, about which policies are asked; primal_left_tangent_right(x, y): x with the derivative of y.
# Both are removed with `register_remat`.
# align_varying: makes operands of a primitive vary over the same manual axes; removed once jax.lax has a public form of it.
align_varying = auto_insert_reshard
# trace_context: the part of the configuration that is in jit's cache keys; removed once make_jaxpr has a cache.
trace_context = config.trace_context
# conv_general_dilated: accepts symbolic padding; removed once lax's function does.
conv_general_dilated = lax.conv_general_dilated_p.bind

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def product_primitive(name, shape_rule, dtype_rule, sharding_rule) -> Primitive:
    """A primitive whose result type has shape, dtype, weak type, sharding and varying manual axes.

    An abstract eval that drops the varying axes causes silently wrong gradients under `shard_map`; lax's own constructor keeps them on
    every supported version.  Lowering needs the devices because custom_partitioning asks for them.
    """

    vma_rule = functools.partial(standard_vma_rule, name)
    primitive = standard_primitive(shape_rule, dtype_rule, name, sharding_rule=sharding_rule, vma_rule=vma_rule)
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    partial_eval_jaxpr_custom_rules[primitive] = policies_asked  # type: ignore[assignment]
    register_remat(primitive, functools.partial(_remat_product, primitive))
    return primitive


def operation_primitive(name, shape_rule, dtype_rule, sharding_rule) -> Primitive:
    """A primitive of several results, each with its type from these rules, which are told its name by the keyword `result`.

    The parameter `wanted` names the results.  Dead-code elimination removes those that nobody reads from it, except the first.
    """
    one = product_primitive(name, shape_rule, dtype_rule, sharding_rule)
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(lambda *avals, **params: [one.abstract_eval(*avals, result=y, **params)[0] for y in params["wanted"]])
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    partial_eval_jaxpr_custom_rules[primitive] = policies_asked  # type: ignore[assignment]
    dce_rules[primitive] = _drop_unread
    return primitive


def _drop_unread(used: list[bool], *rest):
    """The rule of dead-code elimination: which operands are read, and the equation that is left."""
    eqn = rest[-1]  # from jax 0.12 the inputs that are alive come before it
    if not any(used):
        return [False] * len(eqn.invars), None
    kept = [i for i, is_used in enumerate(used) if is_used or i == 0]
    wanted, outvars = tuple(eqn.params["wanted"][i] for i in kept), [eqn.outvars[i] for i in kept]
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params={**eqn.params, "wanted": wanted})


def adapt_dce_rule(primitive: Primitive) -> None:
    """Have a primitive's rule of dead-code elimination for jax before 0.12 accept the inputs that are alive, which newer jax gives it too.

    That of jax-triton 0.4.1 is such a rule.  Removed once jaxext needs a newer one.
    """
    rule: Any = dce_rules.get(primitive)
    if jax.__version_info__ >= (0, 12) and rule and len(inspect.signature(rule).parameters) == 2:
        dce_rules[primitive] = lambda used, alive, eqn: rule(used, eqn)  # type: ignore[assignment]


def register_remat(primitive: Primitive, rule: Callable) -> None:
    """Register `rule(policy, *operands, **params)` of a primitive for `jax_remat3`, without which no policy is asked about it.

    The rule gives the results, the values saved, and `again(saved, *operands)`, of which derivatives are taken.  jax before 0.12 has no
    values apart, and before 0.11 gives the policy itself.  Removed once policies are asked about primitives that are not jax's.
    """

    def adapted(trace, *operands, **params):
        results, saved, again = rule(getattr(trace, "policy", trace), *operands, **params)
        return (results, saved, again) if jax.__version_info__ >= (0, 12) else (results, functools.partial(again, saved))

    remat.rules[primitive] = adapted


def checkpoint_of_tangent(fun: Callable) -> Callable:
    """`jax.checkpoint` of a function that is linear in some operands.  That of `jax_remat3` has no transpose.  Removed once it has."""

    @functools.wraps(fun)
    def checkpointed(*args):
        with config.remat3(False):
            return jax.checkpoint(fun, prevent_cse=False)(*args)

    return checkpointed


def storage(policy: Callable | None, primitive: Primitive, avals: Sequence, params: dict) -> tuple[Callable, Callable] | None:
    """Return the functions by which a policy stores the result of a primitive and loads it, or None if it does not save it."""
    policies_asked.listener(policy, primitive, avals, params)
    case: Any = False if policy is None else policy(primitive, *avals, **params)
    if isinstance(case, Offloadable):
        store, load = (functools.partial(jax.device_put, device=mem_kind_to_space(kind), may_alias=False) for kind in (case.dst, case.src))
        return store, load
    return None if case is False or isinstance(case, RecomputeType) else (remat.reduce_precision, lambda x: x)


def _remat_product(primitive, policy, *operands, **params):
    compute = functools.partial(primitive.bind, **params)
    result, stored = compute(*operands), storage(policy, primitive, [jax.typeof(x) for x in operands], params)
    if stored is None:
        return result, (), lambda _, *operands: compute(*operands)
    store, load = stored
    return result, store(result), lambda y, *operands: primal_left_tangent_right(load(y), compute(*operands))


def refuse_parts(name: str, argument: str, *shardings: NamedSharding | PartitionSpec | None) -> None:
    """Refuse shardings in types with unreduced or reduced axes: an array, or its gradient, in parts that are not added up yet.

    Raises:
      NotImplementedError: as lax's convolution raises.  Without this check lax, traced on shapes alone, would raise another error.
    """
    for sharding in shardings:
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
        if not isinstance(spec, PartitionSpec) or AxisType.Explicit not in mesh.axis_types:
            continue
        for kind, axes in (("unreduced", spec.unreduced), ("reduced", spec.reduced)):
            if axes:
                raise NotImplementedError(
                    f"{name}: {argument} is {spec}, want no {kind} axes, which jaxext does not support: it adds up the parts of sums itself"
                )


def register_lowering(primitive, rule, *, multiple_results: bool = False) -> None:
    """Register `rule(platform, arch, splitter, *operands, **params)` for each platform.

    A program for several platforms is lowered once for each, with `arch` None.
    """
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(_lower_on_platform, rule, platform, multiple_results), platform=platform)
    mlir.register_lowering(primitive, functools.partial(_lower_on_platform, rule, "other", multiple_results))


def _lower_on_platform(rule, platform, multiple_results, ctx, *args, **params):
    arch = compute_capability(platform) if len(ctx.module_context.platforms) == 1 else None
    fun = functools.partial(rule, platform, arch, partitioner_of(ctx), **params)
    results = mlir.lower_fun(fun, multiple_results=multiple_results)(ctx, *args)
    for value in results:
        if isinstance(value.owner, ir.OpView) and "mhlo.frontend_attributes" in value.owner.attributes:
            _name_callback(ctx.module_context, value.owner, f"{platform} {arch}")
    return results


_naming = threading.Lock()


def _name_callback(module, call: ir.OpView, target: str) -> None:
    """Replace the address of a custom_partitioning callback in a program by a name that is the same in every process.

    The text of a program is its key in the persistent compilation cache, and an address differs in each process.  The name is a hash of
    what the callback depends on: `product` and `code` of the call (`core/partition`), the target and the devices.  Programs with the same
    name share a callback.  A call without `code` keeps the address.  Removed once custom_partitioning takes a name.
    """
    told = {named.name: str(named.attr) for named in ir.DictAttr(call.attributes["mhlo.frontend_attributes"])}
    if "code" not in told or "backend_config" not in call.attributes:
        return
    address = ir.StringAttr(call.attributes["backend_config"]).value
    with _naming:
        callback = _sharding_callbacks[address.encode()]
        assigned = [device.id for device in module.axis_context.device_assignment]
        depends_on = [told["product"], told["code"], target, dict(callback.mesh.shape), assigned]
        name = f"jaxext {hashlib.sha256(repr(depends_on).encode()).hexdigest()}"
        callback = _sharding_callbacks.setdefault(name.encode(), callback)
    module.add_keepalive(callback)  # otherwise it is freed with the program that was lowered first
    call.attributes["backend_config"] = ir.StringAttr.get(name)


class Partitioner(enum.StrEnum):
    """The partitioner that splits a program over devices after lowering."""

    # Nobody: it is already the program of one device, or there is one device.
    NOBODY = "nobody"
    # XLA's partitioner, which can call back, so custom_partitioning works.
    LABELS = "labels"
    # Nobody now, but XLA's partitioner if this exported program is called inside a sharded one.
    LATER = "later"
    # XLA's partitioner without callbacks.  Inside a partial-manual `shard_map` custom_partitioning receives a sharding without names.  An
    # exported program cannot hold its Python callback.  GSPMD, which Shardy replaced, has no sharding rules by label.
    XLA = "xla"

    @property
    def by_labels(self) -> bool:
        """Return whether implementations run on the part of one device."""
        return self in (Partitioner.NOBODY, Partitioner.LABELS)

    @property
    def splits_windows(self) -> bool:
        """Return whether XLA may split window axes: GSPMD has no constraint against it (`unsplit`)."""
        return not self.by_labels and not config.use_shardy_partitioner.value


def partitioner_of(ctx) -> Partitioner:
    """Return the partitioner of the program that is being lowered."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, sharding_impls.SPMDAxisContext):
        automatic = [n for a, n in axes.mesh.shape.items() if a not in axes.manual_axes]
        return Partitioner.NOBODY if all(n == 1 for n in automatic) else Partitioner.XLA
    exported = ctx.module_context.lowering_parameters.for_export
    if isinstance(axes, sharding_impls.ShardingContext) and axes.num_devices > 1:
        named = axes.device_assignment is not None and config.use_shardy_partitioner.value
        return Partitioner.LABELS if named and not exported else Partitioner.XLA
    return Partitioner.LATER if exported else Partitioner.NOBODY


def settings() -> tuple[tuple[str, Any], ...]:
    """Return the settings of tracing and lowering in this thread, by name: those of jax in jit's cache key, and jaxext's contexts.

    XLA asks for the parts of a program when it is compiled, which may be in another thread, or outside of the contexts of its lowering.
    Not among them are the default device, which may differ between processes and which a program with a mesh does not have, and user
    contexts of others, which have no list.  Removed once custom_partitioning calls back inside the contexts of the lowering.
    """
    return tuple((name, state.value) for name, state in (_states_of_jax() | _scope.contexts).items())


@functools.cache
def _states_of_jax() -> dict[str, Any]:
    try:
        names = config.trace_context_names()
    except NotImplementedError:  # jaxlib 0.10.1
        names = config.config_states
    return {name: config.config_states[name] for name in names if name in config.config_states and name != "jax_default_device"}


def lowered_within(settings: tuple[tuple[str, Any], ...], fun: Callable, avals: Sequence, *args) -> list:
    """Results, of the types `avals`, of `fun(*args)`, which is traced and lowered inside the `settings()` of another place."""
    return lowering_p.bind(*args, settings=settings, fun=fun, avals=tuple(avals))


_NO_MESH = jax.sharding.AbstractMesh((), ())


def _lower_within(ctx, *args, settings, fun, avals):
    states = _states_of_jax() | _scope.contexts
    with contextlib.ExitStack() as stack:
        for name, value in settings:
            stack.enter_context(states[name](value))
        stack.enter_context(jax.sharding.use_abstract_mesh(_NO_MESH))  # of the thread that compiles; this is the program of one device
        return mlir.lower_fun(fun, multiple_results=True)(ctx, *args)


lowering_p = Primitive("jaxext_within")
lowering_p.multiple_results = True
lowering_p.def_abstract_eval(lambda *_, avals, **__: avals)
mlir.register_lowering(lowering_p, _lower_within)


def unsplit(x: jax.Array, axes: Sequence[int], *, forwards: bool = False) -> jax.Array:
    """x with a constraint that keeps XLA's partitioner from splitting these axes; x itself without Shardy.

    `forwards`: what follows does not say how x is split.  `with_sharding_constraint` wants a mesh, and an exported program may be called
    on any.  Removed once that function takes no mesh.
    """
    return _unsplit.bind(x, axes=tuple(axes), forwards=forwards) if (axes or forwards) and config.use_shardy_partitioner.value else x


def _lower_unsplit(_, x, *, axes, forwards):
    dimensions = [sdy.DimensionShardingAttr.get([], is_closed=axis in axes) for axis in range(ir.RankedTensorType(x.type).rank)]
    if axes:
        x = sdy.ShardingConstraintOp(x, sdy.TensorShardingAttr.get(sdy.MeshAttr.get([]), dimensions)).result
    return [sdy.PropagationBarrierOp(x, sdy.PropagationDirection.FORWARD).result if forwards else x]


_unsplit = Primitive("unsplit")
_unsplit.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_unsplit, _lower_unsplit)


def named_specs(mesh: Mesh, shardings: Sequence) -> list[tuple]:
    """The mesh axes of each array axis, from the shardings that XLA's partitioner passes to custom_partitioning.

    They arrive undecoded, because jax's decoder raises if the partitioner has split a mesh axis in two (a batch of 8 over 4 devices,
    reshaped to 2 x 4, is split 2 x 2).  Such an array counts as replicated.  Removed once custom_partitioning decodes them.
    """

    def spec(sharding):
        try:
            return tuple(sharding_impls.parse_flatten_op_sharding(sharding._hlo_sharding, mesh)[0])
        except Exception:  # IndivisibleError, AssertionError, KeyError: the decoder has no error of its own
            return ()

    return [spec(sharding) for sharding in shardings]


def published(folder: str, value: str) -> dict[int, str] | None:
    """Publish a value to the other processes of this run, and return the values published so far, without waiting: process -> value.

    None if there is no key-value store, which `jax.distributed.initialize` creates.  Removed once jax.distributed has a public one.
    """
    client = distributed.global_state.client
    if client is None:
        return None
    client.key_value_set(f"{folder}/{jax.process_index()}", value, allow_overwrite=True)  # a restarted process publishes again
    return {int(key.rpartition("/")[2]): told for key, told in client.key_value_dir_get(folder)}


def evaluated(eqn, *operands) -> list:
    """The results of an equation for other operands.  Removed once `jax.extend.core` can evaluate an equation."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def scan_counts(params) -> tuple[int, int]:
    """Return how many operands of a scan are the same in all steps, and how many are carried: jax 0.12 keeps them as trees.

    Removed once jax 0.12 is the oldest version.
    """
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def replace_bind(primitive: Primitive, bind: Callable) -> None:
    """Replace a primitive's `bind` permanently by `bind(original, *operands, **params)`.

    Removed once jax has a public way to reinterpret a primitive.
    """
    if "bind" not in vars(primitive):
        primitive.bind = functools.partial(bind, primitive.bind)  # type: ignore[method-assign]


def kernels_launched(run: Callable[[], object]) -> Sequence[tuple[str, float]]:
    """Name and milliseconds of each GPU kernel that `run()` launches and waits for, as reported by CUPTI.

    `jax.experimental.mosaic.gpu.profiler` uses the same functions, but cannot run code between two calls.  Removed once it can.

    Raises:
      Exception: jax or the machine lacks something; the type varies.
    """
    from jax.experimental.mosaic.gpu import profiler

    cupti: Any = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # type: ignore[union-attr]
    cupti._cupti_init()
    try:
        run()
    finally:
        launches = cupti._cupti_get_timings(False)
    return launches or ()


@contextlib.contextmanager
def without_stored_programs() -> Iterator[None]:
    """A context in which jax's persistent compilation cache is neither read nor written.

    Removed once jax's own setting can be changed after the first program.
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax remembers whether the cache is in use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def source_line(eqns: Sequence) -> str:
    """The user's line of the first of these equations that has one, such as "mynet.py:12 (loss)", or else that of a library of models.

    It is that of the innermost function which is in no installed package.  Removed once `jax.extend.source_info_util`, whose `summarize`
    gives the innermost one outside of jax, can exclude such libraries.
    """
    paths = sysconfig.get_paths()
    libraries = {*(paths[name] for name in ("stdlib", "purelib", "platlib")), *map(os.path.dirname, (jax.__file__, __file__))}
    installed = (*(os.path.join(path, "") for path in libraries), "<frozen")
    for eqn in eqns:
        for frame in eqn.source_info.traceback.frames if eqn.source_info.traceback else ():
            if not frame.file_name.startswith(installed):
                return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return next(filter(None, (source_info_util.summarize(eqn.source_info) for eqn in eqns)), "")


def hide_frames() -> None:
    """Hide this package's files, like jax's own, in tracebacks and in the source lines of compiled programs.

    JAX_TRACEBACK_FILTERING=off shows all frames.  Removed once `jax.extend` can exclude files from tracebacks too.
    """
    package = os.path.join(os.path.dirname(__file__), "")  # ends in a separator, since jax compares path prefixes
    source_info_util.register_exclusion(package)
    traceback_util.register_exclusion(package)


class _PoliciesAsked:
    """Calls `listener(policy, primitive, avals, params)` for each product before jax asks a policy of `jax.checkpoint` about it.

    jax looks up a custom rule of the primitive before it asks the policy.  This object is registered as that rule but is false, so jax
    continues as if there were none.  `__bool__` reads the policy and the equation from jax's frame, and does not call the listener if the
    frame lacks them.  Removed once jax's policies recognise primitives that are not jax's.
    """

    listener: Callable = staticmethod(lambda policy, primitive, avals, params: None)

    def __bool__(self) -> bool:
        asking = sys._getframe(1).f_locals
        known = all(name in asking for name in ("saveable", "eqn", "unks_in"))
        if known and not any(asking["unks_in"]):  # no policy is asked about values that depend on unknowns
            eqn = asking["eqn"]
            self.listener(asking["saveable"], eqn.primitive, [x.aval for x in eqn.invars], eqn.params)
        return False


policies_asked = _PoliciesAsked()
