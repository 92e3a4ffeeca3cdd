"""Every center rule gives the NumPy recurrence's numbers, in every context."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.reference import center as reference

AXIS, WORKERS, STEPS = contexts.AXIS, contexts.REPLICAS, 25
PARAMS = {
    "scalar": np.float32(0.5),
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
    "matrix": np.linspace(-2, 2, 12, dtype=np.float32).reshape(6, 2),
    "empty": np.zeros((0, 3), np.float32),
}


def warm_up(step):
    """Every step at first, then every fourth."""
    return jnp.where(jnp.asarray(step) < 5, 1, 4)


INNER = optax.sgd(0.05, momentum=0.9)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
NUMPY_INNER = reference.momentum(0.05, 0.9)
NUMPY_OUTER = reference.momentum(0.7, 0.9, nesterov=True)

SUM = {"reduction": "sum"}
PULL, DROP = {"moving_rate": 0.2, "rho": 0.3}, {"drop_nonfinite": True}


def pair(rule, period, options, arguments, inner=(INNER, NUMPY_INNER)):
    """(transformation, arguments of the recurrence) of a rule and its own options."""
    make: Any = oxs.elastic_average if rule == "elastic" else getattr(oxs, rule)
    if options.get("accumulate") == "updates":
        rule = "agn_updates"
    tx = make(inner[0], AXIS, communication_period=period, **options)
    every = period if callable(period) else lambda t: period
    return tx, {"rule": rule, "period": every, "inner": inner[1], **arguments}


# What the recurrence takes that has another name there.
ELASTIC, OF_INNER = {"rate": 0.2, "rho": 0.3}, {"outer": NUMPY_INNER}
DILOCO, UPDATES = {"outer": NUMPY_OUTER}, {"accumulate": "updates"}
SLOWLY = SUM | {"outer": optax.sgd(0.02)}
SLOW_SUM: Any = {"outer": reference.momentum(0.02), "mean": False}
RATE = 0.9 / 3 / WORKERS
CASES = {
    "elastic": pair(
        *("elastic", 3, {"num_workers": WORKERS, "rho": 0.0}, {"rate": RATE})
    ),
    "elastic_rho": pair(
        *("elastic", 3, {"learning_rate": 0.05}, {"rate": RATE, "rho": RATE / 0.05})
    ),
    "elastic_schedule": pair("elastic", warm_up, PULL, ELASTIC),
    "agn": pair("agn", 3, {}, OF_INNER),
    "agn_sum": pair("agn", warm_up, SLOWLY, SLOW_SUM),
    "agn_updates": pair("agn", 4, UPDATES, {}),
    "local_sgd": pair("local_sgd", 3, {}, {}),
    "post_local_sgd": pair("local_sgd", warm_up, {}, {}),
    "diloco": pair("diloco", 3, {}, DILOCO),
}


# Where powers of two are the only factors, contracted and separate products round
# alike, so half precision numbers can be asked for bit by bit.
HALF_PARAMS = {
    "bfloat16": np.linspace(-2, 2, 17).astype(jnp.bfloat16),
    "float16": np.linspace(-1, 1, 9).astype(np.float16),
    "float32": np.linspace(-1, 1, 4, dtype=np.float32).reshape(2, 2),
}
HALF = oxs.optimizers.momentum(0.0625, 0.5), reference.momentum(0.0625, 0.5)
HALF_PULL, HALF_RATE = {"moving_rate": 0.25, "rho": 0.5}, {"rate": 0.25, "rho": 0.5}
OUTER_AGN = {"outer": oxs.optimizers.momentum(0.5, 0.5)}
OUTER_DILOCO = {"outer": optax.sgd(0.5, momentum=0.5, nesterov=True)}
OF_DILOCO = {"outer": reference.momentum(0.5, 0.5, nesterov=True)}
HALF_CASES = {
    "elastic": pair("elastic", warm_up, HALF_PULL, HALF_RATE, HALF),
    "agn": pair("agn", 4, OUTER_AGN, {"outer": reference.momentum(0.5, 0.5)}, HALF),
    "local_sgd": pair("local_sgd", 3, {}, {}, HALF),
    "diloco": pair("diloco", 3, OUTER_DILOCO, OF_DILOCO, HALF),
}

# Worker 2 breaks in the middle of a period, all of them in one of the next, worker 0 in
# the step of a round.
BROKEN = np.zeros((STEPS, WORKERS), bool)
BROKEN[4, 2] = BROKEN[13] = BROKEN[17, 0] = True
DROPPED = [2, 1, 2, 1]
BREAKS, AVERAGE = {"broken": BROKEN}, {"inner_state": "average"}
RESET = {"inner_state": "reset"}


def breaks(grads):
    """The gradients with a NaN in one leaf of the broken workers."""
    matrix = grads["matrix"].copy()
    matrix[BROKEN, 1, 1] = np.nan
    matrix[17, 0, 1, 1] = -np.inf
    return {**grads, "matrix": matrix}


# With `broken` in the arguments the gradients are broken, too.
VARIANTS = {
    "agn_average": pair("agn", 3, AVERAGE, OF_INNER | AVERAGE),
    "diloco_reset": pair("diloco", 3, RESET, DILOCO | RESET),
    "elastic_drop": pair("elastic", 3, PULL | DROP, ELASTIC | BREAKS),
    "agn_drop": pair("agn", 3, DROP, OF_INNER | BREAKS),
    "agn_updates_sum_drop": pair(
        *("agn", 3, UPDATES | SUM | DROP, BREAKS | {"mean": False})
    ),
    "local_sgd_drop_average": pair("local_sgd", 3, DROP | AVERAGE, AVERAGE | BREAKS),
    # Without a momentum nothing but the flag remembers who is broken.
    "local_sgd_plain_drop": pair(
        *("local_sgd", 3, DROP, BREAKS, (optax.sgd(0.05), reference.momentum(0.05)))
    ),
    "diloco_drop": pair("diloco", 3, DROP, DILOCO | BREAKS),
}

# Weights that differ, some 0, and a round in which all are.
WEIGHTS = np.random.default_rng(4).integers(0, 4, (STEPS, WORKERS)).astype(np.float32)
WEIGHTS[8] = 0.0
# As in VARIANTS, with `weight` an argument of every step.
WEIGHED = {
    "elastic_weighed": pair("elastic", 3, PULL, ELASTIC),
    "agn_sum_weighed": pair("agn", 3, SLOWLY, SLOW_SUM),
    "local_sgd_weighed": pair("local_sgd", 3, AVERAGE, AVERAGE),
    "diloco_weighed_drop": pair(
        *("diloco", 3, DROP | {"measure": True}, DILOCO | BREAKS)
    ),
}


# Every mechanism once, in each context: means and sums, constant and scheduled periods,
# an outer optimizer, what is accumulated, half precision, broken workers.
EVERYWHERE = (
    "elastic_schedule",
    "agn_sum",
    "agn_updates",
    "diloco",
    "elastic_half",
    "local_sgd_half",
    "local_sgd_drop_average",
)
NAMES = (*CASES, *(f"{name}_half" for name in HALF_CASES), *VARIANTS)


def case(name):
    """(transformation, parameters, gradients, replayed, arguments of the recurrence).

    `replayed` gradients are those of the recurrence, or these with something broken.
    """
    if name in CASES:
        tx, arguments = CASES[name]
        # All forms of leaves in one case; the others share the rest of the rule's code.
        leaves = PARAMS if name == "diloco" else {"matrix": PARAMS["matrix"]}
        grads = gradients(leaves)
        return tx, leaves, grads, grads, arguments
    if name in VARIANTS or name in WEIGHED:
        tx, arguments = (VARIANTS | WEIGHED)[name]
        leaves = {leaf: PARAMS[leaf] for leaf in ("matrix", "scalar")}
        grads = gradients(leaves)
        replayed = breaks(grads) if "broken" in arguments else grads
        if name in WEIGHED:
            arguments = arguments | {"weights": WEIGHTS}
        return tx, leaves, grads, replayed, arguments
    tx, arguments = HALF_CASES[name.removesuffix("_half")]
    grads = coarse_gradients()
    return tx, HALF_PARAMS, grads, grads, arguments


def inputs(names):
    """These cases in one transformation, so that each context compiles once."""
    cases = {name: case(name) for name in names}
    tx = optax.partition(
        {name: one[0] for name, one in cases.items()}, {name: name for name in names}
    )
    params = {name: one[1] for name, one in cases.items()}
    return tx, params, {name: one[3] for name, one in cases.items()}


def gradients(params=PARAMS, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(STEPS, WORKERS, *np.shape(p))).astype(np.float32)
        for name, p in params.items()
    }


def coarse_gradients():
    """Multiples of a quarter, in the dtypes of `HALF_PARAMS`."""
    return jax.tree.map(
        lambda p, g: (np.round(4 * g) / 4).astype(p.dtype),
        HALF_PARAMS,
        gradients(HALF_PARAMS),
    )


def expected(name):
    """Trees of workers' parameters [T, N, ...] and of centers [T, ...]."""
    _, params, grads, _, arguments = case(name)
    pairs = {
        leaf: reference.lockstep(x0=p, grads=grads[leaf], **arguments)
        for leaf, p in params.items()
    }
    return [{leaf: pair[part] for leaf, pair in pairs.items()} for part in (0, 1)]


