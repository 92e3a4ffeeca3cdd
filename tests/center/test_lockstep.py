"""Every center rule gives the NumPy recurrence's numbers, in every context."""

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

# name: (transformation, arguments of the recurrence)
CASES = {
    "elastic": (
        oxs.elastic_average(
            INNER, AXIS, num_workers=WORKERS, rho=0.0, communication_period=3
        ),
        {"rule": "elastic", "period": lambda t: 3, "rate": 0.9 / 3 / WORKERS},
    ),
    "elastic_rho": (
        oxs.elastic_average(INNER, AXIS, learning_rate=0.05, communication_period=3),
        {
            "rule": "elastic",
            "period": lambda t: 3,
            "rate": 0.9 / 3 / WORKERS,
            "rho": 0.9 / 3 / WORKERS / 0.05,
        },
    ),
    "elastic_schedule": (
        oxs.elastic_average(
            INNER, AXIS, moving_rate=0.2, rho=0.3, communication_period=warm_up
        ),
        {"rule": "elastic", "period": warm_up, "rate": 0.2, "rho": 0.3},
    ),
    "agn": (
        oxs.agn(INNER, AXIS, communication_period=3),
        {"rule": "agn", "period": lambda t: 3, "outer": NUMPY_INNER},
    ),
    "agn_sum": (
        oxs.agn(
            INNER,
            AXIS,
            outer=optax.sgd(0.02),
            reduction="sum",
            communication_period=warm_up,
        ),
        {
            "rule": "agn",
            "period": warm_up,
            "outer": reference.momentum(0.02),
            "mean": False,
        },
    ),
    "agn_updates": (
        oxs.agn(INNER, AXIS, accumulate="updates", communication_period=4),
        {"rule": "agn_updates", "period": lambda t: 4},
    ),
    "local_sgd": (
        oxs.local_sgd(INNER, AXIS, communication_period=3),
        {"rule": "local_sgd", "period": lambda t: 3},
    ),
    "post_local_sgd": (
        oxs.local_sgd(INNER, AXIS, communication_period=warm_up),
        {"rule": "local_sgd", "period": warm_up},
    ),
    "diloco": (
        oxs.diloco(INNER, AXIS, communication_period=3),
        {"rule": "diloco", "period": lambda t: 3, "outer": NUMPY_OUTER},
    ),
}


# Where powers of two are the only factors, contracted and separate products round
# alike, so half precision numbers can be asked for bit by bit.
HALF_PARAMS = {
    "bfloat16": np.linspace(-2, 2, 17).astype(jnp.bfloat16),
    "float16": np.linspace(-1, 1, 9).astype(np.float16),
    "float32": np.linspace(-1, 1, 4, dtype=np.float32).reshape(2, 2),
}
HALF_INNER = oxs.optimizers.momentum(0.0625, 0.5)
HALF_NUMPY_INNER = reference.momentum(0.0625, 0.5)
HALF_CASES = {
    "elastic": (
        oxs.elastic_average(
            HALF_INNER, AXIS, moving_rate=0.25, rho=0.5, communication_period=warm_up
        ),
        {"rule": "elastic", "period": warm_up, "rate": 0.25, "rho": 0.5},
    ),
    "agn": (
        oxs.agn(
            HALF_INNER,
            AXIS,
            outer=oxs.optimizers.momentum(0.5, 0.5),
            communication_period=4,
        ),
        {
            "rule": "agn",
            "period": lambda t: 4,
            "outer": reference.momentum(0.5, 0.5),
        },
    ),
    "local_sgd": (
        oxs.local_sgd(HALF_INNER, AXIS, communication_period=3),
        {"rule": "local_sgd", "period": lambda t: 3},
    ),
    "diloco": (
        oxs.diloco(
            HALF_INNER,
            AXIS,
            outer=optax.sgd(0.5, momentum=0.5, nesterov=True),
            communication_period=3,
        ),
        {
            "rule": "diloco",
            "period": lambda t: 3,
            "outer": reference.momentum(0.5, 0.5, nesterov=True),
        },
    ),
}

# Worker 2 breaks in the middle of a period, all of them in one of the next, worker 0 in
# the step of a round.
BROKEN = np.zeros((STEPS, WORKERS), bool)
BROKEN[4, 2] = BROKEN[13] = BROKEN[17, 0] = True
DROPPED = [2, 1, 2, 1]


