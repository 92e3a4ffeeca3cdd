# SPDX-License-Identifier: Apache-2.0
"""A rule of your own for how workers meet: copy this file and change ten lines.

The rule here: the center is the mean of the workers, and each worker goes only part of
the way to it. `center_variable` makes it an Optax transformation that communicates when
it is due, in a conditional. Here eight workers, each with data of its own, are
simulated on one device; `mesh=True` of `Workers` changes that.

    python examples/custom_center_rule.py

It prints: after 20 rounds: loss of the center 0.0902, of the worst worker 0.1033
"""

import jax
import jax.numpy as jnp
import optax

import optx_sync as oxs

WORKERS, ROUNDS, PERIOD = 8, 20, 10
SAMPLES, WIDTH, NOISE = 24, 16, 0.3  # data of one worker


def part_way(pull):
    """x: the worker's parameters, s: the center it took, c: the center; one array."""
    return oxs.CenterRule(
        # What a worker brings; its mean over the workers is added to the center.
        contribute=lambda own, center, at: own.params - center,
        mean_over="workers",
        # What the worker goes on with, from the center before and after the round.
        take=lambda x, before, after, at: x + pull * (after - x),
        # The arrays that the two formulas read; the others need not be kept.
        reads=("params", "center", "after"),
    )


def main(rounds=ROUNDS, pull=0.5):
    """Least squares; returns the losses of the center and of the worst worker."""
    keys = jax.random.split(jax.random.key(0), 3)
    truth = jax.random.normal(keys[0], (WIDTH,))
    # The data of all: the step hands each worker a part of its own.
    inputs = jax.random.normal(keys[1], (WORKERS * SAMPLES, WIDTH))
    noise = NOISE * jax.random.normal(keys[2], (WORKERS * SAMPLES,))
    targets = inputs @ truth + noise

    def loss(params, inputs, targets):
        return jnp.mean((inputs @ params - targets) ** 2)

    tx = oxs.center_variable(
        optax.sgd(0.05), part_way(pull), "workers", communication_period=PERIOD
    )

    workers = oxs.Workers(WORKERS, "workers")

    @workers.step(state=2)
    def train(params, state, inputs, targets):
        grads = jax.grad(loss)(params, inputs, targets)
        return oxs.apply_gradients(tx, grads, state, params)

    start = jnp.zeros(WIDTH)
    params, state = workers.start((start, tx.init(start)))
    for _ in range(rounds * PERIOD):
        params, state = train(params, state, inputs, targets)

    of_center = loss(workers.center((params, state)), inputs, targets)
    of_worst = max(loss(x, inputs, targets) for x in params)
    print(f"after {oxs.metrics(state).rounds} rounds: ", end="")
    print(f"loss of the center {of_center:.4f}, of the worst worker {of_worst:.4f}")
    return float(of_center), float(of_worst)


if __name__ == "__main__":
    main()
