"""Steps as one writes them by hand, and the wrappers of this library beside them.

What `bench_wrappers.py` and `bench_scale.py` compare: each case is an optimizer of the
library and the step that does the same without it, with the same inner optimizer and
the same arithmetic, `lax.pmean` inside `lax.cond`. Both run under
`jax.shard_map(check_vma=True)` over the mesh axis "workers", with what they start from
donated.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync.audit import hlo

AXIS, PERIOD, RATE = "workers", 5, 0.1
INNER = optax.adam(1e-3)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
Tree = Any


class Case(NamedTuple):
    """An optimizer of the library, and the step written by hand.

    Attributes:
        tx: The optimizer, for a number of workers.
        start: From the parameters, (what each worker keeps, what all of them share).
        step: `(params, own, shared, due, grads) -> (params, own, shared)` of a worker,
            in a step that is due an exchange or not.
        replicated: Whether the parameters are equal everywhere, and held as one.
        period: Steps from one exchange to the next.
    """

    tx: Callable[[int], optax.GradientTransformation]
    start: Callable[[Tree], tuple[Tree, Tree]]
    step: Callable[[Tree, Tree, Tree, jax.Array, Tree], tuple[Tree, Tree, Tree]]
    replicated: bool = False
    period: int = PERIOD


over_trees = functools.partial(functools.partial, jax.tree.map)
minus, plus = over_trees(operator.sub), over_trees(operator.add)
zeros = over_trees(jnp.zeros_like)
# Shares no buffer with what it is of, so that both can be donated.
copy = over_trees(jnp.copy)
# What is equal on all workers, marked as each worker's own.
varying = over_trees(lambda x: lax.pcast(x, AXIS, to="varying"))
# Inside of `shard_map`: a worker's part, without the axis of the workers; and back.
own, kept = over_trees(lambda x: x[0]), over_trees(lambda x: x[None])
# Centers and accumulators of half precision are held in float32; a copy, and not.
wide = over_trees(lambda x: jnp.array(x, jnp.float32, copy=True))
as_wide = over_trees(lambda x: x.astype(jnp.float32))
# The arrays in the dtypes of others.
rounded = over_trees(lambda x, like: x.astype(like.dtype))


def update(tx: Any, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    """One step as users of Optax write it: `(params, state)`."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def descend(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """One step of the inner optimizer."""
    return update(INNER, grads, state, params)


def where_due(due: Any, exchange: Callable, *operands: Tree) -> Any:
    """The exchange where it is due, else nothing; a conditional if a program asks."""
    if isinstance(due, bool):
        return exchange(*operands) if due else operands
    return lax.cond(due, exchange, lambda *operands: operands, *operands)


def reduced(params, own, inner, due, grads):
    """Gradients averaged in every step."""
    params, inner = descend(params, inner, lax.pmean(grads, AXIS))
    return params, own, inner


def summed(params, total, inner, due, grads):
    """The same through sums, in which the gradients of a step that waits would lie."""
    params, inner = descend(params, inner, lax.pmean(plus(total, grads), AXIS))
    return params, zeros(total), inner


def accumulated(params, total, inner, due, grads):
    """Gradients of several batches summed up for one update."""

    def exchange(params, total, inner):
        mean = jax.tree.map(lambda x: x / PERIOD, lax.pmean(total, AXIS))
        params, inner = descend(params, inner, mean)
        return params, zeros(total), inner

    return where_due(due, exchange, params, plus(total, grads), inner)


def meeting(exchange: Callable) -> Callable:
    """A step of the inner optimizer, then this where a round is due."""

    def step(params, inner, shared, due, grads):
        params, inner = descend(params, inner, grads)
        params, *shared = where_due(due, exchange, params, *shared)
        return params, inner, tuple(shared)

    return step


@meeting
def local_sgd(params, center):
    """The center moves by the mean of the workers' moves."""
    center = plus(center, lax.pmean(minus(as_wide(params), center), AXIS))
    return varying(rounded(center, params)), center


@meeting
def diloco(params, center, outer):
    """What the workers moved is an outer optimizer's gradient."""
    gradient = lax.pmean(minus(center, as_wide(params)), AXIS)
    center, outer = update(OUTER, gradient, outer, center)
    return varying(rounded(center, params)), center, outer


def agn(params, own, shared, due, grads):
    """The mean of accumulated gradients moves the center, which all workers take."""
    inner, total = own
    params, inner = descend(params, inner, grads)

    def exchange(params, total, center, outer):
        mean = lax.pmean(jax.tree.map(lambda x: x / PERIOD, total), AXIS)
        center, outer = descend(center, outer, mean)
        return varying(rounded(center, params)), zeros(total), center, outer

    total = plus(total, as_wide(grads))
    params, total, *shared = where_due(due, exchange, params, total, *shared)
    return params, (inner, total), tuple(shared)


