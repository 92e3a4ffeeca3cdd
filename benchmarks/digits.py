"""Scikit-learn's digits, a small network for them, and workers with parts of them."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from by_hand import begun
from pictures import Line, Panel
from report import each
from sklearn.datasets import load_digits
from training import workers_step

import optx_sync as oxs

jax.config.update("jax_platforms", "cpu")

images, LABELS = load_digits(return_X_y=True)
# No arrays of JAX: a script may still say how many devices there are.
IMAGES = np.asarray(images / 16, np.float32)
NETWORK: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
INIT = jax.jit(NETWORK.init)  # one program, and the same numbers as without
TEST = 360  # images; of more parts each has so many
# Dean et al., 2012: workers add the sum of their updates to the center, and take it.
DOWNPOUR = oxs.CenterRule(
    contribute=lambda own, center, at: own.accumulated,
    accumulate="updates",
    reads=("accumulated",),
)
# Whether each worker's part of the images is sorted by label, in words.
WORKERS, BATCH, PARTS = 8, 16, {False: "shuffled", True: "sorted by label"}
POINTS = 32  # of a curve


@functools.cache
def initial(seed: int) -> Any:
    """The network's parameters, as Flax draws them."""
    return INIT(jax.random.key(seed), IMAGES[:1])


def loss_of(params: Any, rows: jax.Array) -> jax.Array:
    """The mean cross-entropy of these images."""
    images, labels = jnp.asarray(IMAGES)[rows], jnp.asarray(LABELS)[rows]
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return cross_entropy(NETWORK.apply(params, images), labels).mean()


def accuracy_of(params: Any, rows: jax.Array) -> jax.Array:
    """Which part of these images is recognised."""
    images, labels = jnp.asarray(IMAGES)[rows], jnp.asarray(LABELS)[rows]
    return (NETWORK.apply(params, images).argmax(-1) == labels).mean()


def split(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images to test, and to train on."""
    rows = np.random.default_rng(seed).permutation(len(LABELS)).astype(np.int32)
    return rows[:TEST], rows[TEST:]


def drawing(seed: int, rows: Any, batch: int) -> Callable:
    """For a simulator: the gradient of images that are drawn anew in every step."""

    def grad_fn(worker, params, step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.grad(loss_of)(params, jax.random.choice(key, rows, (batch,)))

    return grad_fn


def draw(seed: int, by_label: bool, steps: int) -> tuple[Any, Any, Any]:
    """Images to test, those of steps and workers [steps, workers, batch], a start."""
    rng = np.random.default_rng(seed)
    test, rest = np.split(rng.permutation(len(LABELS)), [TEST])
    if by_label:
        rest = rest[np.argsort(LABELS[rest], kind="stable")]
    parts = rest[: len(rest) // WORKERS * WORKERS].reshape(WORKERS, -1)
    drawn = rng.integers(parts.shape[1], size=(steps, WORKERS, BATCH))
    return test, parts[np.arange(WORKERS)[:, None], drawn], initial(seed)


def train_all(
    names: Iterable[str], train: Callable[[str], Callable], steps: int, seeds: int
) -> dict[tuple[str, bool], Any]:
    """{(name, by label): what `train(name)` makes of what is drawn, [seed, ...]}."""

    def one(cell):
        drawn = [draw(seed, cell[1], steps) for seed in range(seeds)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *drawn)
        return jax.device_get(train(cell[0])(*stacked))

    cells = [(name, by_label) for by_label in PARTS for name in names]
    return each("training", one, cells)


@functools.cache
def curves(tx: Any, steps: int) -> Callable:
    """For `train_all`: accuracies and disagreement of the workers, [seed, POINTS, 3].

    The accuracies are that of the workers' mean, and the mean of theirs.
    """
    points = min(POINTS, steps // 4)

    def measured(params, test):
        mean = oxs.by_hand.mean_params(params)
        apart = jax.tree.map(lambda x, m: jnp.sum((x - m[None]) ** 2), params, mean)
        size = sum(m.size for m in jax.tree.leaves(mean)) * WORKERS
        distance = jnp.sqrt(sum(jax.tree.leaves(apart)) / size)
        each_one = jax.vmap(accuracy_of, (0, None))(params, test)
        return jnp.stack([accuracy_of(mean, test), each_one.mean(), distance])

    def run(test, rows, params):
        step = workers_step(tx, params, jax.grad(loss_of))

        def until_point(carry, rows):
            carry, _ = jax.lax.scan(lambda c, r: (step(*c, r), None), carry, rows)
            return carry, measured(carry[0], test)

        carry = begun(tx, params, WORKERS)
        rows = rows[: steps // points * points]
        rows = rows.reshape(points, -1, *rows.shape[1:])
        return jax.lax.scan(until_point, carry, rows)[1]

    return jax.jit(jax.vmap(run))


def panels_of(found: Any, steps: int, place: int, what: str, names: Any) -> list[Panel]:
    """This one of the three `curves` against steps, a panel for each kind of parts."""
    points = min(POINTS, steps // 4)
    x = np.arange(1, points + 1) * (steps // points)
    panels = []
    for by_label, title in PARTS.items():
        lines = [Line(n, x, found[n, by_label][..., place], "-") for n in names]
        panels.append(Panel("steps", what, lines, title))
    return panels
