# SPDX-License-Identifier: Apache-2.0
"""Flax: a `TrainState` for synchronising optimizers, and its center for evaluation."""

from typing import Any, Self

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from optx_sync.state import center_params
from optx_sync.step import apply_gradients


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
        overwritten = OVERWRITE_WITH_GRADIENT
        if overwritten not in grads:
            params, opt_state = apply_gradients(
                self.tx, grads, self.opt_state, self.params, **kwargs
            )
        else:  # Flax's own: these collections are set to their gradient.
            trained, opt_state = apply_gradients(
                self.tx,
                grads["params"],
                self.opt_state,
                self.params["params"],
                **kwargs,
            )
            params = {"params": trained, overwritten: grads[overwritten]}
        new = {"step": self.step + 1, "params": params, "opt_state": opt_state}
        return self.replace(**new | fields)


def swap_center(train_state: Any) -> Any:
    """A Flax `TrainState` whose parameters are the center, for evaluation.

    Args:
        train_state: Anything with `params`, `opt_state` and `replace`.

    Returns:
        A copy with the center for parameters; go on training with the original.

    Raises:
        ValueError: There is no center in the optimizer's state.
    """
    center = center_params(train_state.opt_state, train_state.params)
    return train_state.replace(params=center)