def pulled(params, center, taken=None):
    """Workers and center pull each other, as in the paper."""
    x = as_wide(params)
    pull = jax.tree.map(lambda x, c: RATE * (x - c), x, center)
    moved = rounded(minus(x, pull), params), plus(center, lax.psum(pull, AXIS))
    return moved if taken is None else (*moved, center)


elastic = meeting(pulled)


def penalised(params, inner, shared, due, grads):
    """The same, with TensorFlow's penalty on the gradient in every step."""
    apart = minus(as_wide(params), shared[1])
    penalty = jax.tree.map(lambda g, d: g.astype(d.dtype) + RATE * d, grads, apart)
    return elastic(params, inner, shared, due, rounded(penalty, grads))


def sync_replicas(gradients: int) -> Callable[[int], Any]:
    """The library's, which waits for so many gradients of each worker."""
    return lambda workers: oxs.sync_replicas(INNER, AXIS, gradients * workers)


def with_sums(params: Tree) -> tuple[Tree, Tree]:
    """Sums of a worker's own, and the inner optimizer's state."""
    return zeros(params), INNER.init(params)


def inner_alone(params: Tree) -> tuple[Tree, Tree]:
    """Nothing of a worker's own, and the inner optimizer's state."""
    return (), INNER.init(params)


def with_center(*more: Callable) -> Callable[[Tree], tuple[Tree, Tree]]:
    """The inner optimizer's state, and the center with what else is made of it."""

    def start(params):
        return INNER.init(params), tuple(of(wide(params)) for of in (copy, *more))

    return start


def start_agn(params: Tree) -> tuple[Tree, Tree]:
    """A worker's accumulator too, and a second state of the inner optimizer."""
    mine, shared = with_center(INNER.init)(params)
    return (mine, zeros(wide(params))), shared


def wrapped(wrap: Callable, **more: Any) -> Callable[[int], Any]:
    """A center rule around the inner optimizer, for any number of workers."""
    return lambda workers: wrap(INNER, AXIS, communication_period=PERIOD, **more)


elastic_average = functools.partial(wrapped, oxs.elastic_average, moving_rate=RATE)
CASES = {
    "cross_shard": Case(
        lambda workers: oxs.cross_shard(INNER, AXIS), inner_alone, reduced, True, 1
    ),
    "sync_replicas": Case(sync_replicas(1), inner_alone, reduced, True, 1),
    "sync_replicas, with sums by hand": Case(
        sync_replicas(1), with_sums, summed, True, 1
    ),
    "sync_replicas, accumulating": Case(
        sync_replicas(PERIOD), with_sums, accumulated, True
    ),
    "local_sgd": Case(wrapped(oxs.local_sgd), with_center(), local_sgd),
    "diloco": Case(wrapped(oxs.diloco, outer=OUTER), with_center(OUTER.init), diloco),
    "agn": Case(wrapped(oxs.agn), start_agn, agn),
    "elastic_average": Case(elastic_average(rho=0.0), with_center(), elastic),
    "elastic_average, penalty": Case(
        elastic_average(rho=RATE), with_center(copy), penalised
    ),
}


class Memory(NamedTuple):
    """Bytes on one device that a compiled program needs while it runs."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take the place of donated arguments
    temporary: int


def memory(fn: Any, *args: Any, **kwargs: Any) -> Memory:
    """Compile `fn` as `audit.collectives` does, and ask XLA for the memory it needs."""
    found = hlo.compiled(fn, *args, **kwargs).memory_analysis()
    if found is None:
        raise TypeError(
            "this backend does not analyse the memory of its compiled programs. "
            "Compile for CPU, GPU or TPU."
        )
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporary=found.temp_size_in_bytes,
    )


def written(
    program: hlo.Program, branches: hlo.Branches = "every"
) -> list[hlo.Instruction]:
    """The instructions whose results stand in memory: those outside of fusions.

    In the order of the text. `branches` as in `hlo.reached`: with 0 what a quiet step
    writes, with 1 what a step with a round does.
    """
    names = hlo.reached(program, branches, fused=False)
    bodies = program.computations.items()
    return [
        instruction for name, body in bodies if name in names for instruction in body
    ]


def contents(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that one device hands to collectives, and bytes that it holds.

    "every step" is sent whatever happens, "round" in a branch of a conditional.
    """
    rows = oxs.audit.collectives(compiled)
    sent = {
        when: sum(row.bytes for row in rows if row.conditional == (when == "round"))
        for when in ("every step", "round")
    }
    return sent | memory(compiled)._asdict()


def mesh_of(workers: int, devices: Any = None) -> jax.sharding.Mesh:
    """The first devices, of these or of all, along the axis of the workers."""
    types, devices = (AxisType.Auto,), (devices or jax.devices())[:workers]
    return jax.make_mesh((workers,), (AXIS,), axis_types=types, devices=devices)


