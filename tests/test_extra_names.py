"""Extra arguments that are called like a wrapper's, and that nobody reads."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs
from tests import contexts

AXIS, N, SGD = contexts.AXIS, 2, optax.sgd(0.1)
ONES = jnp.ones(N)


def masking():
    """A link that reads `mask`."""

    def update(updates, state, params=None, *, mask, **extra_args):
        return jax.tree.map(lambda u: u * mask, updates), state

    checked: Any = update
    return optax.GradientTransformationExtraArgs(lambda params: (), checked)


WRAPPERS: dict[str, Any] = {
    "cross_shard": lambda inner: oxs.cross_shard(inner, AXIS),
    "in pieces": lambda inner: oxs.cross_shard(inner, AXIS, shard_state=True),
    "sync_replicas": lambda inner: oxs.sync_replicas(inner, AXIS, N),
    "local_sgd": lambda inner: oxs.local_sgd(inner, AXIS),
    "overlap": lambda inner: oxs.diloco(inner, AXIS, overlap=True),
    "gossip": lambda inner: oxs.gossip(inner, AXIS),
}


def given(tx, **more):
    def update(grads, more):
        params = jnp.ones(3)
        return tx.update(grads, tx.init(params), params, **more)[0]

    return jax.vmap(update, axis_name=AXIS)(jnp.ones((N, 3)), more)


@pytest.mark.parametrize("who", WRAPPERS)
@pytest.mark.parametrize(
    "name", ["weigth", "weights", "mask", "contributes", "contribute", "batch_sizes"]
)
def test_a_name_that_nobody_reads_is_refused(who, name):
    tx = WRAPPERS[who](SGD)
    if (who, name) == ("sync_replicas", "contributes"):
        return
    with pytest.raises(ValueError, match=rf"given {name}=.*nothing. Did you mean"):
        given(tx, **{name: ONES})


@pytest.mark.parametrize("who", sorted({*WRAPPERS} - {"in pieces"}))
def test_what_somebody_reads_and_what_is_not_ours_passes(who):
    given(WRAPPERS[who](optax.chain(masking(), SGD)), mask=ONES)
    given(WRAPPERS[who](SGD), value=ONES, loss=ONES)


def test_what_is_for_others_passes_through():
    """A wrapper inside, and a link behind, read it."""
    inside = oxs.cross_shard(SGD, ("data",), measure=True)
    around = oxs.local_sgd(inside, "pods")
    behind = optax.chain(oxs.all_reduce_grads("data"), oxs.local_sgd(SGD, "pods"))
    for tx, more in ((around, {"batch_size": 3}), (behind, {"meet": True})):

        def update(grads, tx=tx, more=more):
            params = jnp.ones(3)
            return tx.update(grads, tx.init(params), params, **more)[0]

        both = jax.vmap(jax.vmap(update, axis_name="data"), axis_name="pods")
        assert both(jnp.ones((2, 2, 3))).shape == (2, 2, 3)
