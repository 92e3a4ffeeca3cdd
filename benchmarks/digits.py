"""Scikit-learn's digits, a small network for them, and what several studies share."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import optx_sync as oxs

images, labels = load_digits(return_X_y=True)
IMAGES, LABELS = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
NETWORK: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
# Dean et al., 2012: workers add the sum of their updates to the center, and take it.
DOWNPOUR = oxs.CenterRule(
    contribute=lambda own, center, at: own.accumulated, accumulate="updates"
)


def initial(seed: int) -> Any:
    """The network's parameters, as Flax draws them."""
    return NETWORK.init(jax.random.key(seed), IMAGES[:1])


def loss_of(params: Any, rows: jax.Array) -> jax.Array:
    """The mean cross-entropy of these images."""
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return cross_entropy(NETWORK.apply(params, IMAGES[rows]), LABELS[rows]).mean()


def accuracy_of(params: Any, rows: jax.Array) -> jax.Array:
    """Which part of these images is recognised."""
    return (NETWORK.apply(params, IMAGES[rows]).argmax(-1) == LABELS[rows]).mean()