class Step(NamedTuple):
    """A step that can be lowered, compiled and run.

    Attributes:
        program: `(carry, batch) -> carry`, jitted; the carry is donated, and what is
            first in it are the parameters.
        carry: The shapes of it, with their shardings.
        start: From one worker's parameters, the carry itself.
    """

    program: Any
    carry: Tree
    start: Callable[[Tree], Tree]


def step_of(
    program: Callable, mesh: Any, start: Callable, specs: Tree, params: Tree
) -> Step:
    """A `Step` of a function that is mapped over the mesh already."""
    shapes = jax.eval_shape(start, params)
    specs = jax.tree.broadcast(specs, shapes, is_leaf=lambda x: isinstance(x, P))
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    carry = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        places,
    )
    program = jax.jit(program, donate_argnums=0, out_shardings=places)
    return Step(program, carry, lambda params: jax.device_put(start(params), places))


def on_mesh(
    step: Callable, workers: int, start: Callable, specs: Tree, params: Tree
) -> Step:
    """The same of a function of one worker, which gets its part of the batch."""
    mesh = mesh_of(workers)

    def local(carry, batch):
        return step(carry, own(batch))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=specs)
    return step_of(mapped, mesh, start, specs, params)


def whole_round(step: Callable, period: int) -> Callable:
    """A round as one program: steps that are known to be quiet, and one that meets."""

    def run(carry, batch):
        def quiet(carry, _):
            return step(carry, batch, False), None

        return step(lax.scan(quiet, carry, length=period - 1)[0], batch, True)

    return run


def by_hand(
    case: Case, params: Tree, workers: int, gradient: Callable, whole: bool = False
) -> Step:
    """The step written by hand; `gradient(params, batch)` is that of one worker.

    With `whole` it is a whole round, all steps with the same batch.
    """
    one = case.replicated

    def start(params):
        mine, shared = case.start(params)
        params = copy(params) if one else oxs.by_hand.replicate(params, workers)
        return (
            params,
            oxs.by_hand.replicate(mine, workers),
            shared,
            jnp.zeros((), jnp.int32),
        )

    def step(carry, batch, due=None):
        params, mine, shared, count = carry
        params = params if one else own(params)
        grads = gradient(varying(params) if one else params, batch)
        count = count + 1
        due = count % case.period == 0 if due is None else due
        params, mine, shared = case.step(params, own(mine), shared, due, grads)
        return params if one else kept(params), kept(mine), shared, count

    specs = (P() if one else P(AXIS), P(AXIS), P(), P())
    program = whole_round(step, case.period) if whole else step
    return on_mesh(program, workers, start, specs, params)


def with_library(
    case: Case,
    params: Tree,
    workers: int,
    gradient: Callable,
    whole: bool = False,
    apply: Callable = update,
) -> Step:
    """The library's optimizer under `shard_map`, by `update` or another step."""
    tx, one = case.tx(workers), case.replicated
    axes = oxs.by_hand.state_axes(tx, params, replicated=one)

    def start(params):
        state = oxs.by_hand.replicate(tx.init(params), workers, axes)
        return copy(params) if one else oxs.by_hand.replicate(params, workers), state

    def step(carry, batch, meet=None):
        params, state = carry
        params = oxs.localize(params, AXIS) if one else oxs.by_hand.first(params)
        grads = gradient(params, batch)
        params = carry[0] if one else params
        known = {} if meet is None else {"meet": meet}
        params, state = apply(
            tx, grads, oxs.by_hand.first(state, axes), params, **known
        )
        return params if one else kept(params), oxs.by_hand.replicate(state, 1, axes)

    specs = oxs.by_hand.state_specs(tx, params, P(), AXIS, replicated=one)
    program = whole_round(step, case.period) if whole else step
    return on_mesh(program, workers, start, (P() if one else P(AXIS), specs), params)


# The same by `apply_gradients`, which returns parameters.
direct = functools.partial(with_library, apply=oxs.apply_gradients)


def begun(tx: Any, params: Tree, workers: int) -> tuple[Tree, Tree]:
    """Parameters and state of all workers, on one device."""
    state = oxs.by_hand.replicate(
        tx.init(params), workers, oxs.by_hand.state_axes(tx, params)
    )
    return oxs.by_hand.replicate(params, workers), state


def under_vmap(tx: Any, params: Tree, workers: int, gradient: Callable) -> Step:
    """The same under `jax.vmap` over the mesh, as islands run it (not for replicas)."""
    axes = (0, oxs.by_hand.state_axes(tx, params))

    def start(params):
        return begun(tx, params, workers)

    def step(carry, batch):
        params, state = carry
        return update(tx, gradient(params, batch), state, params)

    mapped = jax.vmap(
        step, in_axes=(axes, 0), out_axes=axes, axis_name=AXIS, spmd_axis_name=AXIS
    )
    specs = (P(AXIS), oxs.by_hand.state_specs(tx, params, P(), AXIS))
    return step_of(mapped, mesh_of(workers), start, specs, params)
