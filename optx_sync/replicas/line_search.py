# SPDX-License-Identifier: Apache-2.0
"""The loss of all replicas as a function, which a line search calls as it likes."""

from collections.abc import Callable
from typing import Any

import jax

from optx_sync.comm import collectives
from optx_sync.comm.collectives import AxisName
from optx_sync.comm.reduce import MeanOfReplicas, reduce
from optx_sync.comm.varying import localize
from optx_sync.core import checks
from optx_sync.core.trees import Tree


@checks.shows_call("oxs.value_fn(loss, 'data')")
def value_fn(
    loss: Callable[..., jax.Array],
    axis_name: AxisName,
    weight: jax.Array | float | None = None,
) -> Callable[..., jax.Array]:
    r"""The mean loss of all replicas, whose gradient is the mean, for a line search.

    `optax.lbfgs` and the line searches of Optax call the loss at points of their own.
    With f_i the loss of replica i on its batch, w_i its weight:

    .. math::

        F(x) = \frac{\sum_i w_i f_i(x)}{\sum_i w_i}, \qquad
        \nabla F(x) = \frac{\sum_i w_i \nabla f_i(x)}{\sum_i w_i}

    Each call is an all-reduce of the loss, or of the loss and the gradient. All
    replicas get the same numbers, and so take the same steps; by a loss of its own each
    would take another one.

    Args:
        loss: `(params, *args, **kwargs) -> scalar`, on this replica's batch. Only
            `params` are differentiated.
        axis_name: The mapped axis, or a tuple of them.
        weight: How much this replica counts, such as its examples; `None`: all count
            the same.

    Returns:
        A function with the arguments of `loss`.

    Raises:
        TypeError: `loss` is no function; a missing or bad axis name.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.cross_shard(optax.lbfgs(), "data")
        >>> def step(params, x):
        ...     loss = lambda params: jnp.sum((params - x) ** 2)
        ...     value, grad = jax.value_and_grad(loss)(params)
        ...     more = {"value": value, "value_fn": oxs.value_fn(loss, "data")}
        ...     updates, _ = tx.update(grad, tx.init(params), params, grad=grad, **more)
        ...     return optax.apply_updates(params, updates)
        >>> x = jnp.array([[1.0, 4.0], [3.0, 8.0]])
        >>> params = jax.vmap(step, (None, 0), axis_name="data")(jnp.zeros(2), x)
        >>> [round(float(x), 3) for x in params[0]]  # of length 1, to the mean (2, 6)
        [0.316, 0.949]
    """
    checks.check_function("loss", loss, "Pass the loss of one replica.")
    collectives.check_axis_name(axis_name)

    def mean(params: Tree, *args: Any, **kwargs: Any) -> jax.Array:
        def own(params: Tree) -> jax.Array:
            return loss(params, *args, **kwargs)

        def over_all(found: Tree) -> Tree:
            return reduce(localize(found, axis_name), axis_name, weight=weight)

        def forward(params: Tree) -> tuple[jax.Array, Tree]:
            return over_all(jax.value_and_grad(own)(localize(params, axis_name)))

        def backward(grads: Tree, factor: jax.Array) -> tuple[Tree]:
            return (jax.tree.map(lambda g: factor.astype(g.dtype) * g, grads),)

        of_all = jax.custom_vjp(
            lambda params: over_all(own(localize(params, axis_name)))
        )
        of_all.defvjp(forward, backward)
        return of_all(params)

    return MeanOfReplicas(mean, loss)
