"""What other libraries' training made of the same input, and laws of their tests.

As in `tests/test_others.py`, each figure says whose it is: as their own tests have it,
or as their code gave it, which was run for it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests.test_laws import types

AXIS, N = "workers", 2

# AI-Hypercomputer/maxtext, DiLoCo: Nesterov outside, SGD(0.1) on a linear model inside.
# Losses of the first replica in its test_diloco_training_simulation_with_mesh at
# e591f30, tests/integration/diloco_test.py; the mean of both and the center at 9dc2704.
FIRST_LOSS = [1, 0.49, 0.2401, 0.207545]
MEAN_LOSS = [1, 0.65, 0.4481, 0.574244]
CENTERS = [[2, 1, 1], [2, 1, 1], [1.5345, 1.0494, 0.5839], [1.5345, 1.0494, 0.5839]]


def test_diloco_of_maxtext():
    inputs = np.array([[[0, 1], [1, 0]], [[1, 0], [0, 1]]], np.float32)
    labels = np.array([[1, 2], [2, 3]], np.float32)
    tx = oxs.diloco(
        optax.sgd(0.1),
        AXIS,
        outer=optax.sgd(1.0, momentum=0.9, nesterov=True),
        communication_period=3,
    )

    def loss(params, inputs, labels):
        return jnp.square(inputs @ params[:2] + params[2] - labels).mean()

    def replica(inputs, labels):
        start = jnp.array([2.0, 1.0, 1.0])

        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, inputs, labels)
            params, state = oxs.apply_gradients(tx, grads, state, params)
            return (params, state), (value, state.center, params)

        return jax.lax.scan(step, (start, tx.init(start)), length=4)[1]

    losses, centers, params = jax.jit(jax.vmap(replica, axis_name=AXIS))(inputs, labels)
    np.testing.assert_allclose(losses[0], FIRST_LOSS, rtol=1e-5)
    np.testing.assert_allclose(losses.mean(0), MEAN_LOSS, rtol=1e-5)
    for center, own in zip(centers, params, strict=True):
        np.testing.assert_allclose(center, CENTERS, rtol=1e-6)
        np.testing.assert_array_equal(own[2], center[2])


# The same, streaming: three parts of one number meet every three steps, one a step,
# each of which adds 1 on the first replica and 3 on the second; rate and momentum
# outside are 1/2. So its tests/unit/diloco_fragmenter_test.py at cd694ef has it.
STREAMED = {
    1: [[2.5, 2, 2], [2.5, 4, 4]],
    2: [[3.5, 4, 3], [5.5, 4, 7]],
    3: [[4.5, 5, 5.5], [8.5, 7, 5.5]],
    6: [[9.25, 10, 10.75], [13.25, 12, 10.75]],
    9: [[14.625, 15.5, 16.375], [18.625, 17.5, 16.375]],
}


def test_streaming_diloco_of_maxtext():
    tx = oxs.diloco(
        optax.sgd(1.0),
        AXIS,
        outer=optax.sgd(0.5, momentum=0.5, nesterov=True),
        communication_period=3,
        fragments=3,
    )

    def replica(added):
        start = [jnp.ones(()) for _ in range(3)]
        grads = [-added] * 3

        def step(carry, _):
            params, state = carry
            params, state = oxs.apply_gradients(tx, grads, state, params)
            return (params, state), jnp.stack(params)

        return jax.lax.scan(step, (start, tx.init(start)), length=9)[1]

    found = jax.jit(jax.vmap(replica, axis_name=AXIS))(np.array([1.0, 3.0]))
    for step, recorded in STREAMED.items():
        np.testing.assert_array_equal(found[:, step - 1], np.float32(recorded))


# microsoft/dion 0a059a4, dion.Muon(lr=0.1, mu=0.5, weight_decay=0.25, adjust_lr=...)
# after three steps on torch 2.13.0, with its five Newton-Schulz polynomials in
# double precision (`newton_schulz_func`; its own, in bfloat16, lies within 0.015). A
# momentum of 1/2 and these gradients lose nothing where it casts them to bfloat16.
# torch's matrices are [outputs, inputs], Optax's [inputs, outputs].
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
I, J = np.indices((4, 6))
START = ((I * I + 2 * J) % 5 - 2) / np.float32(4)
GRADS = np.stack([(3 * I * J + I * (s + 2) + J * J + s) % 9 - 4 for s in range(3)])
MUON: dict[str, tuple[float | None, Any]] = {
    "spectral_norm": (  # of the [6, 4] of torch
        None,
        [
            [-0.2818031, 0.1447667, 0.4072979, -0.0500882, 0.1656331, -0.540311],
            [-0.1927481, 0.1087084, -0.5006858, 0.0389668, 0.4049091, -0.3217837],
            [0.4171178, -0.2670328, 0.2076053, -0.5097417, -0.0852606, 0.3588574],
            [0.4637176, -0.3373436, 0.454522, -0.4631419, -0.1774419, 0.4098709],
        ],
    ),
    "rms_norm": (
        0.2,
        [
            [-0.3907791, 0.0579067, 0.440977, -0.1590642, 0.2052822, -0.4941822],
            [-0.2161282, 0.1825123, -0.4783322, 0.0155867, 0.4400215, -0.2677424],
            [0.444905, -0.245842, 0.222071, -0.4819545, -0.0341043, 0.4216008],
            [0.4635449, -0.2739664, 0.3208377, -0.4633146, -0.0709768, 0.4420061],
        ],
    ),
}


@pytest.fixture
def promotion():
    """As Optax's own arithmetic asks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("promotion")
