"""FTRL-Proximal and what McMahan et al., 2013, compare it with, for `reproduce_ftrl`.

Each is a transformation of (rate, penalty). All but `global_rate` have a rate of their
own for each weight. What the catalogue lacks is written as a rule for one array, which
`from_rule` applies to the rows that a batch touched.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optx_sync as oxs
from optx_sync import optimizers
from optx_sync.optimizers import LeafRule, from_rule


def ftrl(rate, l1):
    """FTRL-Proximal as in the paper's Algorithm 1."""
    return optimizers.ftrl(rate, initial_accumulator_value=0.0, l1=l1, beta=1.0)


def coordinate_rate(alpha, squares):
    """The paper's rate of each coordinate, from its sum of squared gradients."""
    return alpha / (1.0 + jnp.sqrt(squares))


def soft_threshold(x, threshold):
    """Nearer to zero by the threshold, or zero."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0.0)


class Slots(NamedTuple):
    squares: Any  # sum of squared gradients that were used
    other: Any  # RDA: sum of gradients; FOBOS: the rounds seen; OGD: steps with it


def per_coordinate(step):
    """A method: `step` is told of one array, and of the penalty as `at.hyper`."""

    @functools.wraps(step)
    def make(rate, penalty):
        rule = LeafRule(
            step, Slots(0.0, 0.0), "touched", hyper=(penalty,), needs_params=True
        )
        return from_rule(rule, rate)

    return make


@per_coordinate
def rda(grad, slots, param, at):
    """Regularized dual averaging (Xiao, 2009) with rates per coordinate."""
    squares, total = slots.squares + grad**2, slots.other + grad
    own_rate = coordinate_rate(at.learning_rate, squares)
    new_param = -own_rate * soft_threshold(total, at.hyper[0])
    return new_param - param, Slots(squares, total)


@per_coordinate
def fobos(grad, slots, param, at):
    """Forward-backward splitting (Duchi, Singer, 2009), of weights `caught_up`."""
    squares = slots.squares + grad**2
    own_rate = coordinate_rate(at.learning_rate, squares)
    new_param = soft_threshold(param - own_rate * grad, own_rate * at.hyper[0])
    return new_param - param, Slots(squares, jnp.full_like(squares, at.count + 1))


@per_coordinate
def ogd_count(grad, slots, param, at):
    """Gradient descent of the weights whose features were seen more than k times."""
    count = slots.other + 1.0
    used = jnp.where(count > at.hyper[0], grad, 0.0)
    squares = slots.squares + used**2
    own_rate = coordinate_rate(at.learning_rate, squares)
    return -own_rate * used, Slots(squares, count)


def caught_up(weights, state, ids, rate, l1):
    """These weights of FOBOS, after the l1 of all rounds without a gradient."""
    squares, seen = (oxs.take(slot, ids) for slot in state.slots)
    missed = state.update_count.astype(seen.dtype) - seen
    shrinkage = missed * l1 * coordinate_rate(rate, squares)
    return soft_threshold(oxs.take(weights, ids), shrinkage)


def proximal_adagrad(rate, l1):
    """The catalogue's, with TensorFlow's initial accumulator."""
    return optimizers.proximal_adagrad(rate, l1=l1)


def global_rate(rate, power):
    """Gradient descent with one rate for all: constant, or over root t."""
    schedule = lambda count: rate * jnp.float32(count + 1) ** -power  # noqa: E731
    return optimizers.gradient_descent(schedule)


def loss_of(weights, ids, labels):
    """The sum of the lines' logistic losses."""
    logits = oxs.take(weights, ids).sum(-1)
    return optax.sigmoid_binary_cross_entropy(logits, labels).sum()


grad_of = oxs.value_and_grad(loss_of, rows=lambda ids, labels: ids)


def train(make, rate, penalty, features, ids, labels):
    """The weights after one pass over ids [steps, lines, ids of a line].

    The penalty of `fobos` is the sum of its l1 over the pass.
    """
    if make is fobos:
        penalty = penalty / len(ids)
    tx = make(rate, penalty)

    def step(carry, batch):
        weights, state = carry
        if make is fobos:
            now = caught_up(weights, state, batch[0], rate, penalty)
            weights = weights.at[batch[0]].set(now, mode="drop")
        _, slices = grad_of(weights, *batch)
        updates, state = tx.update(slices, state, weights)
        return (optax.apply_updates(weights, updates), state), None

    weights = jnp.zeros(features)
    (weights, state), _ = jax.lax.scan(step, (weights, tx.init(weights)), (ids, labels))
    if make is fobos:
        weights = caught_up(weights, state, jnp.arange(features), rate, penalty)
    return weights
