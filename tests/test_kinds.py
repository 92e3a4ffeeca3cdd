"""A program for each kind of step, which the host chooses by counting."""

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import by_hand
from tests import contexts

AXIS, N = contexts.AXIS, 2
PARAMS = {"a": jnp.linspace(-1, 1, 6).reshape(3, 2), "b": jnp.ones(4)}
INNER = optax.sgd(0.1, momentum=0.9)
QUIET = (-1,)


def grads_of(number):
    rng = np.random.default_rng(number)
    return {
        name: rng.normal(size=(N, *x.shape)).astype("f4") for name, x in PARAMS.items()
    }


def close(carry, expected):
    """Parameters, center and all counters."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
        tuple(carry),
        tuple(expected),
    )


def by_conditionals(tx, steps):
    """What the same step makes of all steps, in a program of one's own."""
    axes = by_hand.state_axes(tx, PARAMS)

    def one(params, state, grads):
        return oxs.apply_gradients(tx, grads, state, params)

    step = jax.jit(
        jax.vmap(one, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
    )
    params = by_hand.replicate(PARAMS, N)
    carry = params, by_hand.replicate(tx.init(PARAMS), N, axes)
    history = [carry]
    for number in range(steps):
        carry = step(*carry, grads_of(number))
        history.append(carry)
    return history


def grow(step):
    return jnp.where(step < 3, 1, 3)


# By name: (transformation, the kinds of the first nine steps).
CASES: dict[str, Any] = {
    "diloco": (oxs.diloco(INNER, AXIS, communication_period=3), "..0..0..0"),
    "later": (
        oxs.diloco(INNER, AXIS, communication_period=3, overlap=True),
        "...0..0..",
    ),
    "parts": (
        oxs.agn(INNER, AXIS, communication_period=4, fragments=2),
        ".0.1.0.1.",
    ),
    "a part later in every step": (
        oxs.local_sgd(INNER, AXIS, communication_period=2, fragments=2, overlap=True),
        ".01010101",
    ),
    "schedule": (
        oxs.local_sgd(INNER, AXIS, communication_period=grow),
        "000..0..0",
    ),
    "gossip": (oxs.gossip(INNER, AXIS, communication_period=2), ".0.0.0.0."),
}


def kinds(step):
    """The kinds of the programs so far."""
    return {kind for _, kind in step.programs}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_and_the_order_of_the_kinds(case):
    tx, order = CASES[case]
    step, *carry = contexts.started(tx, PARAMS, N)
    seen = []
    for number, expected in enumerate(by_conditionals(tx, 9)[1:]):
        carry = step(*carry, grads_of(number))
        close(carry, expected)
        (call,) = step.rules
        (rule,) = step.rules[call]
        (known,) = step.counted
        seen.append(known.now)
        held = jax.tree.leaves(carry)
        assert all(x is held[i] for x, i in zip(known.arrays, rule.places, strict=True))
        assert int(carry[1].local_step) == known.now.local_step
        assert int(carry[1].steps_since_round) == known.now.steps_since_round
        assert int(carry[1].global_step) == known.now.global_step
    assert kinds(step) == {(-1 if x == "." else int(x),) for x in order}
    programs = step.lower_kinds(*carry, grads_of(0))
    parts = 1 + max(kinds(step))[0]
    assert set(programs) == {(kind,) for kind in range(-1, parts)}
    for kind, lowered in programs.items():
        text = lowered.as_text()
        assert "stablehlo.case" not in text or case == "gossip", kind
    assert "stablehlo.case" in step.lower(*carry, grads_of(0)).as_text()


def test_a_quiet_step_of_a_mesh_sends_nothing():
    tx = oxs.diloco(INNER, AXIS, communication_period=4, overlap=True, fragments=2)
    step, params, state = contexts.started(tx, PARAMS, 2, mesh=contexts.mesh(2))
    sent = {
        kind: [row.conditional for row in oxs.audit.collectives(lowered.compile())]
        for kind, lowered in step.lower_kinds(params, state, params).items()
    }
    assert sent[QUIET] == [] and set(sent) == {(-1,), (0,), (1,)}
    assert all(sent[kind] and not any(sent[kind]) for kind in ((0,), (1,)))


def test_the_kind_of_another_state_is_read():
    """A restored state, an older one, one of one's own; after an exception."""
    tx = oxs.diloco(INNER, AXIS, communication_period=3)
    expected = by_conditionals(tx, 6)
    step, *carry = contexts.started(tx, PARAMS, N)
    states = [carry]
    for number in range(3):
        carry = step(*carry, grads_of(number))
        states.append(carry)
    close(carry, expected[3])
    # Back by a step, and by two: in between the workers meet.
    for begin in (2, 1, 2):
        again = states[begin]
        for number in range(begin, 4):
            again = step(*again, grads_of(number))
            close(again, expected[number + 1])
    copied = jax.tree.map(jnp.copy, states[2])
    close(step(*copied, grads_of(2)), expected[3])
    with pytest.raises((TypeError, ValueError)):
        step(*states[2], {"a": jnp.ones((N, 7))})
    close(step(*states[2], grads_of(2)), expected[3])
    # A counter that the user sets: two steps are left out.
    params, state = states[1]
    ahead = state._replace(steps_since_round=jnp.int32(2))
    met = step(params, ahead, grads_of(1))[1]
    assert int(met.global_step) == 1 and int(met.steps_since_round) == 0


@pytest.mark.parametrize("name", ["local_step", "steps_since_round", "global_step"])
def test_a_counter_that_is_set_in_the_state_given_out_last(name):
    """The kind is that of the numbers in it; as by conditionals."""
    tx = oxs.agn(INNER, AXIS, communication_period=4, fragments=2)
    step, *carry = contexts.started(tx, PARAMS, N)
    axes = by_hand.state_axes(tx, PARAMS)
    by_conditionals = jax.jit(
        jax.vmap(
            lambda params, state, grads: oxs.apply_gradients(tx, grads, state, params),
            in_axes=(0, axes, 0),
            out_axes=(0, axes),
            axis_name=AXIS,
        )
    )
    for number in range(6):
        params, state = carry
        if number in (2, 3):
            state = state._replace(**{name: getattr(state, name) + 1})
        expected = by_conditionals(params, state, grads_of(number))
        carry = step(params, state, grads_of(number))
        close(carry, expected)


@pytest.mark.parametrize("donate", [True, False])
def test_a_batch_of_another_shape(donate):
    """It is compiled anew, when the first state is gone; nothing keeps that alive."""
    tx = oxs.local_sgd(INNER, AXIS, communication_period=3)
    workers = oxs.Workers(N, AXIS)

    def sum_of(params, state, x):
        grads = jax.tree.map(lambda p: p * x.sum(), params)
        return oxs.apply_gradients(tx, grads, state, params)

    step = workers.step(sum_of, state=2, donate=donate)
    carry = workers.start((PARAMS, tx.init(PARAMS)))
    first = weakref.ref(carry[0]["a"])
    expected = workers.start((PARAMS, tx.init(PARAMS)))
    alike = workers.step(sum_of, state=2)
    for number in range(7):
        rows = 1 + number % 3
        carry = step(*carry, np.full(N * rows, 0.25 / rows, np.float32))
        expected = alike(*expected, np.full(N, 0.25, np.float32))
        if number == 0:
            gc.collect()
            assert first() is None
    assert int(carry[1].global_step) == 2 and kinds(step) == {QUIET, (0,)}
    close(carry, expected)


def test_a_step_inside_of_a_program_is_of_all_kinds():
    """By conditionals, before and after steps by themselves, and it keeps no tracer."""
    tx = oxs.diloco(INNER, AXIS, communication_period=3)
    expected = by_conditionals(tx, 8)

    def two(carry, numbers):
        grads = jax.tree.map(lambda *x: jnp.stack(x), *map(grads_of, numbers))

        def body(carry, grads):
            return step(*carry, grads), None

        return jax.lax.scan(body, carry, grads)[0]

    step, workers = steps_of(
        lambda params, state, grads: oxs.apply_gradients(tx, grads, state, params)
    )
    carry = workers.start((PARAMS, tx.init(PARAMS)))
    with jax.check_tracer_leaks():
        carry = two(carry, (0, 1))
    close(carry, expected[2])
    for number in (2, 3):
        carry = step(*carry, grads_of(number))
        close(carry, expected[number + 1])
    assert kinds(step) == {(), (0,), QUIET}
    with jax.check_tracer_leaks():
        carry = two(carry, (4, 5))
    close(carry, expected[6])
    for number in (6, 7):
        carry = step(*carry, grads_of(number))
        close(carry, expected[number + 1])


def steps_of(update):
    """A step of all workers that makes something of its optimizer's steps."""
    workers = oxs.Workers(N, AXIS)
    step = workers.step(update, state=2, split=False, donate=False)
    return step, workers


def test_counters_that_do_not_come_back_are_not_counted():
    """Two updates in a step, a state that is thrown away, a loop over steps."""
    tx = oxs.diloco(INNER, AXIS, communication_period=3)

    def twice(params, state, grads):
        params, state = oxs.apply_gradients(tx, grads, state, params)
        return oxs.apply_gradients(tx, grads, state, params)

    def sometimes(params, state, grads):
        new = oxs.apply_gradients(tx, grads, state, params)
        skip = state.local_step == 1
        return jax.tree.map(functools.partial(jnp.where, skip), (params, state), new)

    def looped(params, state, grads):
        def body(carry, _):
            return oxs.apply_gradients(tx, grads, carry[1], carry[0]), None

        return jax.lax.scan(body, (params, state), None, length=2)[0]

    for update, rounds in ((twice, 4), (sometimes, 0), (looped, 4)):
        step, workers = steps_of(update)
        carry = workers.start((PARAMS, tx.init(PARAMS)))
        for number in range(6):
            carry = step(*carry, grads_of(number))
        assert int(carry[1].global_step) == rounds
        assert kinds(step) == {()}


def test_several_rules_have_a_kind_each_up_to_nine_programs():
    def of(parts):
        return oxs.local_sgd(
            INNER, AXIS, communication_period=2 * parts, fragments=parts
        )

    for parts, rules in (((1, 1), 2), ((1, 4), 1), ((8,), 1), ((9,), 0)):
        names = "ab"[: len(parts)]
        tx = optax.partition(
            {name: of(number) for name, number in zip(names, parts, strict=True)},
            {"a": "a", "b": names[-1]},
        )
        params = {"a": jnp.ones((16, 2)), "b": jnp.ones((16, 2))}
        step, *carry = contexts.started(tx, params, N)
        for _ in range(4):
            carry = step(*carry, by_hand.replicate(params, N))
        (found,) = step.rules.values()
        assert len(found) == rules
        assert all(len(kind) == rules for kind in kinds(step))


def test_the_levels_of_nested_rules():
    inside = oxs.local_sgd(INNER, "data", communication_period=2)
    tx = oxs.diloco(inside, "pods", communication_period=4)
    step, *carry = contexts.started(tx, PARAMS, (2, 2), ("pods", "data"))
    grads = by_hand.replicate(grads_of(0), 2)
    for _ in range(8):
        carry = step(*carry, grads)
    assert kinds(step) == {(-1, -1), (-1, 0), (0, 0)}
    assert int(carry[1].global_step) == 2 and int(carry[1].inner.global_step) == 4