@pytest.mark.parametrize("adjusted", MUON)
def test_muon_of_dion(adjusted):
    """On every replica, and on owners of whole matrices."""
    rms, recorded = MUON[adjusted]
    muon = optax.contrib.muon(
        0.1,
        NEWTON_SCHULZ,
        beta=0.5,
        weight_decay=0.25,
        nesterov=False,
        consistent_rms=rms,
    )
    start = [jnp.asarray(START), jnp.asarray(-START)]

    def replica(own, tx):
        def step(carry, grads):
            params, state = carry
            grads = [grads + own, -grads - own]
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        grads = jnp.asarray(GRADS, jnp.float32)
        return jax.lax.scan(step, (start, tx.init(start)), grads)[0][0]

    def both(own):
        return [
            replica(own, oxs.cross_shard(muon, AXIS, shard_state=how))
            for how in (False, "leaves")
        ]

    own = np.array([-0.5, 0.5])  # their mean is the recorded gradient
    for first, second in jax.jit(jax.vmap(both, axis_name=AXIS))(own):
        np.testing.assert_allclose(first, [recorded] * N, rtol=0, atol=2e-6)
        np.testing.assert_allclose(second, -first, rtol=0, atol=1e-6)


# tensorflow 1.15, tf.contrib.opt.DropStaleGradientOptimizer, its
# drop_stale_gradient_optimizer_test.py: {(workers, staleness): (global_step,
# stale_counter, v0)}, where each worker reads, then each applies a step of 1.
DROPPED = {
    (1, 0): (1, 0, 1),
    (1, -1): (0, 1, 0),
    (2, 0): (1, 1, 1),
    (2, 1): (2, 0, 2),
    (3, 0): (1, 2, 1),
    (3, 1): (2, 1, 2),
}


def test_stale_gradients_of_tensorflow():
    """One after the other, and again: only what was applied makes others stale."""

    def run(order, limit):
        return oxs.simulate.asynchronous(
            optax.sgd(1.0),
            oxs.rules.agn(optax.sgd(1.0)),
            {"v0": jnp.zeros(()), "v1": jnp.ones(())},
            lambda worker, params, event: {"v0": -jnp.ones(()), "v1": -jnp.ones(())},
            workers=order,
            num_workers=3,
            communication_period=1,
            weigh=lambda at: jnp.where(at.staleness <= limit, 1.0, 0.0),
        ).center

    orders = np.array([np.arange(12) % workers for workers, _ in DROPPED])
    limits = np.array([limit for _, limit in DROPPED])
    histories = jax.jit(jax.vmap(run))(orders, limits)
    for number, (workers, limit) in enumerate(DROPPED):
        step, read, applied = 0, [0] * workers, []
        for worker in orders[number]:  # the original's rule; what it drops is no step
            applied.append(step - read[worker] <= limit)
            step += applied[-1]
            read[worker] = step
        found = histories["v0"][number]
        global_step, stale_counter, v0 = DROPPED[workers, limit]
        assert found[workers - 1] == v0 == global_step
        assert workers - sum(applied[:workers]) == stale_counter
        np.testing.assert_array_equal(found, np.cumsum(applied))
        np.testing.assert_array_equal(histories["v1"][number], found + 1)


