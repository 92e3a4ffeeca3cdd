# SPDX-License-Identifier: Apache-2.0
"""A contribution that comes alone: its share and weight, and what the center makes."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optx_sync.center.contract import CenterRule, Period, Round, Weigh
from optx_sync.center.worker import Center
from optx_sync.core.checks import integer
from optx_sync.core.trees import Tree, brief


def share_of_one(rule: CenterRule, contribution: Tree, at: Round) -> Tree:
    """What a worker that comes alone adds to the mean that the rule asks for."""
    if rule.mean_over != "workers":
        return contribution
    return jax.tree.map(
        lambda x: x / jnp.asarray(at.num_workers, x.dtype), contribution
    )


def weigh_alone(
    rule: CenterRule, contribution: Tree, at: Round
) -> tuple[Tree, jax.Array]:
    """(the contribution of one that comes alone, weighed; whether its factor is not 0).

    A contribution of factor 0 is dropped: the center stays, momentum and all.
    """
    factor = factor_of(rule, at)
    if factor is None:
        return contribution, jnp.bool_(True)
    weighed = jax.tree.map(lambda x: x * factor.astype(x.dtype), contribution)
    return weighed, factor.astype(jnp.bool_)


def factor_of(rule: CenterRule, at: Round) -> jax.Array | None:
    """The rule's `weigh` of a contribution, a scalar; `None` if it has none."""
    if rule.weigh is None:
        return None
    # A user's formula may mix integers and Python numbers; the result is a float.
    with jax.numpy_dtype_promotion("standard"):
        factor = jnp.asarray(rule.weigh(at))
    if factor.ndim:
        raise ValueError(
            "weigh must return a scalar, by which a contribution is multiplied; got an "
            f"array of shape {factor.shape}."
        )
    return factor


def absorb(
    rule: CenterRule, center: Center, total: Tree, /, **extra_args: Any
) -> Center:
    """The center after it has absorbed the sum or mean of the contributions."""
    value, outer = center
    if rule.outer is None:
        value = jax.tree.map(lambda c, t: c + t.astype(c.dtype), value, total)
        return Center(value, outer)
    outer_tx = optax.with_extra_args_support(rule.outer)
    updates, outer = outer_tx.update(total, outer, value, **extra_args)
    return Center(optax.apply_updates(value, updates), outer)


def weighed(rule: CenterRule, weigh: Weigh | None) -> CenterRule:
    """The rule with the `weigh=` of a run; a TypeError if that is not a function."""
    if weigh is None:
        return rule
    if not callable(weigh):
        raise TypeError(
            f"weigh must be a function of a Round; got {brief(weigh)}. Write for "
            "example weigh=lambda at: (1 + at.staleness) ** -0.5."
        )
    return rule._replace(weigh=weigh)


def check_suits(rule: CenterRule, num_workers: int, period: Period) -> None:
    """Refuse a rule that was made for another number of workers, or another period."""
    if rule.num_workers not in (None, num_workers):
        raise ValueError(
            f"The rule was made for num_workers={rule.num_workers}, but there are "
            f"{num_workers} workers. Leave num_workers out of the rule, or make them "
            "equal."
        )
    if rule.check is not None:
        rule.check(period)


def check_delay(delay: int | None) -> int:
    """`delay=` of a center rule, 0 for `None`; else a TypeError or ValueError."""
    mend = "It is static, in steps: pass 1, say."
    return 0 if delay is None else integer("delay", delay, mend, least=0)
