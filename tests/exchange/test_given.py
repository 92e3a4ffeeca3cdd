"""What an exchange is given by each driver: a part's leaves as the parameters are.

Their own paths and shapes, and the center's dtypes, which are the parameters' or, of
half precision, float32. So what groups leaves by path, or has norms of them, does the
same under every driver.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.runtime import Server, Worker, quorum
from tests import contexts

PARAMS = {
    "layers": [{"kernel": jnp.ones((4, 3))}, {"kernel": jnp.ones(2)}],
    "norm": jnp.ones(6, jnp.bfloat16),
}
RULE, INNER = oxs.rules.diloco(optax.sgd(1.0)), optax.sgd(0.1)
FIRST, SECOND = "['layers'][0]['kernel']", "['layers'][1]['kernel']"
WHOLE = {FIRST: (4, 3), SECOND: (2,), "['norm']": (6,)}
PARTS = [{FIRST: (2, 3), "['norm']": (6,)}, {FIRST: (2, 3), SECOND: (2,)}]


def two_parts(path, leaf):
    """The rows of the first kernel in turn; then a leaf to each."""
    name = jax.tree_util.keystr(path)
    return np.arange(4) % 2 if name == FIRST else int(name == SECOND)


# What is passed as `fragments=`, and what each of the parts is.
CUTS = {"whole": (None, [WHOLE]), "parts": (two_parts, PARTS)}


def shapes_of(tree):
    """By path the shape and dtype of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (x.shape, str(x.dtype)) for path, x in leaves}


def recorder(seen):
    """A mean that notes what it is given, while it is traced."""
    mean = oxs.exchange.all_reduce()

    def meet(tree, state, axis_name, *, weight=None, also=None):
        seen.append(shapes_of(tree))
        return mean.meet(tree, state, axis_name, weight=weight, also=also)

    return oxs.exchange.Exchange(
        lambda tree: (), meet, linear=True, takes_weights=True, remembers=False
    )


def code_recorder(seen):
    """Arrays as they are, each noted."""

    def encode(array, state):
        seen.append((array.shape, str(array.dtype)))
        return array, jnp.zeros_like(array), state

    code = oxs.exchange.Code(encode, lambda message, like: message)
    return oxs.exchange.all_reduce()._replace(code=code)


def grads(worker, params, number):
    """Any gradients."""
    return jax.tree.map(jnp.ones_like, params)


def decoupled(fragments, **given: Any):
    oxs.simulate.decoupled(
        INNER, RULE, PARAMS, grads, [1.0, 1.0], until=9, communication_period=4,
        fragments=fragments, **given,
    )  # fmt: skip


def asynchronous(fragments, exchange):
    oxs.simulate.asynchronous(
        INNER, RULE, PARAMS, grads, [0, 1] * 9, num_workers=2, communication_period=4,
        fragments=fragments, exchange=exchange,
    )  # fmt: skip


def runtime(fragments, **given):
    settings: Any = {"num_workers": 2, "communication_period": 4, "delay": 1, **given}
    settings["fragments"] = fragments
    server = Server(PARAMS, RULE, **settings)
    workers = [
        Worker(server, PARAMS, INNER, RULE, index=index, **settings)
        for index in range(2)
    ]
    for worker in workers * 9:
        worker.step(grads(0, worker.params, 0))
    assert server.global_step >= 2


def lockstep(tx):
    """Trace a step of two workers, with all that its conditionals hold."""
    params, state, axes = contexts.begun(tx, PARAMS, 2)

    def step(params, state):
        return oxs.apply_gradients(tx, params, state, params)

    jax.eval_shape(jax.vmap(step, (0, axes), axis_name=contexts.AXIS), params, state)


def center(fragments, exchange, **options):
    lockstep(
        oxs.diloco(
            INNER, contexts.AXIS, communication_period=4, fragments=fragments,
            exchange=exchange, **options,
        )
    )  # fmt: skip


# By name, what trains with this exchange until each part has met.
MEETINGS = {
    "lockstep": center,
    "lockstep, overlap": functools.partial(center, overlap=True),
    "simulate.decoupled": lambda fragments, exchange: decoupled(
        fragments, meet=quorum(2, merge=exchange)
    ),
    "runtime": lambda fragments, exchange: runtime(
        fragments, meet=quorum(2, merge=exchange)
    ),
}
# The same where workers come one by one, and the exchange codes what each pushes.
PUSHES = {
    "simulate.decoupled": lambda fragments, exchange: decoupled(
        fragments, exchange=exchange
    ),
    "simulate.asynchronous": asynchronous,
    "runtime": lambda fragments, exchange: runtime(fragments, exchange=exchange),
    "runtime, answers": lambda fragments, exchange: runtime(
        fragments, pull_exchange=exchange
    ),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("driver", MEETINGS)
def test_a_meeting_is_given_a_part_with_its_own_paths_and_shapes(driver, cut):
    (fragments, parts), seen = CUTS[cut], []
    MEETINGS[driver](fragments, recorder(seen))
    wide = [{path: (x, "float32") for path, x in part.items()} for part in parts]
    assert all(given in wide for given in seen)
    assert all(part in seen for part in wide)


GRADIENTS = {
    "cross_shard": (oxs.cross_shard, "bfloat16"),
    # Sums of half precision gradients are wide.
    "sync_replicas": (
        functools.partial(oxs.sync_replicas, replicas_to_aggregate=2),
        "float32",
    ),
}


@pytest.mark.parametrize("wrapper", GRADIENTS)
def test_a_reduction_is_given_gradients_as_they_are(wrapper):
    (wrap, half), seen = GRADIENTS[wrapper], []
    lockstep(wrap(INNER, axis_name=contexts.AXIS, exchange=recorder(seen)))
    dtypes = {"['norm']": half}
    wanted = {name: (x, dtypes.get(name, "float32")) for name, x in WHOLE.items()}
    assert seen and all(given == wanted for given in seen)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("driver", PUSHES)
def test_a_code_is_given_each_array_of_a_part(driver, cut):
    (fragments, parts), seen = CUTS[cut], []
    PUSHES[driver](fragments, code_recorder(seen))
    assert set(seen) == {(x, "float32") for part in parts for x in part.values()}
