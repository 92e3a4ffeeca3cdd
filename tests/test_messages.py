"""What every wrapper says to the first mistakes: short, and with the way out."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests import contexts

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
    params, axes = oxs.stack(PARAMS, N), oxs.state_axes(tx, PARAMS)
    state = oxs.stack(tx.init(PARAMS), N)
    run = jax.vmap(tx.update, (0, axes, 0), (0, axes), axis_name=AXIS)
    refuse(
        ValueError,
        r"counters .* shape \(4,\).* oxs.state_axes\(tx, params\).* oxs.map_workers",
        run,
        *(params, state, params),
    )


@keeping
@pytest.mark.parametrize("forgotten", ["all", "params", "state"])
def test_a_worker_axis_that_was_not_taken_off(tx, forgotten):
    axes = oxs.state_axes(tx, PARAMS)
    params = oxs.stack(PARAMS, N)
    state = oxs.stack(tx.init(PARAMS), N, axes)
    one = jax.tree.map(lambda _: P(), PARAMS)
    specs = oxs.state_specs(tx, PARAMS, one, AXIS)

    def local(params, state):
        if forgotten == "state":
            params = oxs.unstack(params)
        if forgotten == "params":
            state = oxs.unstack(state, axes)
        # The center has no worker axis that could be forgotten.
        updates, state = tx.update(params, state, params)
        return updates, oxs.stack(state, 1, axes)

    run = jax.shard_map(
        local,
        mesh=contexts.mesh(),
        in_specs=(P(AXIS), specs),
        out_specs=(P(AXIS), specs),
    )
    center = "center" in state._fields
    if center and forgotten == "state":
        return  # SGD and a center keep nothing of the worker's own
    if not center and forgotten == "all":
        return  # and all that `sync_replicas` keeps is the replica's
    message = r"parameter at \['b'\] has shape .*oxs.unstack\(params\).*map_workers"
    refuse(ValueError, message, run, params, state)


ROWS = oxs.IndexedSlices(jnp.array([2, 0]), jnp.ones((2, 2)))
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
    refuse(TypeError, message, run, jnp.arange(2))


def test_rows_in_the_simulations():
    grads = {"w": ROWS, "b": PARAMS["b"]}

    def grad_fn(worker, params, event):
        return grads

    for run in (
        lambda: oxs.simulate.asynchronous(
            optax.adam(0.1), oxs.local_sgd_rule(), PARAMS, grad_fn, [0], num_workers=1
        ),
        lambda: oxs.simulate.sync_replicas(
            optax.adam(0.1), PARAMS, grad_fn, jnp.array([0]), replicas_to_aggregate=1
        ),
    ):
        refuse(TypeError, r"at \['w'\] is row-sparse", run)


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
        refuse(ValueError, "There is no ", lambda: read(state, params), most=300)  # noqa: B023
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
