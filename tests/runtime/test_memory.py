"""What a worker computes into memory that it has: nothing that a user may still read.

Nor does a step touch fresh memory, which costs more than its arithmetic.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.runtime import PushRefused, Server, Worker
from optx_sync.runtime.agreements.memory import SMALL_BYTES, Received, Sharing

# One array whose memory is used again, and two that are too small for that.
ROWS = SMALL_BYTES // 4
PARAMS = {"a": jnp.ones((2, ROWS)), "b": jnp.ones(3), "c": jnp.ones((4, 2))}
READS_ALL = oxs.CenterRule(
    lambda own, center, at: (
        0.1 * (own.params - center) + 0.1 * own.taken + 0.1 * own.accumulated
    ),
    take=lambda x, before, after, at: 0.5 * x + 0.25 * before + 0.25 * after,
    accumulate="gradients",
)
RULES = {
    "local_sgd": oxs.rules.local_sgd(),
    "elastic": oxs.rules.elastic(moving_rate=0.1, rho=0.0),
    "agn": oxs.rules.agn(optax.sgd(0.5), accumulate="gradients"),
    "reads all": READS_ALL,
}
# Fragments and the delay.
STREAMS: dict[str, Any] = {
    "whole": (None, 0),
    "leaves": (lambda path, leaf: int("a" in str(path[0])), 1),
    "rows": (2, 0),
    "late": (None, 1),
}


def bytes_of(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def train(rule, parts, delay, keeps):
    """(what worker and center hold at the end, rounds refused) of eleven steps."""
    settings: Any = {"num_workers": 1, "communication_period": 2, "fragments": parts}
    # Answers are views, which the next push overwrites.
    server = Server(PARAMS, rule, copy_replies=False, **settings)
    inner, numbers = optax.sgd(0.1, momentum=0.9), np.random.default_rng(0)
    worker = Worker(server, PARAMS, inner, rule, index=0, delay=delay, **settings)
    kept, refused = [], 0
    for step in range(11):
        grads = jax.tree.map(
            lambda p: jnp.asarray(numbers.normal(size=p.shape), p.dtype), PARAMS
        )
        if step == 4:
            grads["b"] = grads["b"].at[0].set(jnp.inf)
        if keeps:
            kept.append(((grads, worker.params), bytes_of((grads, worker.params))))
        try:
            worker.step(grads)
        except PushRefused:
            refused += 1
        if step == 7:
            worker.pull()
    for given, before in kept:
        assert bytes_of(given) == before
    return bytes_of((worker.params, server.center())), refused


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_and_parameters_of_before_stay_readable(rule, stream):
    """Whoever keeps them changes no number; a push is refused, and comes back."""
    end, refused = train(RULES[rule], *STREAMS[stream], keeps=True)
    assert refused and train(RULES[rule], *STREAMS[stream], keeps=False)[0] == end


def test_a_step_computes_into_the_memory_of_the_one_before():
    """One program steps and prepares the push, and one takes the answer."""
    rule = RULES["local_sgd"]
    settings: Any = {"num_workers": 1, "communication_period": 1}
    server = Server(PARAMS, rule, **settings)
    worker = Worker(server, PARAMS, optax.sgd(0.1), rule, index=0, **settings)
    own: Any = worker._own
    used, taken, grads = 0, set(), jax.tree.map(jnp.ones_like, PARAMS)
    for step in range(9):
        spare = jax.tree.leaves((own.spare, own.unseen))
        worker.step(grads)
        assert len(spare) == 6 * (step > 0)
        used += sum(x.is_deleted() for x in spare)
        taken.add(worker.params["a"].unsafe_buffer_pointer())
    # All 48, and two in turn, unless JAX lets go of something a little later.
    assert used > 24 and len(taken) <= 4
    assert [x._compiled._cache_size() for x in (own._go, own._take)] == [1, 1]


def test_a_result_that_is_there_already_is_no_copy():
    def function(fixed, passing, read, donated):
        total = passing["x"] + read
        return (total, donated), (passing, total, total * fixed, read)

    shares = Sharing(function)
    given, gone = {"x": jnp.ones(3), "y": jnp.zeros(2)}, jnp.ones(4)
    (total, own), (passed, again, double, read) = shares(2, given, np.ones(3), gone)
    assert again is total and all(passed[k] is given[k] for k in given)
    assert gone.is_deleted() and own.tolist() == [1, 1, 1, 1]
    assert (total.tolist(), double.tolist(), read.tolist()) == (
        [2, 2, 2], [4, 4, 4], [1, 1, 1],
    )  # fmt: skip


def test_memory_that_was_kept_for_long_is_let_go():
    received, like = Received(), {"a": jax.ShapeDtypeStruct((ROWS,), np.float32)}
    message = {"['a']": np.ones(ROWS, np.float32)}
    kept = [received.tree(message, like) for _ in range(5)]
    message["['a']"][:] = 2
    assert all(tree["a"][0] == 1 for tree in kept)
    view = np.asarray(kept[0]["a"])
    del kept
    jax.block_until_ready(jnp.ones(1) + 1)
    assert sum(map(len, received.free.values())) == 4  # the view holds one
    again = received.tree(message, like)
    assert view[0] == 1 and again["a"][0] == 2 and not any(received.free.values())
