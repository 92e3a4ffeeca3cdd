"""`oxs.testing`: all of ours pass its checks, and what breaks a law is told so."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs
from tests.cases import OPTIMIZERS
from tests.transformations import EXCHANGES, HALF_WAY

testing, Exchange = oxs.testing, oxs.exchange.Exchange
SCHEDULE = optax.linear_schedule(0.1, 0.0, 100)
RULES = {
    "elastic": oxs.rules.elastic(moving_rate=0.1, rho=0.0),
    "elastic, penalty": oxs.rules.elastic(learning_rate=0.1),
    "agn": oxs.rules.agn(optax.adam(SCHEDULE)),
    "agn, updates": oxs.rules.agn(None, accumulate="updates", reduction="sum"),
    "local_sgd": oxs.rules.local_sgd(),
    "diloco": oxs.rules.diloco(),
    "half way": HALF_WAY,
}
ALL_EXCHANGES = [
    pytest.param(one, id=f"{name}-{number}")
    for name, some in EXCHANGES.items()
    for number, one in enumerate(some)
]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_does_what_it_declares(rule):
    testing.check_rule(rule)


@pytest.mark.parametrize("exchange", ALL_EXCHANGES)
def test_every_exchange_does_what_it_declares(exchange):
    testing.check_exchange(exchange)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
def test_every_optimizer_does_what_it_declares(case):
    testing.check_optimizer(case.make(), rows=case.rows)


def rule(contribute: Any = lambda own, center, at: own.params - own.taken, **fields):
    return lambda: testing.check_rule(oxs.CenterRule(contribute, **fields))


def flags(tree, state, axis_name, *, weight=None, also=None):
    """A mean that takes each weight for a flag."""
    weight = None if weight is None else weight > 0
    return oxs.exchange.Met(oxs.reduce(tree, axis_name, weight=weight))


def exchange(change=lambda met, tree: met, init: Any = lambda tree: (), **fields):
    """The check of an all-reduce by hand, whose result is changed."""

    def meet(tree, state, axis_name, *, weight=None, also=None):
        mean = oxs.reduce(tree, axis_name, weight=weight)
        return change(oxs.exchange.Met(mean, state=state), tree)

    made = Exchange(init, meet, **{"linear": True, "takes_weights": True, **fields})
    return lambda: testing.check_exchange(made)


def optimizer(step: Any, **fields):
    return lambda: testing.check_optimizer(oxs.optimizers.LeafRule(step, **fields))


def halved(met, tree):
    return met._replace(mean=jax.tree.map(lambda x: (x / 2).astype(x.dtype), met.mean))


GROWING: Any = optax.GradientTransformation(
    lambda params: jnp.int32(0), lambda updates, state, params=None: (updates, 0.5)
)
BROKEN: dict[str, tuple[Any, str]] = {
    "a name it does not have": (rule(reads=("x",)), "reads of .* got .'x',"),
    "undeclared params": (rule(reads=("taken",)), "reads 'params', and .* declares"),
    "undeclared before": (
        rule(take=lambda x, before, after, at: before, reads=("params", "taken")),
        "reads 'before'",
    ),
    "a scalar": (rule(lambda own, center, at: own.params.sum()), "`contribute` that"),
    "halved": (exchange(halved), "linear=True, mean .* Met.lost"),
    "a mean of one": (
        exchange(lambda met, tree: met._replace(mean=tree)),
        "one mean for all, but",
    ),
    "a mean of other dtypes": (
        exchange(
            lambda met, tree: met._replace(
                mean=jax.tree.map(lambda x: x.astype(jnp.float32), met.mean)
            )
        ),
        "the same types in the mean",
    ),
    "a state": (
        exchange(init=lambda tree: jnp.int32(0), remembers=False),
        "remembers=False, but init returns arrays",
    ),
    "another state": (
        exchange(lambda met, tree: met._replace(state=jnp.int32(1))),
        "the same types after `meet`",
    ),
    "an empty array": (
        exchange(lambda met, tree: jax.tree.map(jnp.max, tree)),
        r"'empty': 'float32\[0, 3\]'.* takes scalars and empty arrays",
    ),
    "a sum": (
        exchange(lambda met, tree: met._replace(weight=jnp.float32(1))),
        "sums of weights",
    ),
    "no groups": (exchange(exact=True), "groups|group_assignment"),
    "no weights": (
        lambda: testing.check_exchange(
            Exchange(lambda tree: (), flags, linear=False, takes_weights=True)
        ),
        "takes_weights=True, but others change nothing",
    ),
    "reads param": (
        optimizer(lambda grad, slots, param, at: (-param, slots)),
        "needs_params=False, but",
    ),
    "columns": (
        optimizer(
            lambda grad, slots, param, at: (grad.mean(0, keepdims=True) + grad, slots),
            rows="touched",
        ),
        "rows='touched', but rows with a gradient",
    ),
    "a growing state": (
        lambda: testing.check_optimizer(GROWING),
        "the same types after `update`",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_a_law_is_told_so(name):
    call, said = BROKEN[name]
    with pytest.raises((ValueError, TypeError), match=f"(?s){said}"):
        call()


def test_a_code_that_feedback_makes_explode():
    """Three times the mean: linear by its law, and each round owes twice as much."""

    def lost(x, weight):
        twice = -2 * x.astype(jnp.float32)
        return twice if weight is None else jnp.where(weight > 0, weight * twice, 0)

    def meet(tree, state, axis_name, *, weight=None, also=None):
        mean = oxs.reduce(tree, axis_name, weight=weight)
        return oxs.exchange.Met(
            jax.tree.map(lambda x: (3 * x).astype(x.dtype), mean),
            lost=jax.tree.map(lambda x: lost(x, weight), tree),
        )

    tripled = Exchange(lambda tree: (), meet, linear=True, takes_weights=True)
    with pytest.warns(UserWarning, match="error_feedback owes .* must be smaller"):
        testing.check_exchange(tripled)