contrib: Any = optax.contrib
# google-deepmind/optax 2edbcbe, contrib/_common_test.py: the optimizers of its laws.
CONTRIBUTED: dict[str, Any] = {
    "acprop": contrib.acprop(1e-3),
    "ademamix": contrib.ademamix(1e-3),
    "simplified_ademamix": contrib.simplified_ademamix(1e-3),
    "adopt": contrib.adopt(1e-2),
    "cocob": contrib.cocob(),
    "cocob, decayed": contrib.cocob(weight_decay=1e-2),
    "dadapt_adamw": contrib.dadapt_adamw(1e-1),
    "dog": contrib.dog(1.0),
    "dowg": contrib.dowg(1.0),
    "madgrad": contrib.madgrad(1e-2),
    "momo": contrib.momo(1e-1),
    "momo_adam": contrib.momo_adam(1e-1),
    "muon": contrib.muon(1e-2),
    "prodigy": contrib.prodigy(1e-1),
    "schedule_free_sgd": contrib.schedule_free_sgd(1e-2, warmup_steps=5000),
    "schedule_free_adamw": contrib.schedule_free_adamw(1e-2, warmup_steps=5000),
    "sophia": contrib.sophia(1e-2),
    "galore": contrib.galore(1e-2, rank=8),
    "mechanize": contrib.mechanize(optax.sgd(1e-1), weight_decay=0.0),
    "schedule_free": contrib.schedule_free(optax.sgd(1e-2), learning_rate=1e-2),
    "reduce_on_plateau": optax.chain(optax.sgd(1e-3), contrib.reduce_on_plateau()),
}


@pytest.mark.usefixtures("promotion")
def test_laws_of_optaxs_contributed_optimizers():
    """Traced in half precision, in `cross_shard`: what its tests ask of each alone.

    It takes arguments that it does not know, and a value of another precision; its
    state can be mapped over; state and updates keep their types, in a conditional too;
    its updates are of the parameters' dtype.
    """

    def objective(params):
        return jnp.sum(params**2)

    def replica(params, tx, more):
        value, grads = jax.value_and_grad(objective)(params)
        state = tx.init(params)
        mapped = optax.tree_utils.tree_map_params(tx, lambda x: x, state)
        more = more | {"value": value.astype(jnp.float16), "nobody_expects": 1}
        update = jax.lax.cond(
            params[0] > 0,
            lambda: tx.update(grads, state, params, **more),
            lambda: (params, state),
        )
        return (params, state), (params, mapped), update

    for name, inner in CONTRIBUTED.items():
        tx = oxs.cross_shard(inner, AXIS, equal_extra_args=("obj_fn",))
        more = {"obj_fn": objective} if name == "sophia" else {}
        run = jax.vmap(functools.partial(replica, tx=tx, more=more), axis_name=AXIS)
        before, *others = jax.eval_shape(run, jax.ShapeDtypeStruct((N, 2), "bfloat16"))
        for after in others:
            assert jax.tree.structure(after) == jax.tree.structure(before), name
            assert types(after) == types(before), name


# Of those, whose rate may be a schedule: with the rate that its tests give, and what
# they keep out of `optax.inject_hyperparams`.
SCHEDULED: dict[str, tuple[Any, float, str]] = {
    "adopt": (contrib.adopt, 1e-2, "clip_value_fn"),
    "muon": (contrib.muon, 1e-2, "ns_steps"),
}


