"""What every wrapper says to the first mistakes: short, and with the way out."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts
from tests.refusals import table

AXIS, N = contexts.AXIS, contexts.REPLICAS
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
SGD = optax.sgd(0.1)
KEEPING = {  # wrappers that keep arrays like the parameters
    "elastic_average": oxs.elastic_average(SGD, AXIS, rho=0.0),
    "agn": oxs.agn(SGD, AXIS),
    "local_sgd": oxs.local_sgd(SGD, AXIS),
    "diloco": oxs.diloco(SGD, AXIS),
    "sync_replicas": oxs.sync_replicas(SGD, AXIS, 2),
}
keeping = pytest.mark.parametrize("tx", KEEPING.values(), ids=KEEPING)


def refuse(error, message, fun, *args, most=700):
    """The call raises this, in a message that one can read to the end."""
    with pytest.raises(error, match=message) as raised:
        jax.eval_shape(fun, *args)
    # pytest shows the message alone; JAX may add a note of its own to the error.
    assert len(str(raised.value)) <= most, str(raised.value)


@keeping
def test_a_state_stacked_whole_where_its_counters_are_shared(tx):
    params, _, axes = contexts.begun(tx, PARAMS)
    state = by_hand.replicate(tx.init(PARAMS), N)
    run = jax.vmap(tx.update, (0, axes, 0), (0, axes), axis_name=AXIS)
    message = r"counters .* shape \(4,\).* oxs.by_hand.state_axes\(tx, params\).*"
    refuse(
        ValueError, message + r" oxs.by_hand.map_workers", run, params, state, params
    )


@keeping
@pytest.mark.parametrize("forgotten", ["all", "params", "state"])
def test_a_worker_axis_that_was_not_taken_off(tx, forgotten):
    # SGD and a center keep nothing of the worker's own, and all that `sync_replicas`
    # keeps is the replica's.
    if forgotten == ("state" if "center" in tx.init(PARAMS)._fields else "all"):
        return
    params, state, axes = contexts.begun(tx, PARAMS)
    one = jax.tree.map(lambda _: P(), PARAMS)
    specs = P(AXIS), by_hand.state_specs(tx, PARAMS, one, AXIS)

    def local(params, state):
        if forgotten == "state":
            params = by_hand.first(params)
        if forgotten == "params":
            state = by_hand.first(state, axes)
        # The center has no worker axis that could be forgotten.
        updates, state = tx.update(params, state, params)
        return updates, by_hand.replicate(state, 1, axes)

    run = jax.shard_map(local, mesh=contexts.mesh(), in_specs=specs, out_specs=specs)
    message = r"at \['b'\] has shape .*oxs.by_hand.first\(params\).*map_workers"
    refuse(ValueError, "parameter " + message, run, params, state)


ROWS = oxs.IndexedSlices(jnp.array([2, 0]), jnp.ones((2, 2)))
# JAX's own errors of an optimizer that takes arrays; ours is a note to them.
JAXS = (TypeError, ValueError, NotImplementedError)
TAKES_ARRAYS = {
    "structure": optax.adam(0.1),
    "arithmetic": SGD,
    "norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
}


@pytest.mark.parametrize("inner", TAKES_ARRAYS.values(), ids=TAKES_ARRAYS)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: oxs.local_sgd(inner, AXIS),
        lambda inner: oxs.sync_replicas(inner, AXIS, 2),
        lambda inner: oxs.cross_shard(inner, AXIS),
        lambda inner: inner,
    ],
    ids=["local_sgd", "sync_replicas", "cross_shard", "apply_gradients"],
)
def test_rows_for_an_optimizer_of_arrays(wrap, inner):
    tx = wrap(inner)
    grads = {"w": ROWS, "b": PARAMS["b"]}

    def step(_) -> Any:
        return oxs.apply_gradients(tx, grads, tx.init(PARAMS), PARAMS)

    message = r"at \['w'\] is row-sparse .* oxs.optimizers .* oxs.on_values.* to_dense"
    run = jax.vmap(step, axis_name=AXIS)
    refuse(JAXS, message, run, jnp.arange(2))


def test_rows_in_the_simulations():
    sim, adam, one = oxs.simulate, optax.adam(0.1), jnp.array([0])
    given = PARAMS, lambda worker, params, event: {"w": ROWS, "b": PARAMS["b"]}, one
    rule = oxs.rules.local_sgd()
    for run in (
        lambda: sim.asynchronous(adam, rule, *given, num_workers=1),
        lambda: sim.sync_replicas(adam, *given, replicas_to_aggregate=1),
    ):
        refuse(JAXS, r"at \['w'\] is row-sparse", run)


def test_a_wrong_type_elsewhere_is_not_said_to_be_the_rows():
    def broken(updates, state, params=None):
        raise TypeError("my own mistake")

    tx: Any = oxs.cross_shard(optax.GradientTransformation(SGD.init, broken), AXIS)
    step = jax.vmap(lambda _: tx.update({"w": ROWS}, None), axis_name=AXIS)
    refuse(TypeError, "^my own mistake", step, jnp.arange(2))


def test_large_trees_are_not_printed():
    params = {f"layer_{i}": jnp.zeros(3) for i in range(1000)}
    state = optax.adam(0.1).init(params)
    for read in (oxs.center_params, oxs.metrics, oxs.averaged_params):
        refuse(ValueError, "There (is|are) no ", lambda: read(state, params), most=300)  # noqa: B023
    tx = oxs.local_sgd(SGD, AXIS)
    grads = {**params, "other": jnp.zeros(3)}
    step = jax.vmap(lambda _: tx.update(grads, tx.init(params), params), axis_name=AXIS)
    refuse(ValueError, r"\['other'\] is missing", step, jnp.arange(2), most=300)
    catalogue = oxs.optimizers.adam(0.1)
    other = {"layers": list(params.values())}
    refuse(
        ValueError,
        "structure",
        lambda: catalogue.update(other, catalogue.init(params), other),
        most=300,
    )


@pytest.mark.parametrize(
    "tx",
    [
        *KEEPING.values(),
        oxs.cross_shard(optax.adam(0.1), AXIS),
        oxs.optimizers.adagrad(0.1),
    ],
    ids=[*KEEPING, "cross_shard", "adagrad"],
)
def test_a_module_is_no_tree_of_parameters(tx):
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    message = (
        r"got Linear, a Flax NNX module.*nnx.state\(module, nnx.Param\).*sync.flax"
    )
    for params in (module, {"encoder": [module]}):
        with pytest.raises(TypeError, match=message):
            tx.init(params)
    tx.init(nnx.state(module, nnx.Param))


AVERAGED = oxs.sync_replicas(SGD, AXIS, 2, variable_averages=0.9)


@pytest.mark.parametrize("first", [KEEPING["diloco"], AVERAGED], ids=["diloco", "ema"])
def test_what_stands_behind_a_center_is_seen_by_apply_gradients(first):
    tx = optax.chain(first, optax.scale(0.5))

    def step(_, tx=tx) -> Any:
        return oxs.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)

    run = jax.vmap(step, axis_name=AXIS)
    refuse(ValueError, "Link 0 of this chain of 2 .* stand last", run, jnp.arange(2))
    # These are right: last, for a part of the parameters only, without averages.
    part = optax.masked(KEEPING["local_sgd"], {"w": True, "b": False})
    for good in (
        optax.chain(optax.scale(0.5), first),
        optax.chain(part, optax.masked(first, {"w": False, "b": True})),
        optax.chain(KEEPING["sync_replicas"], optax.scale(0.5)),
    ):
        jax.eval_shape(
            jax.vmap(lambda _, good=good: step(_, good), axis_name=AXIS), jnp.arange(2)
        )


# The first mistakes with workers, each on a mesh and simulated.
DILOCO = oxs.diloco(optax.sgd(0.1, 0.9), AXIS, communication_period=4)
PARTS = oxs.diloco(optax.sgd(0.1, 0.9), AXIS, communication_period=4, fragments=2)
MODULE: Any = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
TRAIN_STATE = TrainState.create(apply_fn=jnp.tanh, params=PARAMS, tx=DILOCO)
LINEAR = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
IF_FINITE = optax.apply_if_finite(DILOCO, 3)
MULTI = optax.MultiSteps(DILOCO, 2).gradient_transformation()


def start(mesh, tx, params=PARAMS):
    return contexts.begun(tx, params, N, AXIS, mesh)


def run(mesh, tx, state=None, *, params=None, axes=None, out=None, steps=1):
    """Steps of all workers, with what is given in place of what is right."""
    good, own, right = start(None, tx)
    state = own if state is None else state
    params = good if params is None else params
    axes = right if axes is None else axes

    def step(params, state, grads):
        return oxs.apply_gradients(tx, grads, state, params)

    ways = {"in_axes": (0, axes, 0), "out_axes": (0, axes) if out is None else out}
    mapped = by_hand.map_workers(step, AXIS, mesh=mesh, **ways)
    for _ in range(steps):
        params, state = jax.eval_shape(mapped, params, state, good)


def made_by(mesh, tx, other):
    """A run of one transformation with the state of another."""
    _, state, axes = start(None, other)
    run(mesh, tx, state, axes=axes, out=(0, start(None, tx)[2]))


def of_all(tx):
    """The state of the parameters of all workers, stacked once more."""
    axes = by_hand.state_axes(tx, PARAMS)
    return by_hand.replicate(tx.init(by_hand.replicate(PARAMS, N)), N, axes)


def same(mesh, *args, in_axes: Any = 0):
    mapped = by_hand.map_workers(lambda *args: args, AXIS, mesh=mesh, in_axes=in_axes)
    return mapped(*args)


@pytest.mark.parametrize("mesh", [None, contexts.mesh()], ids=["simulated", "mesh"])
@table(r"""
start(mesh, MULTI)  # Error: MultiSteps stands around a center rule.* Put it inside of
start(mesh, IF_FINITE)
start(mesh, optax.chain(optax.clip(1.0), IF_FINITE))
    # Error: ApplyIfFinite stands around a center rule.* Put it inside of the rule