def breaks(grads):
    """The gradients with a NaN in one leaf of the broken workers."""
    matrix = grads["matrix"].copy()
    matrix[BROKEN, 1, 1] = np.nan
    matrix[17, 0, 1, 1] = -np.inf
    return {**grads, "matrix": matrix}


EVERY_THIRD = {"inner": INNER, "axis_name": AXIS, "communication_period": 3}
# name: (transformation, arguments of the recurrence, what becomes of the gradients)
VARIANTS = {
    "agn_average": (
        oxs.agn(**EVERY_THIRD, inner_state="average"),
        {"rule": "agn", "outer": NUMPY_INNER, "inner_state": "average"},
    ),
    "diloco_reset": (
        oxs.diloco(**EVERY_THIRD, inner_state="reset"),
        {"rule": "diloco", "outer": NUMPY_OUTER, "inner_state": "reset"},
    ),
    "elastic_drop": (
        oxs.elastic_average(
            **EVERY_THIRD, moving_rate=0.2, rho=0.3, drop_nonfinite=True
        ),
        {"rule": "elastic", "rate": 0.2, "rho": 0.3, "broken": BROKEN},
    ),
    "agn_drop": (
        oxs.agn(**EVERY_THIRD, drop_nonfinite=True),
        {"rule": "agn", "outer": NUMPY_INNER, "broken": BROKEN},
    ),
    "agn_updates_sum_drop": (
        oxs.agn(
            **EVERY_THIRD, accumulate="updates", reduction="sum", drop_nonfinite=True
        ),
        {"rule": "agn_updates", "mean": False, "broken": BROKEN},
    ),
    "local_sgd_drop_average": (
        oxs.local_sgd(**EVERY_THIRD, drop_nonfinite=True, inner_state="average"),
        {"rule": "local_sgd", "inner_state": "average", "broken": BROKEN},
    ),
    # Without a momentum nothing but the flag remembers who is broken.
    "local_sgd_plain_drop": (
        oxs.local_sgd(**EVERY_THIRD | {"inner": optax.sgd(0.05)}, drop_nonfinite=True),
        {"rule": "local_sgd", "inner": reference.momentum(0.05), "broken": BROKEN},
    ),
    "diloco_drop": (
        oxs.diloco(**EVERY_THIRD, drop_nonfinite=True),
        {"rule": "diloco", "outer": NUMPY_OUTER, "broken": BROKEN},
    ),
}

# Weights that differ, some 0, and a round in which all are.
WEIGHTS = np.random.default_rng(4).integers(0, 4, (STEPS, WORKERS)).astype(np.float32)
WEIGHTS[8] = 0.0
# As in VARIANTS, with `weight` an argument of every step.
WEIGHED = {
    "elastic_weighed": (
        oxs.elastic_average(**EVERY_THIRD, moving_rate=0.2, rho=0.3),
        {"rule": "elastic", "rate": 0.2, "rho": 0.3},
    ),
    "agn_sum_weighed": (
        oxs.agn(**EVERY_THIRD, reduction="sum", outer=optax.sgd(0.02)),
        {"rule": "agn", "outer": reference.momentum(0.02), "mean": False},
    ),
    "local_sgd_weighed": (
        oxs.local_sgd(**EVERY_THIRD, inner_state="average"),
        {"rule": "local_sgd", "inner_state": "average"},
    ),
    "diloco_weighed_drop": (
        oxs.diloco(**EVERY_THIRD, drop_nonfinite=True, measure=True),
        {"rule": "diloco", "outer": NUMPY_OUTER, "broken": BROKEN},
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
        return tx, leaves, grads, grads, {"inner": NUMPY_INNER, **arguments}
    if name in VARIANTS or name in WEIGHED:
        tx, arguments = (VARIANTS | WEIGHED)[name]
        leaves = {leaf: PARAMS[leaf] for leaf in ("matrix", "scalar")}
        grads = gradients(leaves)
        replayed = breaks(grads) if "broken" in arguments else grads
        arguments = {"inner": NUMPY_INNER, "period": lambda t: 3, **arguments}
        if name in WEIGHED:
            arguments["weights"] = WEIGHTS
        return tx, leaves, grads, replayed, arguments
    tx, arguments = HALF_CASES[name.removesuffix("_half")]
    grads = coarse_gradients()
    return tx, HALF_PARAMS, grads, grads, {"inner": HALF_NUMPY_INNER, **arguments}


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
