"""A user's program: checkers agree on its types, and each one sees its mistakes.

`tests/test_types.py` gives it to Pyright, Pyrefly and ty. What is wrong on purpose has
a `type: ignore`: a checker that finds nothing there says that it is not needed.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import optax

import optx_sync as oxs

Params = dict[str, jax.Array]
Transformation = optax.GradientTransformationExtraArgs


class Speed(NamedTuple):
    """The slots of an optimizer of one's own."""

    speed: Any = 0.0


def own_optimizer(learning_rate: optax.ScalarOrSchedule) -> Transformation:
    def step(grad, slots: Speed, param, at):
        return -at.learning_rate * slots.speed, Speed(0.9 * slots.speed + grad)

    rule = oxs.optimizers.LeafRule(step, slots=Speed(), rows="all")
    return oxs.optimizers.from_rule(rule, learning_rate)


def own_rule(rate: float) -> oxs.CenterRule:
    return oxs.CenterRule(
        contribute=lambda own, center, at: rate * (own.params - own.taken),
        mean_over="workers",
        reads=("params", "taken"),
    )


def wrappers() -> None:
    inner, axis = optax.sgd(0.1), "workers"
    coded = oxs.exchange.error_feedback(oxs.exchange.quantized(bits=8))
    assert_type(coded, oxs.exchange.Exchange)
    assert_type(oxs.cross_shard(inner, axis), Transformation)
    assert_type(oxs.sync_replicas(inner, axis, replicas_to_aggregate=2), Transformation)
    assert_type(oxs.elastic_average(inner, axis, moving_rate=0.1), Transformation)
    assert_type(oxs.agn(inner, axis), Transformation)
    assert_type(oxs.local_sgd(inner, ("pods", "chips")), Transformation)
    assert_type(oxs.center_variable(inner, own_rule(0.5), axis), Transformation)
    tx = oxs.diloco(inner, axis, communication_period=4, exchange=coded)
    assert_type(tx, Transformation)
    assert_type(oxs.gossip(inner, axis), Transformation)
    assert_type(oxs.__version__, str)


def program(params: Params, inputs: jax.Array) -> Params:
    tx = oxs.sync_replicas(own_optimizer(0.1), "data", replicas_to_aggregate=2)
    workers = oxs.Workers(4, "data")

    def loss(params: Params, inputs: jax.Array) -> jax.Array:
        return jnp.mean((inputs @ params["w"]) ** 2)

    @workers.step(state=2)
    def train(params: Params, state: optax.OptState, inputs: jax.Array):
        value, grads = oxs.value_and_grad(loss)(params, inputs)
        params, state = oxs.apply_gradients(tx, grads, state, params)
        return params, state, value

    params, state = workers.start((params, tx.init(params)))
    params, state, _ = train(params, state, inputs)
    assert_type(workers.fingerprint(state), dict[int | tuple[int, ...], str])
    return workers.center((params, state))[0]


def mistakes() -> None:
    oxs.dilocco(optax.sgd(0.1), "workers")  # type: ignore
    oxs.diloco(optax.sgd(0.1), "workers", communication_period="ten")  # type: ignore
    oxs.local_sgd(optax.sgd(0.1))  # type: ignore
    oxs.diloco(optax.sgd(0.1), "workers", exchange=oxs.exchange.quantized)  # type: ignore
    oxs.cross_shard(optax.sgd, "data")  # type: ignore
    oxs.exchange.quantized(bits="8")  # type: ignore
    oxs.Workers(4)  # type: ignore
    oxs.CenterRule(own_rule)  # type: ignore