def check(context, names, extra=None):
    history, state = contexts.replay(context, *inputs(names), extra)
    for name in names:
        own = state.inner_states[name].inner_state
        workers, centers = expected(name)
        contexts.assert_close(history[name], workers)
        center = own.center
        if context not in contexts.AXES_CONTEXTS:
            center = oxs.by_hand.first(center)
        contexts.assert_close(
            jax.tree.map(lambda c: np.asarray(c)[None], center[name]),
            jax.tree.map(lambda c: c[-1:], centers),
        )
        for half in {"bfloat16", "float16"} & workers.keys():
            np.testing.assert_array_equal(history[name][half], workers[half])
        broken = "broken" in (VARIANTS | WEIGHED).get(name, (None, ()))[1]
        dropped = DROPPED if broken else [0] * WORKERS
        np.testing.assert_array_equal(oxs.metrics(own).dropped, dropped)


# (JAX makes of `pmap` an unchecked `shard_map`.)
@pytest.mark.parametrize("context", ("shard_map", *contexts.DISTINCT))
def test_one_answer_everywhere(context):
    check(context, EVERYWHERE)


def test_the_other_cases_in_one_context():
    check("vmap_axes", [name for name in NAMES if name not in EVERYWHERE])


@pytest.mark.parametrize("context", contexts.DISTINCT)
def test_contributions_are_weighed(context):
    check(context, WEIGHED, {"weight": WEIGHTS})


