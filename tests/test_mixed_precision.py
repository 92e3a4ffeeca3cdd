"""Gradients of another precision than the parameters: a state keeps its dtypes.

After Optax's `test_multi_steps_mixed_precision` (transforms/_accumulation_test.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optx_sync as oxs

AXIS, N, STEPS = "data", 2, 3
INNER = optax.adam(0.1)
# name: (dtype of the parameter, dtype of its gradient)
PAIRS = {
    "bfloat16": (jnp.bfloat16, jnp.float32),
    "float16": (jnp.float16, jnp.float32),
    "float32": (jnp.float32, jnp.bfloat16),
}


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def lockstep(tx, params, grads) -> Any:
    """Dtypes of the state before, (parameters, state) after some steps."""
    state = tx.init(params)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(*start):
        return jax.lax.scan(step, start, length=STEPS)[0]

    lanes = jax.vmap(run, (None, None), axis_name=AXIS, axis_size=N)
    params, state = lanes(params, state)
    return jax.tree.map(lambda x: x[0], params), state


def simulated(kind, params, grads) -> Any:
    events = jnp.zeros(2 * STEPS, jnp.int32).at[1::2].set(1)
    if kind == "sync_replicas":
        run = oxs.simulate.sync_replicas(
            INNER,
            params,
            lambda *_: grads,
            events,
            replicas_to_aggregate=N,
            num_tokens=0,
        )
        return run.final.params, run.final.inner
    run = oxs.simulate.asynchronous(
        INNER,
        oxs.rules.local_sgd(),
        params,
        lambda *_: grads,
        events,
        num_workers=N,
        communication_period=1,
    )
    return jax.tree.map(lambda p: p[-1], run.params), run.final.workers.inner


def test_a_state_keeps_its_dtypes():
    """Equal gradients of 1 move all parameters by the rate in every step."""
    params = {name: jnp.full(3, 2.0, dtype) for name, (dtype, _) in PAIRS.items()}
    grads = {name: jnp.ones(3, dtype) for name, (_, dtype) in PAIRS.items()}
    wrapped: dict[str, Any] = {
        "sync_replicas": oxs.sync_replicas(INNER, AXIS, N),
        "local_sgd": oxs.local_sgd(INNER, AXIS, communication_period=2),
    }

    @jax.jit
    def everything(params, grads):
        found = {name: lockstep(tx, params, grads) for name, tx in wrapped.items()}
        for kind in ("sync_replicas", "asynchronous"):
            found[f"simulated {kind}"] = simulated(kind, params, grads)
        return found

    with jax.numpy_dtype_promotion("standard"):  # As `optax.adam` asks.
        found = everything(params, grads)
        states = {name: tx.init(params) for name, tx in wrapped.items()}
        own = INNER.init(params)
    for name, (after, state) in found.items():
        assert dtypes(after) == dtypes(params), name
        assert dtypes(state) == dtypes(states.get(name, own)), name
        for leaf in jax.tree.leaves(after):
            moved = 2 - np.float32(leaf)
            np.testing.assert_allclose(moved, np.full(3, 0.1 * STEPS), atol=0.02)
