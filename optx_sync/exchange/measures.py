# SPDX-License-Identifier: Apache-2.0
"""How alike replicas are, measured by a few scalars of each.

A replica adds a few scalars to a sum that runs anyway: the squared norm of its own
gradient, w_i |g_i|^2, and, where weights or batch sizes differ, further sums of these.
Together with the norm of the mean they say how alike the replicas are. With w_i the
weights, which sum to 1, b_i the examples behind g_i, A = |sum_i w_i g_i|^2 and B =
sum_i w_i |g_i|^2:

    agreement          (A - C) / (B - C)                 C = sum_i w_i^2 |g_i|^2
    noise       S =    (B - A) / (k - h)                 h = sum_i w_i^2 / b_i
    signal    |G|^2 =  A - h S                           k = sum_i w_i / b_i

S is the trace of the covariance of one example's gradient and |G|^2 the squared norm of
the true gradient, both without bias; S / |G|^2 is the simple noise scale. The agreement
is the mean cosine of two different replicas, each pair with the product of its norms
and weights: sum_{i != j} w_i w_j g_i . g_j / sum_{i != j} w_i w_j |g_i|^2.
"""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.typing import ArrayLike

from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.comm.reduce import or_one, own_weight, weigh
from optx_sync.comm.varying import axes_of, localize, sum_shards
from optx_sync.core.checks import Refused, refuse
from optx_sync.core.shapes import Array, Float
from optx_sync.core.slices import IndexedSlices
from optx_sync.core.trees import Tree, is_nothing, is_slices

# Of the moving averages of S and |G|^2. Both start at 0, which cancels in the ratio.
DECAY = 0.99


class Measured(NamedTuple):
    """What `measure=True` keeps of the last meeting; 0 before the first one."""

    agreement: Tree  # float32[], or () where the exchange is not the mean itself
    contribution_norm: Float[Array, ""]  # root of the mean square of the norms
    update_norm: Float[Array, ""]
    contributors: Float[Array, ""]  # replicas that count
    noise: Tree  # float32[], the moving average of S, or ()
    signal: Tree  # float32[], the moving average of |G|^2, or ()


def start(exact: bool = True, noise: bool = True) -> Measured:
    """Nothing measured yet; without the fields that the caller cannot know."""

    def zero(known=True) -> Tree:  # an array for each, as it can be donated only once
        return jnp.zeros((), jnp.float32) if known else ()

    return Measured(zero(exact), zero(), zero(), zero(), zero(noise), zero(noise))


def start_like(params: Tree, axis_name: AxisName) -> Measured:
    """Nothing measured yet, varying over the replicas' axes where the parameters do."""
    axes = axes_of(params) & {*check_axis_name(axis_name)}
    return localize(start(), tuple(sorted(axes))) if axes else start()


def shown(measured: Any) -> dict[str, Any]:
    """The fields of metrics that are measured; `None` each where nothing is.

    They are of the last meeting, except the noise scale: S / |G|^2 of the moving
    averages, 0 before there is one.
    """
    names = "agreement", "contribution_norm", "update_norm", "contributors"
    if not isinstance(measured, Measured):
        return dict.fromkeys(("noise_scale", *names))
    found = {name: getattr(measured, name) for name in names}
    return {"noise_scale": measured.noise / or_one(measured.signal), **found}


def square_sum(tree: Tree, like: Tree = None, stacked: int = 0) -> jax.Array:
    """float32, the squared norm over all leaves, for each place along `stacked` axes.

    Leaves may be row-sparse or `None`. Shards are added up over the mesh axes over
    which the tree varies and `like` does not.
    """

    def square(x):
        if isinstance(x, IndexedSlices):
            x = x.sum_duplicates().values
        # The absolute values first: a complex dtype has no cast to float32.
        squares = jnp.square(jnp.abs(x).astype(jnp.float32))
        total = jnp.sum(squares, axis=tuple(range(stacked, x.ndim)))
        return total if like is None else sum_shards(total, like)

    leaves = jax.tree.leaves(tree, is_leaf=is_slices)
    return sum(map(square, leaves), jnp.float32(0))


