"""Parts that meet one after the other, delayed: numbers, programs, refusals."""

import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import contexts
from tests.reference import center as reference

AXIS, STEPS = contexts.AXIS, 26
RNG = np.random.default_rng(3)
PARAMS = {
    "matrix": np.linspace(-2, 2, 12, dtype=np.float32).reshape(6, 2),
    "scalar": np.float32(0.5),
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
}
SIZE = 18
INNER, NUMPY_INNER = optax.sgd(0.05, momentum=0.9), reference.momentum(0.05, 0.9)
OUTERS = {
    "sgd": (optax.sgd(0.8), reference.momentum(0.8)),
    "nesterov": (
        optax.sgd(0.7, momentum=0.9, nesterov=True),
        reference.momentum(0.7, 0.9, nesterov=True),
    ),
}


def unequal(path, leaf):
    """Three parts: most rows of the matrix, what is in between, the vector and one."""
    name = path[-1].key
    return {"matrix": [0, 0, 1, 0, 0, 2], "scalar": 1, "vector": 2}[name]


# Which part each number belongs to; keys of the tree stand in alphabetical order.
OWNERS = {
    1: [0] * 18,
    3: [0] * 4 + [0, 0] + [1] * 6 + [2] * 6,
    4: [0] * 4 + [1] * 4 + [2] * 5 + [3] * 5,
    unequal: [0] * 4 + [1] * 2 + [0] * 4 + [2] * 2 + [1] + [2] * 5,
    oxs.strided(3): [0, 0, 1, 1, 2, 2] * 2 + [0] + [0, 1, 2, 0, 1],
}


def cases():
    """name: (transformation, arguments of the recurrence)."""
    delays = {1: (0, 1, 6), 3: (0, 1, 2), 4: (0, 1)}
    grid = [
        (fragments, delay, keep, "nesterov" if (delay + n) % 2 else "sgd")
        for fragments, number in ((1, 1), (3, 3), (4, 4), (unequal, 3))
        for delay in delays[number]
        for n, keep in enumerate((0.0, 0.25, 0.5, 1.0))
    ]
    found = {}
    for i, (fragments, delay, keep, outer) in enumerate(grid):
        period = 8 if fragments == 4 else 6
        tx = oxs.diloco(
            INNER,
            AXIS,
            outer=OUTERS[outer][0],
            communication_period=period,
            fragments=fragments,
            delay=delay,
            keep_local=keep,
        )
        found[f"diloco {i}."] = (
            tx,
            {
                "rule": "diloco",
                "outer": OUTERS[outer][1],
                "owner": OWNERS[fragments],
                "period": period,
                "delay": delay,
                "keep": keep,
            },
        )
    return found


CASES = cases()


def inputs(names):
    """These cases in one transformation, so that each context compiles once."""
    tx = optax.partition(
        {name: CASES[name][0] for name in names}, {name: name for name in names}
    )
    return tx, dict.fromkeys(names, PARAMS)


def gradients(workers):
    rng = np.random.default_rng(workers)
    return {
        name: rng.normal(size=(STEPS, workers, *np.shape(p))).astype(np.float32)
        for name, p in PARAMS.items()
    }


def flat(tree, ndim):
    """Trees of arrays [..., *shape] as [..., D]."""
    leaves = [np.asarray(tree[name]) for name in sorted(PARAMS)]
    return np.concatenate([x.reshape(*x.shape[:ndim], -1) for x in leaves], -1)


def check(context, names, workers):
    tx, params = inputs(names)
    grads = gradients(workers)
    history, state = contexts.replay(context, tx, params, dict.fromkeys(names, grads))
    for name in names:
        expected, centers = reference.in_fragments(
            x0=flat(PARAMS, 0),
            grads=flat(grads, 2),
            inner=NUMPY_INNER,
            **CASES[name][1],
        )
        contexts.assert_close({name: flat(history[name], 2)}, {name: expected})
        own = state.inner_states[name].inner_state
        if context not in contexts.AXES_CONTEXTS:
            own = oxs.unstack(own)
        center = flat(own.center[name], 0)
        contexts.assert_close({name: center[None]}, {name: centers[-1:]})


def test_numbers_are_those_of_the_recurrence():
    check("vmap_axes", list(CASES), 3)


EVERYWHERE = ["diloco 2.", "diloco 6.", "diloco 14.", "diloco 18.", "diloco 22."]


@pytest.mark.parametrize("context", contexts.CONTEXTS)
def test_one_answer_everywhere(context):
    check(context, EVERYWHERE, contexts.REPLICAS)
