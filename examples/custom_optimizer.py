# SPDX-License-Identifier: Apache-2.0
"""An optimizer of your own, from its formula for one array.

The rule is Lion (Chen et al., arXiv:2302.06675), ten lines. `from_rule` makes it an
Optax transformation over whole trees, with schedules, row-sparse gradients, float32
slots for half precision parameters, and refusals that name the leaf.

    python examples/custom_optimizer.py

It prints: step 200: loss 5.2e-07, rows of the table that moved: 3 of 1000
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optx_sync as oxs

STEPS = 200
ROWS = 1000
WIDTH = 4


class LionSlots(NamedTuple):
    """One field for each slot."""

    m: Any  # running average of gradients


def lion(learning_rate, b1=0.9, b2=0.99):
    """Lion: the sign of an average."""

    def step(grad, slots, param, at):
        b1, b2 = at.hyper
        direction = jnp.sign(b1 * slots.m + (1.0 - b1) * grad)
        m = b2 * slots.m + (1.0 - b2) * grad
        return -at.learning_rate * direction, LionSlots(m)

    rule = oxs.optimizers.LeafRule(
        step, LionSlots(m=0.0), rows="touched", hyper=(b1, b2)
    )
    return oxs.optimizers.from_rule(rule, learning_rate)


def main(steps=STEPS):
    """Fit the sum of three rows of a table, and a bias, to a target."""
    start = {"table": jnp.zeros([ROWS, WIDTH]), "bias": jnp.zeros(WIDTH)}
    target = jnp.linspace(-1.0, 1.0, WIDTH)
    ids = jnp.array([7, 42, 999])
    tx = lion(optax.linear_schedule(0.02, 0.0, steps))

    def loss(rows, bias):
        return jnp.mean((rows.sum(0) + bias - target) ** 2)

    @jax.jit
    def train_step(params, state):
        rows = params["table"][ids]
        value, (row_grads, bias_grad) = jax.value_and_grad(loss, (0, 1))(
            rows, params["bias"]
        )
        grads = {"table": oxs.IndexedSlices(ids, row_grads), "bias": bias_grad}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state, value = start, tx.init(start), jnp.inf
    for _ in range(steps):
        params, state, value = train_step(params, state)
    moved = int(jnp.any(params["table"] != 0, axis=1).sum())
    print(f"step {steps}: loss {value:.1e}, rows of the table that moved: ", end="")
    print(f"{moved} of {ROWS}")
    return float(value), moved


if __name__ == "__main__":
    main()