made_by(mesh, DILOCO, PARTS)  # Error: state.ages is an array; .* other arguments
made_by(mesh, PARTS, DILOCO)  # Error: state.ages is empty; .* other arguments
made_by(mesh, DILOCO, optax.adam(0.1))
made_by(mesh, KEEPING["sync_replicas"], optax.adam(0.1))
    # Error: not one of this transformation: state is a tuple of 2; .* other arguments
made_by(mesh, DILOCO, oxs.diloco(SGD, AXIS, communication_period=4))
    # Error: state.inner\[0\] is of type EmptyState; .* other arguments
made_by(mesh, optax.sgd(0.1, 0.9), optax.chain(SGD, SGD))
    # Error: state\[0\] is a tuple of 2; .* other arguments
run(mesh, DILOCO, params=PARAMS)
    # Error: stack\w* .*first.*: oxs.by_hand.replicate\(x, n\), a state with axes=
run(mesh, DILOCO, DILOCO.init(PARAMS))
    # Error: is a scalar.* oxs.by_hand.replicate\(x, n\), a state with axes=oxs
run(mesh, DILOCO, out=0, steps=2)
    # Error: counters .* shape \(4,\).* has returned them so.* `out_axes=\(0, axes\)`
run(mesh, DILOCO, of_all(DILOCO))
    # Error: in the state it has \(4, 2\): tx.init got the parameters of 4 workers