def to_sum(
    square: jax.Array,
    axis_name: AxisName,
    *,
    weight: ArrayLike | None = None,
    alike: bool = False,
    batch_size: float | jax.Array = 1,
) -> dict[str, jax.Array]:
    """The scalars of a replica that are summed over all replicas.

    Args:
        square: The squared norm of its gradient or contribution.
        axis_name: The mapped axis.
        weight: Its weight, or `None`.
        alike: Whether all weights are 0 or 1.
        batch_size: The examples behind it; a Python number is the same on all replicas.
    """
    own = own_weight(weight, axis_name)
    own = None if own is None else own.astype(jnp.float32)
    sums = {"squares": weigh(square, own)}
    if own is not None and not alike:
        sums["contributors"] = (own > 0).astype(jnp.float32)
        sums["own_squares"] = weigh(square * own, own)
        if isinstance(batch_size, int | float):
            sums["own_inverse"] = own * own / batch_size
    if not isinstance(batch_size, int | float):
        inverse = 1 / jnp.asarray(batch_size).astype(jnp.float32)
        sums["inverse"] = weigh(inverse, own)
        if own is not None and not alike:
            sums["own_inverse"] = weigh(inverse * own, own)
    return localize(sums, axis_name)


def measure_of(
    before: Measured,
    sums: dict[str, jax.Array],
    total: Any,
    batch_size: float | jax.Array = 1,
) -> Measured:
    """The measures, from the sums over the replicas, except the norm of the update.

    Args:
        before: The measures so far.
        sums: The summed scalars of `to_sum`, and `mean`, the squared norm of the mean.
        total: The sum of the weights, or the number of replicas.
        batch_size: As for `to_sum`.
    """
    total = jnp.asarray(total, jnp.float32)
    contributors = sums["contributors"] if "contributors" in sums else total
    total = or_one(total)
    squares, mean_square = sums["squares"] / total, sums["mean"]
    # Weights that are all 0 or 1 equal their squares.
    own_squares = sums.get("own_squares", sums["squares"]) / total**2
    inverse = sums["inverse"] if "inverse" in sums else total / batch_size
    own_inverse = sums.get("own_inverse", inverse) / total**2
    inverse = inverse / total
    known = contributors > 1
    measured = before._replace(
        contribution_norm=jnp.sqrt(squares), contributors=contributors
    )
    if not is_nothing(before.agreement):
        apart = or_one(squares - own_squares)
        agreement = jnp.where(known, (mean_square - own_squares) / apart, 1.0)
        measured = measured._replace(agreement=agreement)
    if is_nothing(before.noise):
        return measured
    noise = (squares - mean_square) / jnp.where(known, inverse - own_inverse, 1.0)
    signal = mean_square - own_inverse * noise
    # A NaN, from a gradient or a batch of 0 examples, would stay forever.
    counts = known & jnp.isfinite(noise) & jnp.isfinite(signal)

    def moved(old, new):
        return jnp.where(counts, DECAY * old + (1 - DECAY) * new, old)

    return measured._replace(
        noise=moved(before.noise, noise), signal=moved(before.signal, signal)
    )


def check_batch_size(batch_size: float | jax.Array | None) -> float | jax.Array:
    """The examples behind a gradient, 1 if left out; a ValueError for a bad number.

    A Python number is the same on all replicas, an array is each replica's own.
    """
    number = 1 if batch_size is None else batch_size
    refuse(number, _BATCH_SIZES)
    return number


_BATCH_SIZES: Refused[Any] = (
    (
        lambda x: jnp.shape(x) != (),
        "batch_size must be a scalar per replica, the number of examples behind its "
        "gradient; got an array of shape {0.shape}.",
    ),
    (
        lambda x: not isinstance(x, jax.core.Tracer) and not float(x) >= 0,
        "batch_size must be a number of examples; got {0!r}. Pass for example "
        "batch.shape[0].",
    ),
)
