"""The law of refusals: nonsense for any argument works, or a message of ours says no.

It is of the functions, wrappers and exchanges that are public, and of all arguments but
trees, of which JAX knows what they may hold, and folders.
"""

import functools
import inspect
import itertools
import os
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs
from optx_sync import runtime

OURS = os.path.dirname(oxs.__file__)
NONSENSE = ("nonsense", -1, object())
LEFT_OUT = {
    *("tree", "params", "grads", "state", "values", "updates"),
    *("connection", "checkpoint_dir", "folder", "has_aux"),
}
AXIS, SGD, N = "workers", optax.sgd(0.1), 4
PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
TX = oxs.local_sgd(SGD, AXIS)
BEGUN = oxs.replicate((PARAMS, TX.init(PARAMS)), N)
MESH = jax.make_mesh((8,), (AXIS,))
ROW = oxs.audit.Collective("all-reduce", 10, 1, ((0, 1),), False)
RULE = oxs.local_sgd_rule()


def grad_of(worker, params, event):
    return params


def lanes(function, **given):
    run = jax.vmap(lambda x: function(x, **{"axis_name": AXIS} | given), axis_name=AXIS)
    return jax.eval_shape(run, jnp.ones(N))


def init(make, **given):
    """A transformation, and its state."""
    given = {"inner": SGD, "axis_name": AXIS} | given
    known = inspect.signature(make).parameters
    made = make(**{name: x for name, x in given.items() if name in known})
    return made.init(PARAMS)


def stepped(make, **given):
    """What a step asks of an exchange or an outer optimizer."""
    name = "exchange" if make in EXCHANGES else "outer"
    tx = oxs.diloco(SGD, AXIS, **{name: make(**given)})

    def step(own):
        grads = jax.tree.map(lambda x: x * own, PARAMS)
        return tx.update(grads, tx.init(PARAMS), PARAMS)[0]

    jax.eval_shape(jax.vmap(step, axis_name=AXIS), jnp.ones(N))


EXCHANGES = list(filter(inspect.isfunction, vars(oxs.exchange).values()))
CATALOGUE = [
    made
    for made in filter(inspect.isfunction, vars(oxs.optimizers).values())
    if next(iter(inspect.signature(made).parameters)) == "learning_rate"
]
SIMULATED = {"inner": SGD, "params": PARAMS, "grad_fn": grad_of, "workers": [0, 0]}
LINKS = {"gbits": 1.0, "step_seconds": 1.0}
# Arguments of a call that works, beside those that have defaults.
GIVEN: dict[Any, dict[str, Any]] = {
    oxs.sync_replicas: {"replicas_to_aggregate": 2},
    oxs.elastic_average: {"moving_rate": 0.1, "rho": 0.1},
    oxs.center_variable: {"rule": RULE},
    oxs.stacked: {"spec": jax.P("fsdp")},
    oxs.agn_rule: {"outer": SGD},
    oxs.elastic_rule: {"moving_rate": 0.1, "rho": 0.1},
    oxs.delayed_nesterov: {"learning_rate": 0.7},
    oxs.qsr: {"learning_rate": 0.1, "alpha": 0.2},
    oxs.strided: {"number": 2},
    oxs.next_batch_size: {"noise_scale": 16.0, "batch_size": 32},
    oxs.reduce: {},
    oxs.localize: {},
    oxs.Workers: {"n": N, "axis_name": AXIS},
    oxs.map_workers: {"fun": len, "axis_name": AXIS},
    oxs.state_axes: {"tx": TX, "params": PARAMS},
    oxs.state_specs: {
        **{"tx": TX, "params": PARAMS},
        **{"param_specs": jax.P(), "worker_axis": AXIS},
    },
    oxs.replicate: {"tree": PARAMS, "n": N},
    oxs.first: {"tree": BEGUN[0]},
    oxs.resize: {"tx": TX, "params": BEGUN[0], "state": BEGUN[1], "n": 3},
    oxs.due: {"tx": TX, "step": 3},
    oxs.slot: {"state": optax.adam(0.1).init(PARAMS), "name": "mu"},
    oxs.fingerprint: {"tree": PARAMS, "axis_name": None},
    oxs.take: {"table": jnp.ones((4, 2)), "ids": [1]},
    oxs.IndexedSlices: {"indices": [1], "values": jnp.ones((1, 2))},
    oxs.on_values: {"tx": SGD},
    oxs.value_and_grad: {"loss": jnp.sum},
    oxs.apply_gradients: {
        **{"tx": SGD, "state": SGD.init(PARAMS)},
        **{"grads": PARAMS, "params": PARAMS},
    },
    oxs.simulate.asynchronous: {**SIMULATED, "rule": RULE, "num_workers": 1},
    oxs.simulate.gossip: {**SIMULATED, "num_workers": 2},
    oxs.simulate.sync_replicas: {
        **SIMULATED,
        **{"replicas_to_aggregate": 1, "total_num_replicas": 1},
    },
    runtime.Server: {"params": PARAMS, "agreement": RULE, "num_workers": 1},
    runtime.SyncReplicas: {"replicas_to_aggregate": 1},
    oxs.graphs.grid: {"m": 2},
    oxs.graphs.metropolis: {"edges": [(0, 1)]},
    oxs.audit.time: {"rows": [ROW], **LINKS},
    oxs.audit.plan: {
        "strategies": {"a": oxs.audit.Strategy([ROW])},
        **{"gbits": [1.0], "step_seconds": 1.0},
    },
    oxs.audit.parse: {"text": ""},
    oxs.audit.table: {"rows": [ROW]},
    oxs.exchange.error_feedback: {"exchange": oxs.exchange.quantized()},
    oxs.exchange.trimmed_mean: {"f": 1},
    oxs.exchange.krum: {"f": 0},
    oxs.exchange.clipped: {"to": 1.0},
    oxs.optimizers.momentum: {"learning_rate": 0.1, "momentum": 0.9},
}


PUBLIC = [getattr(oxs, name) for name in oxs.__all__]
FUNCTIONS = {*GIVEN, *EXCHANGES, *CATALOGUE, *filter(inspect.isfunction, PUBLIC)}


def arguments(function):
    """The names of those that are tried."""
    parameters = inspect.signature(function).parameters.values()
    every = {one.name for one in parameters if one.kind != one.VAR_KEYWORD}
    return sorted(every - LEFT_OUT)


def call_of(function):
    """The call of one of them; of what makes another thing, with its use."""
    if function in (oxs.reduce, oxs.localize):
        return functools.partial(lanes, function)
    if function in (*EXCHANGES, oxs.delayed_nesterov):
        return functools.partial(stepped, function)
    if function in CATALOGUE:
        return functools.partial(init, functools.partial(function, learning_rate=0.1))
    if function.__module__.split(".")[1] in ("replicas", "center", "peers"):
        if {"inner", "axis_name"} & set(arguments(function)):
            return functools.partial(init, function)
    return function


@pytest.mark.parametrize(
    "function",
    sorted(filter(arguments, FUNCTIONS), key=lambda function: function.__name__),
    ids=lambda function: function.__name__,
)
def test_nonsense_works_or_is_refused(function):
    call, given = call_of(function), GIVEN.get(function, {})
    call(**given)
    for name, nonsense in itertools.product(arguments(function), NONSENSE):
        case = f"{name}={nonsense!r}"
        try:
            call(**given | {name: nonsense})
        except (TypeError, ValueError) as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            assert place.filename.startswith(OURS), (case, error)
            assert str(place.line).startswith("raise"), (case, error)
            assert len(str(error)) > 20, case
