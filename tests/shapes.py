"""Traces a step of every wrapper and exchange with the shapes in annotations checked.

Run as a program of its own by `tests/test_shapes.py`: jaxtyping's import hook rewrites
what is imported after it, which no other test should run with.
"""

import jax
import jaxtyping

import tests.typechecker  # noqa: F401 # the hook looks it up

with jaxtyping.install_import_hook("optx_sync", "tests.typechecker.check"):
    import optx_sync as oxs
    from optx_sync.exchange.robust import norms

import jax.numpy as jnp

from tests.transformations import AXIS, N, made

WRAPPERS = made(oxs.optimizers.adam(0.1)).values()
PARAMS = {
    "w": jnp.ones((5, 3)),
    "b": jnp.ones(3, jnp.bfloat16),
    "c": jnp.ones(4),
    "scalar": jnp.ones(()),
}


def traced(tx):
    """Trace the start and a step of one of the workers; nothing is compiled."""

    def step(params):
        return oxs.apply_gradients(tx, params, tx.init(params), params)

    jax.make_jaxpr(step, axis_env=[(AXIS, N)])(PARAMS)


def rows_traced():
    """Trace the catalogue with rows of a table for gradients."""
    rows = oxs.IndexedSlices(jnp.array([1, 4, 1]), jnp.ones((3, 2)))
    for optimizer in (
        oxs.optimizers.adam(0.1),
        oxs.optimizers.ftrl(0.1),
        oxs.optimizers.adagrad(0.1),
    ):
        table = {"table": jnp.ones((6, 2))}
        state = optimizer.init(table)
        jax.eval_shape(optimizer.update, {"table": rows}, state, table)
    jax.eval_shape(
        lambda table, ids: oxs.take(table, ids), jnp.ones((6, 2)), jnp.arange(3)
    )


def refuses():
    """Whether a false shape is noticed."""
    try:
        norms.number_of(jnp.ones((2, 2), bool))
    except jaxtyping.TypeCheckError:
        return True
    return False


if __name__ == "__main__":
    assert refuses()
    for tx in WRAPPERS:
        traced(tx)
    rows_traced()
    print(f"{len(WRAPPERS)} wrappers")
