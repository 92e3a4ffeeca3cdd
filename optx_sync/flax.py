# SPDX-License-Identifier: Apache-2.0
"""Flax's `TrainState`, for transformations that take extra arguments."""

import functools
from typing import Any, Self

import optax
from flax.training import train_state


class SyncTrainState(train_state.TrainState):
    """A Flax `TrainState` whose `apply_gradients` passes extra arguments on.

    Flax's own keeps all keyword arguments for itself. Here those that are no field of
    the state go to the transformation: `weight` of `cross_shard`, `contributes` and
    `gradient_step` of `sync_replicas`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> from optx_sync.flax import SyncTrainState
        >>> state = SyncTrainState.create(
        ...     apply_fn=None,
        ...     params={"w": jnp.zeros(())},
        ...     tx=oxs.cross_shard(optax.sgd(1.0), "data"),
        ... )
        >>> def step(gradient, tokens):
        ...     return state.apply_gradients(grads={"w": gradient}, weight=tokens)
        >>> new = jax.vmap(step, axis_name="data")(
        ...     jnp.array([1.0, 4.0]), jnp.array([30.0, 10.0])
        ... )
        >>> new.params["w"]
        Array([-1.75, -1.75], dtype=float32)
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """One step: `params`, `opt_state` and `step` advance.

        Args:
            grads: Gradients like `params`.
            **kwargs: Fields of the state to replace (as Flax's own takes them), and
                extra arguments of the transformation.

        Returns:
            The new state.
        """
        fields = {key: kwargs.pop(key) for key in list(kwargs) if hasattr(self, key)}
        update = functools.partial(
            optax.with_extra_args_support(self.tx).update, **kwargs
        )
        bound = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
        stepped = super(SyncTrainState, bound).apply_gradients(grads=grads, **fields)
        return stepped.replace(tx=self.tx)  # pyright: ignore[reportReturnType] # Flax types replace as of its base