@pytest.mark.usefixtures("promotion")
@pytest.mark.parametrize("name", SCHEDULED)
def test_rates_and_accumulation_as_optax_tests_them(name):
    """In `cross_shard`, ten steps at a constant schedule or an injected rate are equal.

    And four accumulated gradients move it in the fourth, as their mean does.
    """
    make, rate, static = SCHEDULED[name]
    schedule = optax.constant_schedule(rate)
    injected = optax.inject_hyperparams(make, static)(learning_rate=rate)
    plain, *equal = (
        oxs.cross_shard(inner, AXIS) for inner in (make(rate), make(schedule), injected)
    )
    late = optax.MultiSteps(plain, 4).gradient_transformation()
    start = jnp.array([[-1.0, 10.0], [1.0, 3.0]])

    def run(tx, own):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(2 * params + own, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (start, tx.init(start)), length=10)[1]

    def replica(own):
        return [run(tx, own) for tx in (plain, *equal, late)]

    found = jax.jit(jax.vmap(replica, axis_name=AXIS))(np.array([-1.0, 1.0]))
    plain, *equal, late = map(np.asarray, found)
    assert (plain[0] == plain[1]).all() and (plain[0, 0] != plain[0, 9]).all()
    for other in equal:
        np.testing.assert_allclose(other, plain, rtol=1e-5)
    assert (late[:, :3] == np.asarray(start)).all()
    np.testing.assert_allclose(
        late[:, 3:10], plain[:, [0, 0, 0, 0, 1, 1, 1]], rtol=1e-6
    )


# Federated averaging: three clients of 4, 8 and 12 examples make three SGD steps of 4
# examples each. federated_averaging of FedJAX 0.0.17 gave these after 1, 2, 3 and 4
# rounds; FedAvg and FedAvgM of Flower 1.42.0 gave the first two to 2e-7. Flower's
# FedAdam corrects the bias of round t as Adam does that of t + 1: it gives others.
CLIENTS = 4, 8, 12
FEDERATED: dict[str, Any] = {
    "average": [
        [0.6921486, -0.7019815, 0.2923031],
        [0.4946808, -0.5179603, 0.1798384],
        [0.3657860, -0.4035438, 0.1234056],
        [0.2798402, -0.3317145, 0.0994278],
    ],
    "server momentum": [
        [0.7845040, -0.7913871, 0.3546122],
        [0.4291496, -0.4508812, 0.1250391],
        [0.0363487, -0.0825764, -0.1050853],
        [-0.2941851, 0.2130599, -0.2565896],
    ],
    "server Adam": [
        [0.9003239, -0.9003345, 0.4004793],
        [0.8012039, -0.8013049, 0.3019760],
        [0.7031289, -0.7034888, 0.2055352],
        [0.6067113, -0.6076275, 0.1126308],
    ],
}
SERVERS = {
    "average": optax.sgd(1.0),
    "server momentum": optax.sgd(0.7, momentum=0.9),
    "server Adam": optax.adam(0.1, 0.9, 0.99, eps=1e-3),
}


@pytest.mark.parametrize("server", FEDERATED)
def test_federated_averaging_of_fedjax_and_flower(server):
    tx = oxs.diloco(optax.sgd(0.1), AXIS, outer=SERVERS[server], communication_period=3)
    client = np.arange(3)[:, None]
    row = np.arange(12) % np.array(CLIENTS)[:, None]  # a client of few begins again
    column = 5 * np.arange(3) + 7 * client
    features = ((3 * row[..., None] + column[:, None]) % 11 - 5) / 5
    targets = ((2 * row + 3 * client) % 7 - 3) / 3
    batches = (
        np.float32(features.reshape(3, 3, 4, 3)),
        np.float32(targets.reshape(3, 3, 4)),
    )

    def loss(params, features, targets):
        return jnp.square(features @ params - targets).mean()

    def train(batches, examples):
        start = jnp.array([1.0, -1.0, 0.5])

        def step(carry, batch):
            params, state = carry
            grads = jax.grad(loss)(params, *batch)
            given = {"weight": examples}
            params, state = oxs.apply_gradients(tx, grads, state, params, **given)
            return (params, state), params

        def a_round(carry, _):
            carry, params = jax.lax.scan(step, carry, batches)
            return carry, params[-1]

        return jax.lax.scan(a_round, (start, tx.init(start)), length=4)[1]

    run = jax.jit(jax.vmap(train, axis_name=AXIS))
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam promotes dtypes
        found = run(batches, np.array(CLIENTS, np.float32))
    for params in found:
        np.testing.assert_allclose(params, FEDERATED[server], atol=1e-6)