def test_equal_weights_change_no_bit_and_a_weight_of_0_leaves_no_trace():
    names = ["elastic", "agn", "local_sgd", "diloco"]
    tx, params, grads = inputs(names)
    plain, _ = contexts.replay("vmap_axes", tx, params, grads)
    for weight in (np.float32(1), np.int32(512), np.bool_(True)):
        extra = {"weight": np.full((STEPS, WORKERS), weight)}
        weighed, _ = contexts.replay("vmap_axes", tx, params, grads, extra)
        jax.tree.map(np.testing.assert_array_equal, weighed, plain)
    tx, params, grads = inputs(names[1:])
    extra = {"weight": np.full((STEPS, WORKERS), 2.0, np.float32)}
    extra["weight"][:, 3] = 0.0
    others = jax.tree.map(lambda g: g[:, :3], grads)
    expected, _ = contexts.replay("vmap_axes", tx, params, others)
    grads = jax.tree.map(np.copy, grads)
    grads["local_sgd"]["matrix"][:, 3] = np.nan
    without, _ = contexts.replay("vmap_axes", tx, params, grads, extra)
    for name in names[1:]:
        first = jax.tree.map(lambda x: x[:, :3], without[name])
        contexts.assert_close(first, expected[name])


def process_cases():
    """For `tests/two_processes.py`."""
    return {"center": (*inputs(EVERYWHERE), {})}
