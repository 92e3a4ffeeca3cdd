"""The host's time for a step of `Workers`, beside the same program jitted by hand.

    python benchmarks/bench_workers.py            # a minute on two cores
    python benchmarks/bench_workers.py --quick    # few layers, a few seconds

Layers so small that a device has nothing to do: what is left is what Python and JAX
make of hundreds of arrays between one step and the next.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from flax import nnx
from report import Report, ratio, spread
from training import loss_of

import optx_sync as oxs

report.on_cpu(4)

AXIS, WIDTH = "workers", 8
options = report.arguments(__doc__).parse_args()
LAYERS, REPEATS = (4, 5) if options.quick else (60, 60)
ADAM = optax.adam(1e-3)
# No worker meets another while it is measured.
RULES = {
    "cross_shard": oxs.cross_shard(ADAM, AXIS),
    "diloco": oxs.diloco(ADAM, AXIS, communication_period=10**6),
}
PARAMS = [
    {"w": np.full((WIDTH, WIDTH), 0.1, np.float32), "b": np.zeros(WIDTH, np.float32)}
    for _ in range(LAYERS)
]
BATCH = jnp.ones((WIDTH, WIDTH))


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """One worker's step."""

    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def going_on(step: Callable[..., Any], *state: Any) -> Callable[[], Any]:
    """A call that goes on with what the last one returned."""
    held: list[Any] = [state]

    def call():
        *held[0], loss = step(*held[0], BATCH)
        return held[0], loss

    return call


def alone() -> Callable[[], Any]:
    """The optimizer of one device, jitted."""
    step = jax.jit(step_of(ADAM), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, PARAMS)
    return going_on(step, params, ADAM.init(params))


def by_hand(n: int, rule: str) -> Callable[[], Any]:
    """`jax.vmap` or `jax.shard_map` of the step, jitted; the mean of the losses."""
    tx, workers = RULES[rule], workers_of(n)
    axes = oxs.by_hand.state_axes(tx, PARAMS)
    ways: Any = {"in_axes": (0, axes, 0), "out_axes": (0, axes, 0)}
    mapped = oxs.by_hand.map_workers(step_of(tx), AXIS, mesh=workers.mesh, **ways)

    def step(params, state, x):
        *state, losses = mapped(params, state, x.reshape(n, -1, WIDTH))
        return *state, losses.mean()

    start = workers.start((PARAMS, tx.init(PARAMS)))
    return going_on(jax.jit(step, donate_argnums=(0, 1)), *start)


def by_workers(n: int, rule: str) -> Callable[[], Any]:
    """The same by `Workers.step`."""
    tx, workers = RULES[rule], workers_of(n)
    start = workers.start((PARAMS, tx.init(PARAMS)))
    return going_on(workers.step(step_of(tx), state=2), *start)


def workers_of(n: int) -> oxs.Workers:
    """One is simulated, several lie on a mesh."""
    return oxs.Workers(n, AXIS, mesh=n > 1)


class Net(nnx.Module):
    """The same perceptron as an object."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)]
        self.layers = nnx.List(layers)

    def __call__(self, x):
        """The perceptron's output."""
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def of_objects(by_workers: bool) -> Callable[[], Any]:
    """A model and an optimizer of Flax NNX, changed in place."""

    def step(model, optimizer, x):
        loss_of = lambda model: jnp.mean((model(x) - x) ** 2)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    model = Net()
    tx = RULES["cross_shard"] if by_workers else ADAM
    state = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
    if not by_workers:
        run = nnx.jit(step, donate_argnums=(0, 1))
        return lambda: run(*state, BATCH)
    workers = workers_of(1)
    started = workers.start(state)
    run = workers.step(step, state=2)
    return lambda: run(*started, BATCH)


# What is measured, beside what.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "`jax.jit`, Adam alone": (alone, ""),
    "`nnx.jit`, Adam alone": (lambda: of_objects(False), ""),
    "`Workers(1)`, NNX, cross_shard": (
        lambda: of_objects(True),
        "`nnx.jit`, Adam alone",
    ),
}
for n, how in ((1, "vmap"), (4, "shard_map")):
    for rule in RULES:
        CASES |= {
            f"`jax.{how}` by hand, {rule}": (
                lambda n=n, rule=rule: by_hand(n, rule),
                "",
            ),
            f"`Workers({n})`, {rule}": (
                lambda n=n, rule=rule: by_workers(n, rule),
                f"`jax.{how}` by hand, {rule}",
            ),
        }


def main() -> None:
    """Measure everything and write it down."""
    page = Report("bench_workers", options, layers=LAYERS, width=WIDTH, turns=REPEATS)
    with jax.numpy_dtype_promotion("standard"):
        calls = report.each("compiled", lambda name: CASES[name][0](), CASES)
        times = report.in_turns(calls, REPEATS, warm_up=5, host=True)
    rows = []
    for name, (_, beside) in CASES.items():
        both = list(zip(*times[name], strict=True))
        others = list(zip(*times[beside], strict=True)) if beside else []
        row = [name]
        for place, taken in enumerate(both):
            over = f"{ratio(taken, others[place]):.2f}" if beside else "-"
            row += [spread(taken), over]
        rows.append(row)
    page.table("times", rows)
    page.data(times=times)
    page.save()


if __name__ == "__main__":
    main()
