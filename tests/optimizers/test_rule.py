"""`from_rule` on rules of a user's own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optx_sync.core.slices import IndexedSlices
from optx_sync.optimizers.rule import LeafRule, from_rule
from tests.refusals import all_refused


class SumSlots(NamedTuple):
    total: Any


class PairPowers(NamedTuple):
    fast: Any
    slow: Any


def optimizer(rule: Any, learning_rate: Any) -> Any:
    return from_rule(rule, learning_rate)


def add(grad, slots, param, at):
    total = slots.total + grad
    return -at.learning_rate * total, SumSlots(total)


def test_a_step_sees_what_the_paper_writes():
    seen = []

    def step(grad, slots, param, at):
        seen.append((grad, slots, param, at))
        return add(grad, slots, param, at)

    rule = LeafRule(
        step, SumSlots(total=2.0), hyper=(0.9, 3), powers=PairPowers(0.5, 0.75)
    )
    tx = optimizer(rule, lambda count: 10.0 + count.astype(jnp.float32))
    params = jnp.array([5.0])
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(jnp.array([1.0]), state, params)
    grads, slots, parameters, ats = zip(*seen, strict=True)
    assert [float(x[0]) for x in grads] == [1.0, 1.0, 1.0]
    assert [float(x.total[0]) for x in slots] == [2.0, 3.0, 4.0]
    assert [float(x[0]) for x in parameters] == [5.0, 5.0, 5.0]
    assert [int(at.count) for at in ats] == [0, 1, 2]
    assert [float(at.learning_rate) for at in ats] == [10.0, 11.0, 12.0]
    assert [float(at.powers.fast) for at in ats] == [0.5, 0.25, 0.125]
    assert [float(at.powers.slow) for at in ats] == [0.75, 0.5625, 0.421875]
    assert float(1.0 - ats[0].hyper[0]) == np.float32(1) - np.float32(0.9)


def test_leaves_of_several_dtypes_keep_their_own():
    with jax.enable_x64(True):
        params = {
            "half": jnp.ones(2, jnp.float16),
            "single": jnp.ones(2, jnp.float32),
            "double": jnp.ones(2, jnp.float64),
            "step": jnp.ones(2, jnp.int32),
        }
        tx = optimizer(LeafRule(add, SumSlots(total=0.1), hyper=(0.9,)), 0.1)
        grads = {name: jnp.ones(2, jnp.float32) for name in params} | {"step": None}
        updates, state = tx.update(grads, tx.init(params), params)
        for name, param in params.items():
            assert updates[name].dtype == param.dtype
        dtypes = {name: x.dtype.name for name, x in state.slots.total.items()}
        assert dtypes == {
            "half": "float32",
            "single": "float32",
            "double": "float64",
            "step": "float32",
        }
        np.testing.assert_allclose(updates["double"], -0.11, rtol=1e-15)


def test_python_numbers_are_leaves_too():
    tx = optimizer(LeafRule(add, SumSlots(total=0.0)), 0.5)
    updates, _ = tx.update(2.0, tx.init(1.0), 1.0)
    assert updates == -1.0


def test_none_without_params():
    tx = optimizer(LeafRule(add, SumSlots(total=0.0)), 0.5)
    updates, _ = tx.update(None, tx.init(jnp.ones(2)))
    np.testing.assert_array_equal(updates, jnp.zeros(2))
    stateless = optimizer(LeafRule(lambda g, slots, p, at: (g, slots)), 0.5)
    assert stateless.update(None, stateless.init(jnp.ones(2)))[0] is None


def test_entries_left_over_write_nothing():
    # A rule that moves every row it sees, whatever the gradient: padding would show.
    def restless(grad, slots, param, at):
        return jnp.ones_like(grad), SumSlots(slots.total + 1.0)

    tx = optimizer(LeafRule(restless, SumSlots(total=0.0), "touched"), 0.1)
    table = jnp.zeros([4, 1])
    state = tx.init(table)

    @jax.jit
    def step(indices, values):
        updates, after = tx.update(IndexedSlices(indices, values), state, table)
        return optax.apply_updates(table, updates), after.slots.total, updates

    indices = jnp.array([3, 3, -1, 4, 3, 2**31 - 1, 0])
    moved, total, updates = step(indices, jnp.full([7, 1], jnp.nan))
    np.testing.assert_array_equal(moved[:, 0], [1.0, 0.0, 0.0, 1.0])
    np.testing.assert_array_equal(total[:, 0], [1.0, 0.0, 0.0, 1.0])
    assert jnp.sum(updates.values) == 2.0


def test_a_row_out_of_range_is_no_part_of_the_gradient():
    def normalize(grad, slots, param, at):
        return grad / jnp.sum(jnp.abs(grad)), slots

    tx = optimizer(LeafRule(normalize, rows="touched"), 0.1)
    table = jnp.zeros([4])

    @jax.jit
    def step(indices):
        grads = IndexedSlices(indices, jnp.array([1.0, 3.0, 100.0]))
        return table + tx.update(grads, tx.init(table), table)[0]

    np.testing.assert_array_equal(step(jnp.array([2, 0, 4])), [0.75, 0.0, 0.25, 0.0])


def test_rows_of_a_half_precision_table_are_summed_in_float32():
    tx = optimizer(LeafRule(add, SumSlots(total=0.0), "touched"), 1.0)
    table = jnp.zeros([2, 1], jnp.bfloat16)
    values = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)
    grads = IndexedSlices(jnp.array([1, 1, 1]), values)
    updates, state = tx.update(grads, tx.init(table), table)
    assert updates.values.dtype == jnp.bfloat16
    assert state.slots.total[1, 0] == 258.0


test_a_rule_is_checked_where_it_is_made = all_refused(globals())(r"""
LeafRule(add, (0.0,))  # TypeError: slots must be a NamedTuple
LeafRule(add, SumSlots(0.0), rows="a")  # ValueError: one of .*'touched'.*; got 'a'
LeafRule(add, SumSlots(0.0), rows="decay_all")
LeafRule(add, SumSlots(0.0), decay=lambda slots, at: slots)  # ValueError: decay goes
""")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda g, s, p, at: (g[0], s), r"at \['w'\] .*\(2,\).* got \(\)"),
        (lambda g, s, p, at: (g, (s.total,)), "SumSlots of .* got .* and tuple of"),
        (lambda g, s, p, at: (g, SumSlots(0.0)), r"\(2,\).* SumSlots of \[\(\(\),"),
        (lambda g, s, p, at: (g, SumSlots(g > 0)), r"float32.* of .*bool"),
    ],
)
def test_a_step_that_breaks_its_contract(step, said):
    tx = optimizer(LeafRule(step, SumSlots(total=0.0)), 0.1)
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=said):
        tx.update(params, tx.init(params), params)


def test_numpy_arrays_are_leaves_too():
    tx = optimizer(LeafRule(add, SumSlots(total=0.0), "touched"), 0.5)
    table = np.zeros([3, 1], np.float32)
    state = jax.tree.map(np.asarray, tx.init(table))
    dense, _ = tx.update(np.ones([3, 1], np.float32), state, table)
    assert dense[0, 0] == -0.5
    rows = IndexedSlices(np.array([2, 2]), np.ones([2, 1], np.float32))
    updates, state = tx.update(rows, state, table)
    np.testing.assert_array_equal((table + updates)[:, 0], [0.0, 0.0, -1.0])
    np.testing.assert_array_equal(state.slots.total[:, 0], [0.0, 0.0, 2.0])
