"""The same 30 steps walked by each driver of a center rule: the same numbers.

Lockstep (an axis of one worker, and no axis), `simulate.asynchronous`, `gossip` and the
runtime call the same functions of a worker. With one worker they give the same
parameters and center in every step; with more, those drivers do whose workers see the
same. A driver is left out of what it does not have: gossip has no rules that add up or
take a part of the way, no codes and no parts; the runtime's server refuses a NaN; only
lockstep and gossip have `weight=`. What lockstep calls `overlap` the two others call a
delay of a step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optx_sync as oxs
from optx_sync.runtime import Server, Worker

STEPS = 30
RNG = np.random.default_rng(0)
# Of a size of whole blocks, as lockstep codes all leaves in one buffer.
PARAMS = {
    "w": RNG.normal(size=(8, 2)).astype(np.float32),
    "b": RNG.normal(size=(16,)).astype(np.float32),
    "half": np.asarray(RNG.normal(size=(16,)), jnp.bfloat16),
}
TARGETS = {k: RNG.normal(size=(STEPS, *p.shape)) for k, p in PARAMS.items()}
SCALE = np.ones(STEPS + 1)
BROKEN = SCALE.copy()
BROKEN[[7, 15]] = np.nan  # in the middle of a round
BROKEN[11] = np.inf  # in the step of one
INNER = optax.sgd(0.1, momentum=0.5)
OUTER = optax.sgd(0.7, momentum=0.5, nesterov=True)
CODE = oxs.exchange.error_feedback(oxs.exchange.quantized(4, block=16))
WEIGHTS = RNG.integers(0, 3, STEPS + 1).astype(np.float32)
WEIGHTS[[2, 3, 11, 12]] = 0  # alone and with another
ELASTIC = oxs.rules.elastic(moving_rate=0.2, rho=0.3)
AGN = oxs.rules.agn(optax.sgd(0.3))


def grads_at(step, params, scale=SCALE, place: Any = 0):
    """Gradients that depend on where the worker stands, and which one it is."""

    def grad(x, target):
        target, size = jnp.asarray(target, x.dtype), jnp.asarray(scale, x.dtype)
        far = 1 + jnp.asarray(place, x.dtype)
        return (x - far * target[step]) * size[step + place]

    return jax.tree.map(grad, params, TARGETS)


def start():
    return jax.tree.map(jnp.asarray, PARAMS)


def walk(tx, params, scale, weights, place):
    """(parameters, centers) after each step, by `apply_gradients`."""

    def step(carry, number):
        params, state = carry
        extra = {}
        if weights is not None:
            extra["weight"] = jnp.asarray(weights)[number + place]
        grads = grads_at(number, params, scale, place)
        params, state = oxs.apply_gradients(tx, grads, state, params, **extra)
        return (params, state), (params, state.center)

    return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(STEPS))[1]


def lockstep(rule, axis, params, place=0, scale=SCALE, weights=None, **options):
    tx = oxs.center_variable(INNER, rule, axis, **options)
    return walk(tx, params, scale, weights, place)


def gossip(rule, axis, params, place=0, scale=SCALE, weights=None, **options):
    tx = oxs.gossip(INNER, axis, outer=rule.outer, **options)
    return walk(tx, params, scale, weights, place)


def on_an_axis(driver, rule, workers=1, **options):
    """All workers of a driver that maps them: leaves [workers, steps, ...]."""
    mapped = jax.vmap(
        lambda params, place: driver(rule, "workers", params, place, **options),
        axis_name="workers",
    )
    return mapped(oxs.by_hand.replicate(start(), workers), jnp.arange(workers))


def asynchronous(rule, scale=SCALE, workers=1, overlap=False, **options):
    run = oxs.simulate.asynchronous(
        INNER,
        rule,
        start(),
        lambda place, params, event: grads_at(event, params, scale, place),
        workers=np.arange(STEPS) % workers,
        num_workers=workers,
        delay=int(overlap),
        record="all",
        **options,
    )
    return run.params, run.center


def runtime(rule, workers=1, weigh=None, overlap=False, **options):
    options |= {"num_workers": workers, "delay": int(overlap)}
    rule = rule._replace(weigh=weigh)
    server = Server(start(), rule, inner=INNER, **options)
    party = [
        Worker(server, start(), INNER, rule, index=i, **options) for i in range(workers)
    ]
    grads, params, centers = jax.jit(grads_at), [], []
    landed = server.center()
    for event in range(STEPS):
        worker, before, rounds = (
            party[event % workers],
            server.center(),
            server.global_step,
        )
        worker.step(grads(event, worker.params, place=event % workers))
        params.append(jax.tree.map(np.asarray, worker.params))
        # The server absorbs what arrives; in lockstep a sum lands with the answer.
        if not worker._life.sent.answers:
            landed = server.center()
        elif server.global_step > rounds:
            landed = before
        centers.append(landed)
    return tuple(jax.tree.map(lambda *x: np.stack(x), *of) for of in (params, centers))


LOCAL, DILOCO = oxs.rules.local_sgd(), oxs.rules.diloco(OUTER)
DROPS = {"drop_nonfinite": True, "scale": BROKEN}
# name: (rule, the drivers beside lockstep, options)
CASES: dict[str, tuple[oxs.CenterRule, str, dict[str, Any]]] = {
    "local_sgd": (LOCAL, "gossip asynchronous runtime", {}),
    "diloco": (DILOCO, "gossip asynchronous runtime", {}),
    "elastic": (ELASTIC, "asynchronous runtime", {}),
    "agn": (AGN, "asynchronous runtime", {}),
    "agn_updates": (oxs.rules.agn(None, accumulate="updates"), "asynchronous", {}),
    "schedule": (
        DILOCO,
        "gossip asynchronous runtime",
        {"communication_period": lambda step: jnp.where(step < 6, 1, 4)},
    ),
    "weights": (DILOCO, "gossip", {"weights": WEIGHTS}),
    "broken": (DILOCO, "gossip asynchronous", DROPS),
    "broken_elastic": (ELASTIC, "asynchronous", DROPS),
    "broken_agn": (AGN, "asynchronous", DROPS),
    "code_agn": (AGN, "asynchronous runtime", {"exchange": CODE}),
    "parts_elastic": (ELASTIC, "asynchronous runtime", {"fragments": 2}),
    "later_elastic": (ELASTIC, "asynchronous runtime", {"overlap": True}),
    "later_agn": (AGN, "asynchronous runtime", {"overlap": True}),
    "in_line": (DILOCO, "asynchronous runtime", {"fragments": 4, "overlap": True}),
    "coded_parts": (
        DILOCO,
        "asynchronous runtime",
        {
            "fragments": lambda path, leaf: int("w" in str(path[0])),
            "overlap": True,
            "exchange": CODE,
        },
    ),
    "rows": (AGN, "asynchronous runtime", {"fragments": oxs.rules.strided(2)}),
    "together": (
        DILOCO,
        "asynchronous",
        {
            # Whole leaves, and so whole blocks.
            "fragments": lambda path, leaf: int("w" in str(path[0])),
            "exchange": CODE,
            **DROPS,
        },
    ),
}


def assert_same(history, expected, what, coded=False):
    """To the bit, but for how XLA fuses, and that lockstep codes the mean once more.

    With a code that is not followed through bfloat16, where it may cross a rounding.
    Where XLA rounds inside of the optimizer as it fuses (JAX 0.12), to two places.
    """
    for tree, other in zip(*jax.device_get((history, expected)), strict=True):
        for name in ("w", "b", "half")[: 2 if coded else 3]:
            found, due = (np.asarray(x[name], np.float32) for x in (tree, other))
            near = 2**-6 if name == "half" and jax.__version_info__ >= (0, 12) else 1e-6
            np.testing.assert_allclose(found, due, near, near, err_msg=what)


def test_one_worker_walks_the_same_way_with_every_driver():
    mapped = {"axis": lockstep, "gossip": gossip}

    def of_case(rule, drivers, **options):
        found: dict[str, Any] = {}
        for name, driver in mapped.items():
            if name in ("axis", *drivers.split()):
                all_workers = on_an_axis(driver, rule, **options)
                found[name] = jax.tree.map(lambda x: x[0], all_workers)
        if "exchange" not in options:
            found["alone"] = lockstep(rule, None, start(), **options)
        if "asynchronous" in drivers:
            found["asynchronous"] = asynchronous(rule, **options)
        return found

    cases = {
        name: (rule, drivers, {"communication_period": 4} | options)
        for name, (rule, drivers, options) in CASES.items()
    }
    found = jax.jit(
        lambda: {
            k: of_case(rule, on, **given) for k, (rule, on, given) in cases.items()
        }
    )()
    for name, (rule, drivers, options) in cases.items():
        if "runtime" in drivers:
            found[name]["runtime"] = runtime(rule, **options)
        expected = found[name].pop("axis")
        for x in jax.tree.leaves(expected):
            assert np.ptp(np.asarray(x, float), axis=0).max() > 0.1, name
        for driver, history in found[name].items():
            assert_same(history, expected, f"{name}, {driver}", "exchange" in options)


def test_two_workers_in_turn():
    """Asynchronously and in the runtime, each step a round, or a part of one."""
    rules = {"local_sgd": LOCAL, "diloco": DILOCO, "elastic": ELASTIC, "agn": AGN}
    options: dict[str, Any] = {
        "workers": 2,
        "communication_period": 1,
        "weigh": lambda at: 0.5**at.staleness,
    }
    found, parts = jax.jit(
        lambda: (
            {name: asynchronous(rule, **options) for name, rule in rules.items()},
            {
                name: asynchronous(rule, workers=2, fragments=2, communication_period=2)
                for name, rule in rules.items()
            },
        )
    )()
    for name, rule in rules.items():
        assert_same(runtime(rule, **options), found[name], name)
        in_parts = runtime(rule, 2, fragments=2, communication_period=2)
        assert_same(in_parts, parts[name], f"{name}, in parts")
