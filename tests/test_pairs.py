"""Every wrapper around 27 of Optax's optimizers: 216 pairs, each gives Optax's answer.

Gradients that meet are reduced to their mean, and equal workers stay equal, so that in
every pair the parameters are those of the inner optimizer alone on the mean gradient.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts

AXIS, N, STEPS = contexts.AXIS, contexts.REPLICAS, 4
PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)}
contrib = optax.contrib

INNERS: dict[str, Any] = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lion": optax.lion(0.1),
    "lamb": optax.lamb(0.1),
    "novograd": optax.novograd(0.1),
    "sm3": optax.sm3(0.1),
    "rprop": optax.rprop(0.1),
    "adan": optax.adan(0.1),
    "noisy_sgd": optax.noisy_sgd(0.1, key=0),
    "optimistic_adam": optax.optimistic_adam_v2(0.1),
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
    "muon": contrib.muon(0.1),
    "prodigy": contrib.prodigy(),
    "dog": contrib.dog(1.0),
    "dowg": contrib.dowg(1.0),
    "cocob": contrib.cocob(),
    "schedule_free": contrib.schedule_free_sgd(0.1),
    "dadapt": contrib.dadapt_adamw(0.1),
    "mechanize": contrib.mechanize(optax.adam(0.1)),
    "momo": contrib.momo(0.1),
    "polyak": optax.polyak_sgd(),
    "plateau": optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=1)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a"}
    ),
    "inject": optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10)
    ),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
}


def around(wrapper, *arguments, **options):
    return lambda inner: wrapper(inner, AXIS, *arguments, **options)


def chained(inner):
    return optax.chain(oxs.all_reduce_grads(AXIS), inner)


MEANS: dict[str, Any] = {
    "reduce_grads": chained,
    "cross_shard": around(oxs.cross_shard),
}
MEANS["sync_replicas"] = around(oxs.sync_replicas, N)
every, pull = {"communication_period": 2}, {"moving_rate": 0.0, "rho": 0.0}
WRAPPERS: dict[str, Any] = (
    MEANS
    | {  # in the others no replica has a gradient of its own
        "elastic": around(oxs.elastic_average, **pull, **every),
        "agn": around(oxs.agn, communication_period=1),
        "local_sgd": around(oxs.local_sgd, drop_nonfinite=True, **every),
        "local_sgd_average": around(oxs.local_sgd, inner_state="average", **every),
        "diloco": around(oxs.diloco, outer=optax.sgd(1.0), **every),
    }
)
# Optax's own conditional there joins what varies with constants: a checked `shard_map`
# refuses it without a wrapper, too, where its loss varies.
REFUSED_IN_CHECKED_SHARD_MAP = ("plateau",)
RNG = np.random.default_rng(0)
MEAN = {
    "w": RNG.normal(size=(STEPS, 3, 2)).astype(np.float32),
    "value": np.array([2.0, 1.0, 1.5, 1.5], np.float32),
}
# A replica's own, beside that: as far above the mean as another one's is below.
OWN = jax.tree.map(
    lambda x: np.stack([x, x, x + 0.5, x - 0.5]).astype(np.float32), MEAN
)
SAME = jax.tree.map(lambda x: np.stack([x] * N), MEAN)


def history(tx, inputs, params=PARAMS, reduce_value=False):
    """The parameters after each step; a state of another form would fail the loop."""
    params = jax.tree.map(jnp.asarray, params)

    def step(carry, now):
        params, state = carry
        value = oxs.reduce(now["value"], AXIS) if reduce_value else now["value"]
        updates, state = tx.update({"w": now["w"]}, state, params, value=value)
        moved: Any = optax.apply_updates(params, updates)
        return (moved, state), moved["w"]

    return jax.lax.scan(step, (params, tx.init(params)), inputs)[1]


@pytest.fixture(autouse=True)
def promotion():
    """As most of Optax asks."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def pair(wrapper, inner):
    """A pair's run; the loss of a chain's other links is reduced by the caller."""
    tx = WRAPPERS[wrapper](INNERS[inner])
    return functools.partial(history, tx, reduce_value=wrapper == "reduce_grads")


def test_numbers_under_vmap():
    """Of every second inner optimizer in one wrapper, another one in turn."""
    turns = list(zip(itertools.cycle(WRAPPERS), list(INNERS)[::2], strict=False))

    def numbers():
        for wrapper, inner in turns:
            run = jax.vmap(pair(wrapper, inner), axis_name=AXIS)
            found = run(OWN if wrapper in MEANS else SAME)
            yield found, history(INNERS[inner], MEAN)

    for turn, (found, alone) in zip(
        turns, jax.jit(lambda: [*numbers()])(), strict=True
    ):
        for one in found:
            np.testing.assert_allclose(
                one, alone, rtol=2e-5, atol=2e-6, err_msg=str(turn)
            )


def on_mesh(wrapper, inner):
    """A pair in a checked shard_map: equal replicas, or workers of their own."""
    run, own = pair(wrapper, inner), wrapper in MEANS

    def equal(inputs):
        return run(by_hand.first(inputs))

    def workers(params, inputs):
        return by_hand.replicate(run(by_hand.first(inputs), by_hand.first(params)), 1)

    arguments = (OWN,) if own else (by_hand.replicate(PARAMS, N), SAME)
    return jax.shard_map(
        equal if own else workers,
        mesh=contexts.mesh(),
        in_specs=(P(AXIS),) * len(arguments),
        out_specs=P() if own else P(AXIS),
    ), arguments


def test_216_pairs_in_a_checked_shard_map():
    """Traced: parameters and state keep their types, or the refusal is ours."""
    assert len(INNERS) * len(WRAPPERS) == 216
    for wrapper, inner in itertools.product(WRAPPERS, INNERS):
        run, arguments = on_mesh(wrapper, inner)
        if inner in REFUSED_IN_CHECKED_SHARD_MAP and wrapper not in MEANS:
            with pytest.raises(TypeError, match=r"shard_map\(..., check_vma=False"):
                jax.eval_shape(run, *arguments)
            continue
        shape = jax.eval_shape(run, *arguments).shape
        assert shape == ((STEPS, 3, 2) if wrapper in MEANS else (N, STEPS, 3, 2))