start(mesh, DILOCO, MODULE)
start(mesh, SGD, MODULE)
DILOCO.init(MODULE)
by_hand.replicate(MODULE, N)
by_hand.state_specs(SGD, MODULE, P(), AXIS)
    # Error: at .activation is no array; .*eqx.partition\(model.*eqx.filter.*combine
same(mesh, MODULE)
same(mesh, MODULE, jnp.ones(N), in_axes=(None, 0))
    # Error: at \[0\].activation is no array; .*eqx.partition\(model.*eqx.filter.*comb
start(mesh, DILOCO, TRAIN_STATE)
start(mesh, SGD, TRAIN_STATE)
    # Error: got a TrainState.* state.params; to start a whole .*oxs.Workers
oxs.gossip(SGD, AXIS, exchange=oxs.exchange.quantized())
    # Error: gossip: .*'exchange'.* without exchange=: partners send .* as they are
oxs.flax.swap_center(LINEAR)
    # Error: optimizer's state in a Linear.* oxs.flax.swap_center\(model, optimizer\)
""")
def test_mistakes_with_workers(call, said, mesh):
    names, message = globals() | {"mesh": mesh}, said.removeprefix("Error: ")
    refuse((TypeError, ValueError), message, lambda: eval(call, names))


def test_parameters_from_before_and_behind_localize():
    tx = oxs.cross_shard(SGD, AXIS)

    def step(params, state, inputs):
        params = oxs.localize(params, AXIS)
        grads = jax.grad(lambda params: jnp.sum(inputs @ params["w"]))(params)
        return oxs.apply_gradients(tx, grads, state, params)

    mapped = by_hand.map_workers(
        step, AXIS, mesh=contexts.mesh(), in_axes=(None, None, 0), out_axes=None
    )
    message = "went through oxs.localize stay .* those from before it"
    refuse(ValueError, message, mapped, PARAMS, tx.init(PARAMS), jnp.ones((N, 2, 3)))


def test_an_exchange_that_fails_is_no_inner_transformation():
    """JAX's words for it are those for a conditional inside of an optimizer."""

    def meet(*args, **kwargs):
        raise TypeError("manual axis types do not match, in an exchange")

    exchange = oxs.exchange.all_reduce()._replace(meet=meet)
    tx = oxs.cross_shard(SGD, AXIS, exchange=exchange)
    run = jax.vmap(
        lambda _: oxs.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)[0],
        axis_name=AXIS,
    )
    refuse(TypeError, "^manual axis types do not match, in", run, jnp.arange(2))
