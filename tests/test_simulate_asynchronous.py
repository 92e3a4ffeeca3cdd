"""Workers that meet a center one by one: the originals' recorded runs, and laws."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from benchmarks import by_hand
from optx_sync.audit import hlo
from optx_sync.simulate import asynchronous
from tests.recorded import GOLDEN, arrays_of, inner_of, recorded
from tests.refusals import all_refused

RECORDED = recorded("async")
FILES = {path.stem for kind in ("agn_*", "easgd_*") for path in GOLDEN.glob(kind)}
assert RECORDED.keys() == FILES and len(FILES) > 30


def itself(worker, params, event):
    """The gradient of a quadratic."""
    return params


def remembering(tx):
    """`tx`, with the last gradient that it saw in front of its state."""
    seen = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )
    return optax.chain(seen, tx)


def rule_of(case, inner):
    if case["optimizer"] == "AGNOptimizer":
        return oxs.rules.agn(inner)
    given = case["hyperparameters"]
    # apply_gradients alone adds no penalty in the original.
    rho = 0.0 if case["name"].endswith("_applyonly") else given["rho"]
    return oxs.rules.elastic(
        moving_rate=given["moving_rate"],
        rho=rho,
        learning_rate=given["inner"]["learning_rate"],
    )._replace(num_workers=given["num_worker"])


def run(case, arrays):
    names = [param["name"] for param in case["params"]]

    def grad_fn(worker, params, event):
        if case["objective"] == "linear":
            return {name: jnp.asarray(arrays[f"g_{name}"])[event] for name in names}
        return {
            name: jnp.asarray(arrays[f"a_{name}"])[worker]
            * (params[name] - jnp.asarray(arrays[f"c_{name}"])[worker])
            for name in names
        }

    inner = remembering(inner_of(case["hyperparameters"]["inner"]))

    @jax.jit
    def replayed(params):
        return asynchronous(
            inner,
            rule_of(case, inner),
            params,
            grad_fn,
            arrays["schedule"],
            num_workers=case["hyperparameters"]["num_worker"],
            communication_period=case["hyperparameters"]["communication_period"],
        )

    return jax.tree.map(
        np.asarray, replayed({name: arrays[f"p0_{name}"] for name in names})
    )


def check(actual, recorded, key, start=None):
    """Equal to 1e-6 of the largest magnitude that the element has had so far, or 1."""
    history = recorded if start is None else np.concatenate([start[None], recorded])
    largest = np.maximum(1, np.maximum.accumulate(np.abs(history)))[-len(recorded) :]
    error = np.abs(actual - recorded[-len(actual) :])
    assert np.all(error <= 1e-6 * largest[-len(actual) :]), (key, np.max(error))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_run(name):
    case = RECORDED[name]
    arrays, _ = arrays_of(case)
    record = run(case, arrays)
    unchecked = set(case["arrays"]) - {"schedule"}
    unchecked -= {key for key in unchecked if key[:2] in ("a_", "c_", "g_", "p0")}
    for count in ("local_step", "global_step"):
        np.testing.assert_array_equal(getattr(record, count), arrays[count])
        unchecked.remove(count)
    schedule, final = arrays["schedule"], record.final
    # Slots are read from the last state: a worker's are those of its last event.
    last = {w: np.flatnonzero(schedule == w)[-1] for w in np.unique(schedule)}
    assert len(last) == case["hyperparameters"]["num_worker"]

    def check_workers(stacked, key):
        recorded = arrays[key]
        for worker, event in last.items():
            check(stacked[worker][None], recorded[: event + 1], key)
        unchecked.remove(key)

    gradients, rule_state = final.workers.inner
    for param in case["params"]:
        name = param["name"]
        start = arrays[f"p0_{name}"]
        check(record.params[name], arrays[f"local_{name}"], name, start)
        check(record.center[name], arrays[f"center_{name}"], name, start)
        unchecked -= {f"local_{name}", f"center_{name}"}
        check_workers(gradients[name], f"grad_{name}")
        if case["optimizer"] == "AGNOptimizer":
            check_workers(final.workers.accumulated[name], f"gradsum_{name}")
        elif final.workers.taken:
            check_workers(final.workers.taken[name], f"local_center_{name}")
        else:  # without a penalty nobody reads it, and it is not kept
            unchecked.remove(f"local_center_{name}")
        for slot, tree in rule_state.slots._asdict().items():
            check_workers(tree[name], f"slot_local_{slot}_{name}")
            if case["optimizer"] == "AGNOptimizer":
                key = f"slot_center_{slot}_{name}"
                check(
                    final.outer[1].slots._asdict()[slot][name][None], arrays[key], key
                )
                unchecked.remove(key)
    if rule_state.powers:
        for power, values in rule_state.powers._asdict().items():
            check_workers(values, power)
    assert not unchecked


PARAMS = {
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
    "matrix": np.linspace(-2, 2, 6, dtype=np.float32).reshape(3, 2),
}
INNER, OUTER = optax.sgd(0.05, 0.9), optax.sgd(0.7, 0.9, nesterov=True)
STEPS, WORKERS = 40, 3
UNEVEN = np.random.default_rng(3).choice(WORKERS, STEPS, p=[0.6, 0.3, 0.1])
SHORT = np.array([0, 1, 0, 2, 0, 0, 1, 2, 0, 0, 1])


def warm_up(step):
    """Every step at first, then every third."""
    return jnp.where(jnp.asarray(step) < 4, 1, 3)


def gradients(steps=STEPS, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: rng.normal(size=(steps, *p.shape)).astype(np.float32), PARAMS
    )


def of_event(grads):
    """A `grad_fn` that reads the gradient of each event."""

    def grad_fn(worker, params, event):
        return jax.tree.map(lambda g: jnp.asarray(g)[event], grads)

    return grad_fn


def restate(name, start, grads, schedule, period):
    """NumPy: (stepping worker's parameters, center) after each event, and rounds."""
    n, rate, decay = np.float32(WORKERS), np.float32(0.05), np.float32(0.9)
    x = [np.array(start)] * WORKERS
    trace = [np.zeros_like(start)] * WORKERS
    taken, c, outer_trace = list(x), x[0], trace[0]
    steps, since, rounds = [0] * WORKERS, [0] * WORKERS, 0
    history = []
    for grad, w in zip(grads, schedule, strict=True):
        trace[w] = grad + decay * trace[w]
        x[w] = x[w] - rate * trace[w]
        since[w] += 1
        if since[w] >= period(steps[w]):
            if name == "downpour":
                outer_trace = grad + decay * outer_trace
                c = c - rate * outer_trace
            elif name == "local_sgd":
                c = c + (x[w] - taken[w]) / n
            else:
                pushed = (taken[w] - x[w]) / n
                outer_trace = pushed + decay * outer_trace
                c = c - np.float32(0.7) * (pushed + decay * outer_trace)
            x[w] = taken[w] = c
            since[w], rounds = 0, rounds + 1
        steps[w] += 1
        history.append((x[w], c, rounds))
    return [np.stack(part) for part in zip(*history, strict=True)]


@pytest.mark.parametrize(
    ("name", "schedule", "period"),
    [
        ("local_sgd", np.arange(STEPS) % WORKERS, 1),
        ("local_sgd", UNEVEN, warm_up),
        ("diloco", np.arange(STEPS) % WORKERS, 1),
        ("diloco", UNEVEN, 3),
        ("downpour", UNEVEN, 1),
    ],
)
def test_the_recurrence_of_workers_that_meet_one_by_one(name, schedule, period):
    rule = {
        "local_sgd": oxs.rules.local_sgd(),
        "diloco": oxs.rules.diloco(),
        "downpour": oxs.rules.agn(INNER, reduction="sum"),
    }[name]
    grads = gradients()
    settings: Any = {"num_workers": WORKERS, "communication_period": period}
    record = asynchronous(INNER, rule, PARAMS, of_event(grads), schedule, **settings)
    steps = period if callable(period) else lambda step: period
    for leaf, start in PARAMS.items():
        x, c, rounds = restate(name, start, grads[leaf], schedule, steps)
        check(np.asarray(record.params[leaf]), x, leaf, start)
        check(np.asarray(record.center[leaf]), c, leaf, start)
        np.testing.assert_array_equal(record.global_step, rounds)
    counts = np.bincount(schedule, minlength=WORKERS)
    np.testing.assert_array_equal(record.final.workers.local_step, counts)


def short_run(schedule, record: Any = "all"):
    def grad_fn(worker, params, event):
        return {"vector": params["vector"] - jnp.float32(worker) - jnp.float32(event)}

    rule = oxs.rules.elastic(moving_rate=0.1, rho=0.3)
    params = {"vector": PARAMS["vector"]}
    settings: Any = {"num_workers": WORKERS, "communication_period": 2}
    return asynchronous(
        INNER, rule, params, grad_fn, schedule, record=record, **settings
    )


@pytest.fixture(scope="module")
def whole():
    return short_run(SHORT.tolist())


def assert_equal(actual, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
        actual,
        expected,
    )
    assert jax.tree.structure(actual) == jax.tree.structure(expected)


def test_jit_is_eager(whole):
    assert whole.params["vector"].shape == (11, 5)
    assert whole.final.workers.params["vector"].shape == (WORKERS, 5)
    assert_equal(jax.jit(short_run)(jnp.asarray(SHORT)), whole)


def test_the_last_state_is_that_of_the_last_events(whole):
    last = np.array([np.flatnonzero(worker == SHORT)[-1] for worker in range(WORKERS)])
    expected = jax.tree.map(lambda x: x[last], whole.params)
    assert_equal(whole.final.workers.params, expected)
    assert_equal(whole.final.center, jax.tree.map(lambda x: x[-1], whole.center))
    assert int(whole.final.global_step) == int(whole.global_step[-1]) > 3


def test_record_keeps_every_nth_event(whole):
    record = short_run(SHORT, 4)
    kept = np.array([3, 7])  # and of the last three events none
    for field in ("params", "center"):
        expected = jax.tree.map(lambda x: x[kept], getattr(whole, field))
        assert_equal(getattr(record, field), expected)
    np.testing.assert_array_equal(record.events, kept)
    np.testing.assert_array_equal(whole.events, np.arange(11))
    assert_equal(record.local_step, whole.local_step)
    assert_equal(record.global_step, whole.global_step)
    assert_equal(record.final, whole.final)


def test_by_default_the_record_takes_no_more_than_a_quarter_of_a_gigabyte(whole):
    assert_equal(short_run(SHORT, None), whole)

    def run(params, schedule):
        rule = oxs.rules.local_sgd()
        return asynchronous(INNER, rule, params, itself, schedule, num_workers=2)

    # Parameters and center of 4 MB each: 256 MB are those of 32 events.
    params = jax.ShapeDtypeStruct((2**20,), np.float32)
    for events, every in ((32, 1), (33, 2), (64, 2), (66, 3), (100, 4), (1000, 31)):
        schedule = jax.ShapeDtypeStruct((events,), np.int32)
        record = jax.eval_shape(run, params, schedule)
        assert record.params.shape == record.center.shape == (events // every, 2**20)
        assert record.events.shape == (events // every,)
        assert record.local_step.shape == (events,)


def test_record_keeps_what_a_function_returns(whole):
    def gap(params, center):
        return {"gap": jnp.sum(params["vector"] - center["vector"])}

    record = short_run(SHORT, gap)
    expected = jnp.sum(whole.params["vector"] - whole.center["vector"], axis=1)
    np.testing.assert_allclose(record.recorded["gap"], expected, rtol=1e-5, atol=1e-6)
    assert record.params is None and record.center is None
    assert_equal(record.final, whole.final)


def test_an_unknown_worker_in_a_traced_schedule_changes_nothing(whole):
    padded = np.insert(SHORT, [0, 5, 11], [-1, WORKERS, -7])

    @jax.jit
    def run(schedule):
        rule, params = oxs.rules.local_sgd(), PARAMS["vector"]
        settings: Any = {"num_workers": WORKERS, "communication_period": 2}
        return asynchronous(INNER, rule, params, itself, schedule, **settings)

    record, expected = run(jnp.asarray(padded)), run(jnp.asarray(SHORT))
    assert_equal(record.final, expected.final)
    assert_equal(
        record.global_step[(padded >= 0) & (padded < WORKERS)], expected.global_step
    )


def test_row_sparse_and_missing_gradients():
    params = {"table": jnp.ones((4, 2)), "frozen": jnp.ones(3)}
    inner = oxs.optimizers.gradient_descent(0.1)
    rule = oxs.rules.agn(inner)
    settings: Any = {"num_workers": 2, "communication_period": 2}
    indices, values = jnp.array([2, 0, 2]), jnp.arange(6.0).reshape(3, 2)

    def run(dense):
        def grad_fn(worker, params, event):
            rows = oxs.IndexedSlices(indices, values + worker.astype(jnp.float32))
            return {"table": rows.to_dense(4) if dense else rows, "frozen": None}

        return asynchronous(inner, rule, params, grad_fn, [0, 1, 1, 0], **settings)

    sparse = run(dense=False)
    assert_equal(sparse, run(dense=True))
    np.testing.assert_array_equal(sparse.final.center["frozen"], params["frozen"])
    assert int(sparse.final.global_step) == 2
    np.testing.assert_array_equal(sparse.final.center["table"][1], [1, 1])
    assert np.all(sparse.final.center["table"][2] < 1)


@pytest.mark.parametrize("shared", [True, False])
def test_powers_are_shared_with_the_center_by_one_optimizer_only(shared):
    inner = oxs.optimizers.adam(0.1, b1=0.5)
    rule = oxs.rules.agn(inner if shared else oxs.optimizers.adam(0.1, b1=0.5))
    params, schedule = PARAMS["vector"], [0, 0, 0, 1, 0, 1, 0]
    settings: Any = {"num_workers": 2, "communication_period": 2}
    record = asynchronous(inner, rule, params, itself, schedule, **settings)
    # The exponent is 1 at the start; five steps and two rounds, two steps and one.
    exponents = [8, 4] if shared else [6, 3]
    powers = record.final.workers.inner.powers.beta1_power
    np.testing.assert_array_equal(powers, np.float32(0.5) ** np.array(exponents))
    if not shared:
        assert record.final.outer.powers.beta1_power == 0.5**4


@pytest.mark.parametrize(
    ("name", "record"), [("elastic", 100), ("agn", lambda params, center: center["b"])]
)
def test_an_event_of_a_thousand_workers_copies_no_stack(name, record):
    workers, events = 1000, 3000
    start = {"w": jnp.ones((32, 16)), "b": jnp.ones(16)}
    inner = oxs.optimizers.adam(0.01)
    rule = {
        "elastic": oxs.rules.elastic(moving_rate=0.1, rho=0.1),
        "agn": oxs.rules.agn(inner),
    }[name]

    @jax.jit
    def run(schedule):
        settings: Any = {"num_workers": workers, "record": record}
        return asynchronous(inner, rule, start, itself, schedule, **settings)

    schedule = jnp.arange(events) % workers
    program = run.lower(schedule).compile()
    computations = hlo.program(program).computations
    made = {
        (name in hlo.program(program).entries, instruction.opcode)
        for name, body in computations.items()
        for instruction in body
        if [array.shape for array in instruction.arrays] == [(1000, 32, 16)]
    }
    assert {where for where, _ in made} == {True, False}
    assert not made & {(False, "copy"), (False, "select")}
    assert by_hand.memory(program).temporary < 4 * workers * 32 * 16
    done = program(schedule)
    np.testing.assert_array_equal(done.final.workers.local_step, 3)


# Its rate comes from the period where none is passed, and this period is no number.
BY_PERIOD = {"rule": oxs.rules.elastic(rho=0.0), "communication_period": warm_up}
OF_THREE = {"rule": oxs.rules.local_sgd()._replace(num_workers=3)}


def changed(**changes):
    given: Any = {"inner": INNER, "rule": oxs.rules.local_sgd(), "params": PARAMS}
    given |= {"grad_fn": itself, "workers": np.array([0, 1]), "num_workers": 2}
    asynchronous(**given | changes)


test_bad_input_is_refused = all_refused(globals())(r"""
changed(inner=0.1)  # TypeError: inner must be
changed(rule=INNER)  # TypeError: rule must be a CenterRule
changed(workers=np.array([0.0, 1.0]))  # ValueError: integers
changed(workers=np.zeros((2, 2), int))  # ValueError: one
changed(workers=[0, 2])  # ValueError: worker 2
changed(workers=[0, -1])  # ValueError: worker -1
changed(num_workers=2.0)  # TypeError: num_workers must be an int
changed(num_workers=0)  # ValueError: num_workers must be 1 or more
changed(**OF_THREE)  # ValueError: num_workers=3
changed(communication_period=0)  # ValueError: communication_period
changed(**BY_PERIOD)  # ValueError: Pass moving_rate
changed(record="last")
changed(record=1.5)  # TypeError: record must be
changed(record=0)  # ValueError: record must be
changed(params={"n": jnp.arange(3)})  # TypeError: floating
changed(grad_fn=lambda worker, params, event: {})  # ValueError: structure
""")


def test_gradients_of_another_precision_change_no_dtype():
    """After Optax's `test_multi_steps_mixed_precision`: equal gradients of 1."""
    dtypes = {"half": jnp.bfloat16, "single": jnp.float32}
    params = {name: jnp.full(3, 2.0, dtype) for name, dtype in dtypes.items()}
    grads = {"half": jnp.ones(3), "single": jnp.ones(3, jnp.bfloat16)}
    inner, events = optax.adam(0.1), [0, 1] * 3
    with jax.numpy_dtype_promotion("standard"):  # As `optax.adam` asks.
        own = inner.init(params)
        run = asynchronous(
            inner, oxs.rules.local_sgd(), params, lambda *_: grads, events,
            num_workers=2, communication_period=1,
        )  # fmt: skip
        replicas: Any = oxs.simulate.sync_replicas(
            inner, params, lambda *_: grads, events,
            replicas_to_aggregate=2, num_tokens=0,
        )  # fmt: skip
    of_one = jax.tree.map(lambda x: x[-1], (run.params, run.final.workers.inner))
    for found in (of_one, (replicas.final.params, replicas.final.inner)):
        chex.assert_trees_all_equal_dtypes(found, (params, own))
        for leaf in jax.tree.leaves(found[0]):
            np.testing.assert_allclose(2 - np.float32(leaf), 0.3, atol=0.02)


def test_fedbuff():
    """`MultiSteps` is FedBuff's buffer of K, for clients of different values."""
    n, k, rate = 4, 3, 0.5
    values, order = np.arange(n) + 1.0, np.random.default_rng(0).integers(0, n, 90)
    buffer = optax.MultiSteps(optax.sgd(rate), k).gradient_transformation()
    buffered = oxs.rules.diloco(buffer)
    with jax.numpy_dtype_promotion("standard"):  # which MultiSteps needs
        run = oxs.simulate.asynchronous(
            optax.sgd(0.1),
            buffered._replace(mean_over="pushed"),
            jnp.zeros(()),
            lambda client, params, event: params - jnp.float32(values)[client],
            workers=order,
            num_workers=n,
            communication_period=2,
            record="all",
            weigh=lambda at: (1 + at.staleness / k) ** -0.5,
        )
    server, waiting, arrived, centers = 0.0, 0.0, 0, []
    own, taken = np.zeros(n), np.zeros(n)
    steps, seen = np.zeros(n), np.zeros(n)
    for i in order:
        own[i] -= 0.1 * (own[i] - values[i])
        steps[i] += 1
        if steps[i] % 2 == 0:
            waiting += (taken[i] - own[i]) / np.sqrt(1 + (arrived - seen[i]) / k)
            arrived += 1
            if arrived % k == 0:
                server, waiting = server - rate * waiting / k, 0.0
            own[i], taken[i], seen[i] = server, server, arrived
        centers.append(server)
    np.testing.assert_allclose(run.center, centers, atol=1e-6)
    assert centers[-1] > 1
