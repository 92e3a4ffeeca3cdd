# SPDX-License-Identifier: Apache-2.0
"""Flax: `TrainState` and NNX optimizer that set new parameters directly."""

from typing import Any, Self

from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from optx_sync.core.signatures import readable as _readable
from optx_sync.state.apply import apply_gradients
from optx_sync.state.metrics import center_params


class SyncTrainState(train_state.TrainState):
    """A Flax `TrainState` whose `apply_gradients` passes extra arguments on.

    Flax's own keeps all keyword arguments for itself. Here arguments that are no field
    of the state go to the transformation: `weight` of `cross_shard`, `weight`,
    `contributes` and `gradient_step` of `sync_replicas`.

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
        own, params, overwritten = grads, self.params, OVERWRITE_WITH_GRADIENT
        if overwritten in grads:
            own, params = grads["params"], params["params"]
        params, opt_state = apply_gradients(
            self.tx, own, self.opt_state, params, **kwargs
        )
        if overwritten in grads:  # Flax's own: set to their gradient.
            params = {"params": params, overwritten: grads[overwritten]}
        new = {"step": self.step + 1, "params": params, "opt_state": opt_state}
        return self.replace(**new | fields)


class SyncOptimizer(nnx.Optimizer[Any]):
    """An `nnx.Optimizer` whose `update` computes new parameters instead of updates.

    Make and call it like Flax's own: `wrt` names the variables to train, and keyword
    arguments of `update` go to the transformation. Its step is `oxs.apply_gradients`:
    it needs fewer temporaries, and a worker that takes the center equals it to the bit
    in float32.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> from flax import nnx
        >>> from optx_sync.flax import SyncOptimizer
        >>> tx = oxs.local_sgd(optax.sgd(0.5), "workers", communication_period=1)
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> optimizer = SyncOptimizer(model, tx, wrt=nnx.Param)
        >>> workers = oxs.Workers(2, "workers")
        >>> model, optimizer = workers.start((model, optimizer))
        >>> @workers.step(state=2)
        ... def step(model, optimizer, x):
        ...     grads = nnx.grad(lambda model: model(x).sum())(model)
        ...     optimizer.update(model, grads)
        ...     return model, optimizer
        >>> model, optimizer = step(model, optimizer, jnp.array([[1.0], [3.0]]))
        >>> model.bias[...].ravel()
        Array([-0.5, -0.5], dtype=float32)
    """

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """One step: the model's variables, `opt_state` and `step` advance.

        Args:
            model: The module, whose variables change.
            grads: Its gradients, as `nnx.grad` gives them.
            **kwargs: Extra arguments of the transformation.

        Returns:
            `None`: there are no updates.
        """
        params, grads = (
            nnx.as_pure(nnx.state(node, self.wrt, graph=self.graph))
            for node in (model, grads)
        )
        params, opt_state = apply_gradients(
            self.tx, grads, nnx.as_pure(self.opt_state), params, **nnx.as_pure(kwargs)
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, graph=self.graph))
        self.step[...] += 1


def swap_center(train_state: Any, optimizer: nnx.Optimizer[Any] | None = None) -> Any:
    """Put the center into a Flax `TrainState` or NNX model, to evaluate it.

    Args:
        train_state: Anything with `params`, `opt_state` and `replace`; or an NNX model,
            and then with its optimizer.
        optimizer: The model's `SyncOptimizer` or `nnx.Optimizer`.

    Returns:
        A copy with the center for parameters; go on training with the original.

    Raises:
        TypeError: An NNX model without its optimizer.
        ValueError: There is no center in the optimizer's state.
    """
    if optimizer is None and not hasattr(train_state, "opt_state"):
        raise TypeError(
            f"There is no optimizer's state in a {type(train_state).__name__}, and the "
            "center lies there. Pass an NNX model with its optimizer, "
            "oxs.flax.swap_center(model, optimizer), or a TrainState."
        )
    if optimizer is None:
        center = center_params(train_state.opt_state, train_state.params)
        return train_state.replace(params=center)
    params = nnx.state(train_state, optimizer.wrt, graph=optimizer.graph)
    model = nnx.clone(train_state)
    nnx.update(model, center_params(optimizer.opt_state, params))
    return model


_readable(globals())
