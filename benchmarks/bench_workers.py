"""The host's time for a step of `Workers`, beside the same program jitted by hand.

    python benchmarks/bench_workers.py            # 12 minutes on two busy cores
    python benchmarks/bench_workers.py --quick    # few layers, a few seconds

Layers so small that a device has nothing to do: what is left is what Python and JAX
make of hundreds of arrays between one step and the next. And each style of model, Flax
NNX, Linen, Equinox and plain trees, through `Workers` and by its own `jit`.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from flax import nnx
from flax.training.train_state import TrainState
from report import Report, ratio, spread
from training import loss_of

import optx_sync as oxs

report.on_cpu(4)

AXIS, WIDTH = "workers", 8
options = report.arguments(__doc__).parse_args()
LAYERS, REPEATS = (4, 5) if options.quick else (60, 60)
DEPTHS = (2,) if options.quick else (10, 60, 300)
HAS_EQUINOX = importlib.util.find_spec("equinox") is not None
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

    def __init__(self, depth: int):
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)]
        self.layers = nnx.List(layers)

    def __call__(self, x):
        """The perceptron's output."""
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def of_objects(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    """A step that changes a model and an optimizer of Flax NNX in place."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def objects(depth: int, tx: Any) -> tuple[Any, Any]:
    """The model and the optimizer."""
    model = Net(depth)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def nnx_alone(depth: int = LAYERS) -> Callable[[], Any]:
    """By `nnx.jit`, which takes objects apart in each call."""
    state = objects(depth, ADAM)
    run = nnx.jit(of_objects, donate_argnums=(0, 1))
    return lambda: run(*state, BATCH)


def nnx_by_workers(depth: int = LAYERS) -> Callable[[], Any]:
    """By `Workers.step`."""
    workers = workers_of(1)
    started = workers.start(objects(depth, RULES["cross_shard"]))
    run = workers.step(of_objects, state=2)
    return lambda: run(*started, BATCH)


def nnx_apart(
    depth: int, workers: oxs.Workers | None, pure: bool = False
) -> Callable[[], Any]:
    """Taken apart once, before the steps; put together while they are traced.

    With `pure` what the steps pass on is a dict of arrays, without NNX's variables.
    """
    tx = RULES["cross_shard"] if workers else ADAM
    graph, variables = nnx.split(Net(depth))
    shapes = jax.eval_shape(lambda: variables)

    def merged(params):
        if not pure:
            return nnx.merge(graph, params)
        filled = jax.tree.map(lambda x: x, shapes)
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graph, filled)

    def step(params, state, x):
        def loss_of(params):
            return jnp.mean((merged(params)(x) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params: Any = nnx.to_pure_dict(variables) if pure else variables
    start = params, tx.init(params)
    if workers is None:
        return going_on(jax.jit(step, donate_argnums=(0, 1)), *start)
    return going_on(workers.step(step, state=2), *workers.start(start))


class Dense(nn.Module):
    """The same perceptron for `init` and `apply`."""

    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The perceptron's output."""
        for _ in range(self.depth):
            x = jnp.tanh(nn.Dense(WIDTH)(x))
        return x


def linen(depth: int, workers: oxs.Workers | None) -> Callable[[], Any]:
    """A `TrainState`, by `jax.jit` or `Workers.step`."""
    network, tx = Dense(depth), RULES["cross_shard"] if workers else ADAM
    variables = network.init(jax.random.key(0), BATCH)
    state = TrainState.create(apply_fn=network.apply, params=variables, tx=tx)

    def step(state, x):
        def loss_of(params):
            return jnp.mean((state.apply_fn(params, x) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    if workers is None:
        return going_on(jax.jit(step, donate_argnums=0), state)
    return going_on(workers.step(step), workers.start(state))


def equinox(depth: int, workers: oxs.Workers | None) -> Callable[[], Any]:
    """A module and its optimizer's state, by `eqx.filter_jit` or `Workers.step`."""
    # An extra of the tests: who has not installed it leaves these steps out.
    eqx: Any = importlib.import_module("equinox")
    tx = RULES["cross_shard"] if workers else ADAM
    keys = jax.random.split(jax.random.key(0), depth)
    model = eqx.nn.Sequential(
        [
            layer
            for key in keys
            for layer in (eqx.nn.Linear(WIDTH, WIDTH, key=key), eqx.nn.Lambda(jnp.tanh))
        ]
    )

    def step(model, state, x):
        @eqx.filter_value_and_grad
        def loss_of(model):
            return jnp.mean((jax.vmap(model)(x) - x) ** 2)

        loss, grads = loss_of(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    start = model, tx.init(eqx.filter(model, eqx.is_array))
    if workers is None:
        run = eqx.filter_jit(
            lambda x, model, state: step(model, state, x), donate="all-except-first"
        )
        return going_on(lambda model, state, x: run(x, model, state), *start)
    return going_on(workers.step(step, state=2), *workers.start(start))


def trees(depth: int, workers: oxs.Workers | None) -> Callable[[], Any]:
    """Lists and dicts of arrays, by `jax.jit` or `Workers.step`."""
    params, tx = PARAMS[:1] * depth, RULES["cross_shard"] if workers else ADAM
    params = jax.tree.map(jnp.array, params)
    start = params, tx.init(params)
    if workers is None:
        return going_on(jax.jit(step_of(tx), donate_argnums=(0, 1)), *start)
    return going_on(workers.step(step_of(tx), state=2), *workers.start(start))


# Each style by its own `jit`, and by `Workers`.
STYLES: dict[str, tuple[str, Callable[[int], Any], Callable[[int], Any]]] = {
    "plain trees": (
        "`jax.jit`",
        lambda depth: trees(depth, None),
        lambda depth: trees(depth, workers_of(1)),
    ),
    "Flax Linen, `TrainState`": (
        "`jax.jit`",
        lambda depth: linen(depth, None),
        lambda depth: linen(depth, workers_of(1)),
    ),
    "Equinox": (
        "`eqx.filter_jit`",
        lambda depth: equinox(depth, None),
        lambda depth: equinox(depth, workers_of(1)),
    ),
    "Flax NNX, objects": ("`nnx.jit`", nnx_alone, nnx_by_workers),
    "Flax NNX, split once": (
        "`jax.jit`",
        lambda depth: nnx_apart(depth, None),
        lambda depth: nnx_apart(depth, workers_of(1)),
    ),
    "Flax NNX, a dict of arrays": (
        "`jax.jit`",
        lambda depth: nnx_apart(depth, None, True),
        lambda depth: nnx_apart(depth, workers_of(1), True),
    ),
}
if not HAS_EQUINOX:
    del STYLES["Equinox"]


# What is measured, beside what.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "`jax.jit`, Adam alone": (alone, ""),
    "`nnx.jit`, Adam alone": (nnx_alone, ""),
    "`Workers(1)`, NNX, cross_shard": (nnx_by_workers, "`nnx.jit`, Adam alone"),
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


def styles(depth: int) -> dict[str, list[Any]]:
    """Milliseconds of a step of each style, by its own `jit` and by `Workers`."""
    calls = {}
    for name, (_, own, ours) in STYLES.items():
        calls |= {f"{name}: its own": own(depth), f"{name}: Workers": ours(depth)}
    return report.in_turns(calls, REPEATS, warm_up=5, host=True)


def show_styles(page: Report, found: dict[int, dict[str, list[Any]]]) -> None:
    """A table for each number of layers."""
    for depth, times in found.items():
        rows = []
        for name, (jit, *_) in STYLES.items():
            own, ours = (
                list(zip(*times[f"{name}: {by}"], strict=True))
                for by in ("its own", "Workers")
            )
            row = [name, jit]
            for place in (1, 0):
                shown = (f"{np.median(of[place]):.2f}" for of in (own, ours))
                row += [*shown, f"{ratio(ours[place], own[place]):.2f}"]
            rows.append(row)
        page.table("styles", rows, depth=depth)


def main() -> None:
    """Measure everything and write it down."""
    page = Report("bench_workers", options, layers=LAYERS, width=WIDTH, turns=REPEATS)
    with jax.numpy_dtype_promotion("standard"):
        calls = report.each("compiled", lambda name: CASES[name][0](), CASES)
        times = report.in_turns(calls, REPEATS, warm_up=5, host=True)
        found = report.each("layers", styles, DEPTHS)
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
    show_styles(page, found)
    page.text("load", load=report.machine()["load"])
    page.text("styles", equinox="is" if HAS_EQUINOX else "is not")
    page.data(times=times, styles={str(depth): of for depth, of in found.items()})
    page.save()


if __name__ == "__main__":
    main()
