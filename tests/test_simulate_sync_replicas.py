"""The event replay of synchronous replicas, against recordings of the original."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import simulate
from optx_sync.replicas.tokens import Tokens, hand_out
from tests import contexts
from tests.recorded import arrays_of, inner_of, recorded
from tests.reference import sync_replicas as reference
from tests.refusals import all_refused

OF_EVERY_EVENT = ("accepted", "updated", "tokens", "global_step")


def decay_of(averages):
    if averages is None or averages["num_updates"] is None:
        return averages and averages["decay"]
    return lambda step: jnp.minimum(averages["decay"], (1 + step) / (10 + step))


CASES = recorded("sync_replicas")
del CASES["sync_n2_r2_sgd_sparse_duplicates"]  # Equal rows are summed first here.


@pytest.mark.parametrize("name", CASES)
def test_recorded_trajectory(name):
    hyper = CASES[name]["hyperparameters"]
    data, named = arrays_of(CASES[name])
    rows, values = named("idx"), named("val")

    def grad_fn(worker, params, event):
        del worker, params
        grads, i, v = jax.tree.map(
            lambda x: jnp.asarray(x)[event], (named("g"), rows, values)
        )
        return grads | {leaf: oxs.IndexedSlices(i[leaf], v[leaf]) for leaf in rows}

    run: Any = jax.jit(
        lambda params: simulate.sync_replicas(
            inner_of(hyper["inner"]),
            params,
            grad_fn,
            data["worker"],
            replicas_to_aggregate=hyper["replicas_to_aggregate"],
            total_num_replicas=hyper["total_num_replicas"],
            num_tokens=hyper["hook_num_tokens"],
            variable_averages=decay_of(hyper["variable_averages"]),
            initial_global_step=hyper["initial_global_step"],
        )
    )(named("p0"))
    for field in (*OF_EVERY_EVENT, "blocked", "local_step"):
        np.testing.assert_array_equal(getattr(run, field), data[field], field)
    contexts.assert_close(run.params, named("p"))
    contexts.assert_close(run.averages or {}, named("ema"))


@pytest.mark.parametrize(
    ("required", "workers", "tokens"),
    [(2, 5, -1), (3, 3, 0), (5, 2, -1), (4, 2, 2), (1, 3, -1), (2, 4, 9)],
)
def test_random_schedule_is_the_machine(required, workers, tokens):
    """Bookkeeping against a queue that is a queue, events of waiting ones included."""
    schedule = np.random.default_rng(required).integers(0, workers, 300)
    run: Any = simulate.sync_replicas(
        optax.identity(),
        jnp.float32(0),
        lambda worker, params, event: params,
        schedule,
        replicas_to_aggregate=required,
        total_num_replicas=workers,
        num_tokens=tokens,
        initial_global_step=3,
    )
    initial = required if tokens == -1 else tokens
    expected = reference.machine(schedule.tolist(), required, workers, initial, 3)
    for field, want in expected.items():
        np.testing.assert_array_equal(getattr(run, field), want, field)
    assert tokens == 9 or expected["updated"].sum() > 10, "the case shows updates"


def test_a_host_hands_out_the_tokens_as_a_compiled_step_does():
    """In NumPy's arrays to NumPy's: those in front get the old ones, nobody waits."""
    queue, waits = Tokens(old=1, new=2), np.array([True, False, True, True, True])
    on_host = hand_out(queue, waits, place := np.array([3, 1, 1, 4, 2]))
    on_device = jax.jit(hand_out)(queue, waits, place)
    served, late, left = on_host
    assert (served.tolist(), late.tolist()) == (
        [True, False, True, False, True],
        [False, False, True, False, False],
    )
    assert tuple(left) == (0, 0)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(on_host))
    jax.tree.map(np.testing.assert_array_equal, on_host, on_device)


def toy(schedule=(0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1), params=None, **options) -> Any:
    """Gradients are the first two parameters, times the worker's number from 1."""
    return simulate.sync_replicas(
        optax.sgd(0.5),
        {"w": jnp.ones(2)} if params is None else params,
        lambda who, params, event: {"w": params["w"][:2] * (1 + who).astype("f4")},
        jnp.asarray(schedule),
        **{"replicas_to_aggregate": 2, "total_num_replicas": 3, **options},
    )


def test_record_every_n_events_or_a_function():
    everything, some = (toy(variable_averages=0.5, record=n) for n in ("all", 4))
    for field in ("params", "averages", "blocked", "local_step"):
        every = jax.tree.map(lambda x: x[3::4], getattr(everything, field))
        contexts.assert_close(getattr(some, field), every)
    for field in OF_EVERY_EVENT:
        np.testing.assert_array_equal(getattr(some, field), getattr(everything, field))
    w, averages = everything.params["w"], everything.averages["w"]
    contexts.assert_close(some.final.params["w"], w[-1])
    contexts.assert_close(some.final.averages["w"], averages[-1])
    of_function = toy(
        variable_averages=0.5,
        record=lambda params, averages: params["w"][0] - averages["w"][0],
    )
    contexts.assert_close(of_function.recorded, w[:, 0] - averages[:, 0])
    assert of_function.params is None
    assert of_function.final.local_step.tolist() == some.final.local_step.tolist()


def test_a_waiting_workers_event_changes_nothing():
    run: Any = simulate.sync_replicas(
        optax.sgd(1.0),
        jnp.float32(1),
        # Worker 0 waits from its first event on, and would poison the sum.
        lambda worker, params, event: jnp.where(event == 1, jnp.nan, params),
        jnp.array([0, 0, 1]),
        replicas_to_aggregate=2,
        num_tokens=0,
    )
    assert run.accepted.tolist() == [True, False, True]
    assert run.blocked.tolist() == [[True, False], [True, False], [False, False]]
    assert run.params.tolist() == [1, 1, 0]


def test_a_traced_schedule_may_name_nobody():
    alone = toy([0, 1, 2, 1])._replace(events=None)
    among = jax.jit(toy)(jnp.array([7, 0, -1, 1, 2, 3, 1]))
    np.testing.assert_array_equal(among.events, np.arange(7))
    assert not np.any(among.accepted[jnp.array([0, 2, 5])])
    for got, want in zip(
        *map(jax.tree.leaves, (among._replace(events=None), alone)), strict=True
    ):
        known = got[jnp.array([1, 3, 4, 6])] if got.shape[:1] == (7,) else got
        np.testing.assert_array_equal(known, want)


test_refused = all_refused(globals())(r"""
toy(total_num_replicas=1, num_tokens=0)  # ValueError: Too few .*=0, and 1 are
toy(num_tokens=-5)  # ValueError: num_tokens must be -1 or more
toy(num_tokens=1.0)  # TypeError: num_tokens must be
toy(replicas_to_aggregate=0)  # ValueError: must be 1 or more
toy(initial_global_step=-1)  # ValueError: must be 0 or more, .* -1
toy([0, 3])  # ValueError: names worker 3, but there are 3
toy([0, -1])  # ValueError: names worker -1
toy([1.0])
toy([[0, 1]])  # ValueError: must be integers along one axis
toy(record="some")  # TypeError: record must be
toy(record=0)  # ValueError: record must be 1
toy(variable_averages=2.0)  # ValueError: a decay
toy(params={})  # ValueError: at least one variable
toy(params={"w": jnp.ones(3)})  # ValueError: 'w'.* has shape \(2,\)
""")
