"""The event replay of synchronous replicas, against recordings of the original."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import simulate
from tests import contexts
from tests.reference import sync_replicas as reference

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = {
    case["name"]: case
    for case in json.loads((GOLDEN / "manifest.json").read_text())["cases"]
    if case["group"] == "sync_replicas"
    # Equal rows are summed here before they are accumulated.
    and not case["name"].endswith("_sparse_duplicates")
}


def inner_of(hyper):
    rate = hyper["learning_rate"]
    if hyper["class"] == "MomentumOptimizer":
        return oxs.optimizers.momentum(rate, hyper["momentum"], hyper["use_nesterov"])
    if hyper["class"] == "AdagradOptimizer":
        return oxs.optimizers.adagrad(rate, hyper["initial_accumulator_value"])
    if hyper["class"] == "AdamOptimizer":
        return oxs.optimizers.adam(
            rate, hyper["beta1"], hyper["beta2"], hyper["epsilon"]
        )
    assert hyper["class"] == "GradientDescentOptimizer"
    return oxs.optimizers.gradient_descent(rate)


def decay_of(averages):
    if averages is None:
        return None
    if averages["num_updates"] is None:
        return averages["decay"]

    def schedule(step):
        return jnp.minimum(averages["decay"], (1 + step) / (10 + step))

    return schedule


def gradients_of(case, data):
    names = [leaf["name"] for leaf in case["params"]]

    def recorded(worker, params, event):
        del worker, params
        grads = {}
        for name in names:
            if f"idx_{name}" in data:
                rows = jnp.asarray(data[f"idx_{name}"])[event]
                values = jnp.asarray(data[f"val_{name}"])[event]
                grads[name] = oxs.IndexedSlices(rows, values)
            else:
                grads[name] = jnp.asarray(data[f"g_{name}"])[event]
        return grads

    def computed(worker, params, event):
        del event
        return {
            name: jnp.asarray(data[f"a_{name}"])[worker]
            * (params[name] - jnp.asarray(data[f"c_{name}"])[worker])
            for name in names
        }

    return computed if case["objective"] == "quadratic" else recorded


@pytest.mark.parametrize("name", CASES)
def test_recorded_trajectory(name):
    case = CASES[name]
    hyper = case["hyperparameters"]
    with np.load(GOLDEN / case["file"]) as arrays:
        data = dict(arrays)
    names = [leaf["name"] for leaf in case["params"]]
    run: Any = jax.jit(
        lambda params: simulate.sync_replicas(
            inner_of(hyper["inner"]),
            params,
            gradients_of(case, data),
            data["worker"],
            replicas_to_aggregate=hyper["replicas_to_aggregate"],
            total_num_replicas=hyper["total_num_replicas"],
            num_tokens=hyper["hook_num_tokens"],
            variable_averages=decay_of(hyper["variable_averages"]),
            initial_global_step=hyper["initial_global_step"],
        )
    )({leaf: data[f"p0_{leaf}"] for leaf in names})
    for field in (
        "accepted", "updated", "blocked", "local_step", "tokens", "global_step"
    ):  # fmt: skip
        np.testing.assert_array_equal(getattr(run, field), data[field], field)
    contexts.assert_close(run.params, {leaf: data[f"p_{leaf}"] for leaf in names})
    if hyper["variable_averages"] is None:
        assert run.averages is None
    else:
        averages = {leaf: data[f"ema_{leaf}"] for leaf in names}
        contexts.assert_close(run.averages, averages)


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
    if tokens != 9:
        assert expected["updated"].sum() > 10, "the case shows updates"


def toy(record: Any = "all", length=11) -> Any:
    return simulate.sync_replicas(
        optax.sgd(0.5),
        {"w": jnp.ones(2)},
        lambda worker, params, event: jax.tree.map(
            lambda p: p * (1 + worker).astype(p.dtype), params
        ),
        np.arange(length) % 3,
        replicas_to_aggregate=2,
        total_num_replicas=3,
        variable_averages=0.5,
        record=record,
    )


def test_record_every_n_events_or_a_function():
    everything, some = toy(), toy(4)
    for field in ("params", "averages", "blocked", "local_step"):
        contexts.assert_close(
            getattr(some, field),
            jax.tree.map(lambda x: x[3::4], getattr(everything, field)),
        )
    for field in ("accepted", "updated", "tokens", "global_step"):
        np.testing.assert_array_equal(getattr(some, field), getattr(everything, field))
    contexts.assert_close(some.final.params["w"], everything.params["w"][-1])
    contexts.assert_close(some.final.averages["w"], everything.averages["w"][-1])
    of_function = toy(lambda params, averages: params["w"][0] - averages["w"][0])
    difference = everything.params["w"][:, 0] - everything.averages["w"][:, 0]
    contexts.assert_close(of_function.recorded, difference)
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
    def run(schedule) -> Any:
        return simulate.sync_replicas(
            optax.sgd(0.5),
            jnp.float32(1),
            lambda worker, params, event: params,
            schedule,
            replicas_to_aggregate=1,
            total_num_replicas=2,
        )

    alone = run(jnp.array([0, 1, 1]))
    among = jax.jit(run)(jnp.array([7, 0, -1, 1, 2, 1]))
    np.testing.assert_array_equal(among.events, np.arange(6))
    alone, among = alone._replace(events=None), among._replace(events=None)
    for got, want in zip(jax.tree.leaves(among), jax.tree.leaves(alone), strict=True):
        if got.shape[:1] == (6,):
            got = got[jnp.array([1, 3, 5])]
        np.testing.assert_array_equal(got, want)
    assert not np.any(among.accepted[jnp.array([0, 2, 4])])


def refuse(kind, message, **changed):
    arguments: Any = {
        "inner": optax.sgd(1.0),
        "params": jnp.float32(0),
        "grad_fn": lambda worker, params, event: params,
        "workers": jnp.array([0, 1]),
        "replicas_to_aggregate": 2,
    }
    with pytest.raises(kind, match=message):
        simulate.sync_replicas(**(arguments | changed))


def test_refused():
    refuse(
        ValueError,
        "Too few tokens .* got num_tokens=1, and 2 are needed",
        replicas_to_aggregate=4,
        total_num_replicas=2,
        num_tokens=1,
    )
    refuse(ValueError, "num_tokens must be -1 or more", num_tokens=-5)
    refuse(TypeError, "num_tokens must be", num_tokens=1.0)
    refuse(ValueError, "at least one variable", params={})
    refuse(ValueError, "must be 1 or more", replicas_to_aggregate=0)
    refuse(ValueError, "names worker 2, but there are 2", workers=jnp.array([0, 2]))
    refuse(ValueError, "names worker -1", workers=jnp.array([0, -1]))
    refuse(TypeError, "must hold integers", workers=jnp.ones(2))
    refuse(ValueError, "must have one axis", workers=jnp.zeros((2, 2), int))
    refuse(TypeError, "record must be", record="some")
    refuse(ValueError, "record must be 1", record=0)
    refuse(ValueError, "shape", grad_fn=lambda worker, params, event: jnp.ones(3))
    refuse(ValueError, "a decay", variable_averages=2.0)
