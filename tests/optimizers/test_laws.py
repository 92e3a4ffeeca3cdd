"""What every optimizer of the catalogue obeys; one function for each law."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks import by_hand
from optx_sync.core.slices import IndexedSlices
from optx_sync.optimizers.adam import adam
from optx_sync.optimizers.rmsprop import rmsprop
from tests.cases import OPTIMIZERS
from tests.meshes import mesh_of

STEPS = 3
ROWS = 4
every = pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)


# One for each row policy, for what `from_rule` does whatever the formula is.
LIFTED = [
    case for case in OPTIMIZERS if case.name in ("ftrl", "nadam", "adam", "amsgrad")
]
lifted = pytest.mark.parametrize("case", LIFTED, ids=lambda case: case.name)


def test_each_row_policy_has_a_representative():
    assert len(LIFTED) == len({case.rows for case in LIFTED}) == 4
    assert {case.rows for case in OPTIMIZERS} == {case.rows for case in LIFTED}


def having(*rows):
    """Every optimizer with one of these row policies."""
    cases = [case for case in OPTIMIZERS if case.rows in rows]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


sparse = having("touched", "decay_all", "all")


def make_params():
    values = np.random.default_rng(0).normal(size=[ROWS, 2]).astype(np.float32)
    return {"table": jnp.asarray(values), "bias": jnp.asarray(values[0])}


def make_grads(step):
    values = np.random.default_rng(1 + step).normal(size=[ROWS, 2])
    values = values.astype(np.float32)
    return {"table": jnp.asarray(values), "bias": jnp.asarray(values[1])}


def walk(tx, grads=make_grads, params=None, update=None):
    """All updates and the last state of a few steps."""
    params = make_params() if params is None else params
    update = tx.update if update is None else update
    state = tx.init(params)
    trace = []
    for step in range(STEPS):
        updates, state = update(grads(step), state, params)
        params = optax.apply_updates(params, updates)
        trace.append(updates)
    return trace, state


@functools.cache
def plain(name):
    """The walk of the optimizer as it is, traced once."""
    case = next(case for case in OPTIMIZERS if case.name == name)
    tx = case.make()
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(n=1)(tx.update))
    return walk(tx, update=update)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected):
    # Compiled and uncompiled programs fuse, and round, differently.
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=3e-6, atol=3e-7),
        actual,
        expected,
    )


def assert_walks_like(tx, case):
    """`tx` gives the numbers of the plain optimizer."""
    assert_close(walk(tx)[0], plain(case.name)[0])


def table_state(state, leaf="table") -> list:
    return [tree[leaf] for tree in state.slots]


@every
def test_many_steps_are_one_trace_and_equal_eager_ones(case):
    trace, state = walk(case.make())
    assert_close(trace, plain(case.name)[0])
    assert_close(state, plain(case.name)[1])
    assert state.update_count == STEPS


@every
def test_state_keeps_its_type(case):
    tx = case.make()

    def types(tree):
        # Shape, dtype, weakness, sharding and the axes that it varies over.
        return jax.tree.leaves(jax.tree.map(jax.typeof, tree))

    def body(params, grads):
        state = tx.init(params)
        _, after = tx.update(grads, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert types(after) == types(state)
        after = lax.cond(
            jnp.any(grads["bias"] > 0),
            lambda: tx.update(grads, state, params)[1],
            lambda: state,
        )
        (params, after), _ = lax.scan(
            lambda carry, _: (
                (params, tx.update(grads, carry[1], params)[1]),
                None,
            ),
            (params, after),
            length=2,
        )
        return jax.tree.map(lambda x: x[None], after)

    jax.eval_shape(body, make_params(), make_grads(0))
    mesh = mesh_of({"data": 2})
    local = jax.shard_map(
        lambda params, grads: body(
            lax.pcast(params, "data", to="varying"),
            lax.pcast(grads, "data", to="varying"),
        ),
        mesh=mesh,
        in_specs=P(),
        out_specs=P("data"),
    )
    jax.eval_shape(local, make_params(), make_grads(0))


@every
def test_half_precision_params_have_float32_slots(case):
    def halve(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def double(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    tx = case.make()
    params, grads = halve(make_params()), halve(make_grads(0))
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    chex.assert_trees_all_equal_dtypes(updates, params)
    chex.assert_trees_all_equal_dtypes(after, state)
    assert {x.dtype for x in jax.tree.leaves(after.slots)} <= {np.dtype(np.float32)}
    wide_params, wide_grads = double(params), double(grads)
    wide_updates, wide = tx.update(wide_grads, tx.init(wide_params), wide_params)
    assert_equal(updates, halve(wide_updates))
    assert_equal(after, wide)


@every
def test_float64_params_are_computed_in_float64(case):
    with jax.enable_x64(True):

        def double(tree):
            return jax.tree.map(lambda x: x.astype(jnp.float64), tree)

        tx = case.make()
        params = double(make_params())
        trace, state = walk(tx, lambda step: double(make_grads(step)), params)
        dtypes = {x.dtype for x in jax.tree.leaves((trace, state.slots, state.powers))}
        assert dtypes == {np.dtype(np.float64)}
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6),
            trace,
            plain(case.name)[0],
        )
        # It is no float32 number that was widened at the end.
        assert any(
            np.any(x != np.float64(np.float32(x)))
            for x in map(np.asarray, jax.tree.leaves(trace))
        )


@lifted
def test_float32_params_stay_float32_under_x64(case):
    with jax.enable_x64(True):
        trace, state = walk(case.make(optax.constant_schedule(0.1)))
        dtypes = {x.dtype for x in jax.tree.leaves((trace, state))}
        assert dtypes == {np.dtype(np.float32), np.dtype(np.int32)}
        assert_close(trace, plain(case.name)[0])


@lifted
def test_a_schedule_is_called_with_the_updates_so_far(case):
    counts = []

    def schedule(count):
        counts.append(int(count))
        return 0.1

    assert_equal(walk(case.make(schedule)), walk(case.make(0.1)))
    assert counts == list(range(STEPS))


@every
def test_a_compiled_step_rounds_alike_with_a_number_and_with_a_schedule(case):
    # Of a number XLA would make one with the constants beside it, of 1 nothing; then
    # the product before it is not rounded when the parameter is added.
    def step(learning_rate):
        tx = case.make(learning_rate)

        @jax.jit
        def mean_and_move(grads, state, params, count):
            mean = jax.tree.map(lambda g: g / count, grads)
            updates, state = tx.update(mean, state, params)
            return optax.apply_updates(params, updates), state

        return mean_and_move(make_grads(0), tx.init(make_params()), make_params(), 3.0)

    # For 1 the formula plays no part: it is what is multiplied that is dropped.
    for rate in (0.1, 1.0) if case in LIFTED else (0.1,):
        rates = jnp.array([rate, 0.3, 0.7, 0.9])
        assert_equal(step(rate), step(lambda count, rates=rates: rates[count]))


@every
def test_inject_hyperparams(case):
    tx = optax.inject_hyperparams(case.factory)(0.1, **case.hyperparameters)
    assert_walks_like(tx, case)
    state = tx.init(make_params())
    updates, _ = jax.jit(tx.update)(make_grads(0), state, make_params())
    assert_close(updates, plain(case.name)[0][0])
    # A state whose buffers are shared could not be donated.
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


@lifted
def test_multi_transform(case):
    labels = {"table": "here", "bias": "there"}
    tx = optax.multi_transform({"here": case.make(), "there": case.make()}, labels)
    assert_walks_like(tx, case)


@lifted
def test_multi_steps(case):
    tx = optax.MultiSteps(case.make(), every_k_schedule=2)
    # Optax itself mixes dtypes here.
    with jax.disable_jit(), jax.numpy_dtype_promotion("standard"):
        params, state = make_params(), tx.init(make_params())
        quiet, state = tx.update(make_grads(0), state, params)
        updates, _ = tx.update(make_grads(0), state, params)
    assert_equal(quiet, jax.tree.map(jnp.zeros_like, quiet))
    assert_close(updates, plain(case.name)[0][0])


def as_slices(table):
    return IndexedSlices(jnp.array([2, 0, 3, 1]), table[jnp.array([2, 0, 3, 1])])


def step_rows(case, indices, values) -> tuple[Any, ...]:
    """The table and its slots before and after a step of some rows, and the update."""
    tx = case.make()
    params: Any = make_params()
    _, state = tx.update(make_grads(0), tx.init(params), params)
    grads = {**make_grads(1), "table": IndexedSlices(indices, values)}
    updates, after = tx.update(grads, state, params)
    moved: Any = optax.apply_updates(params, updates)
    slots = table_state(state), table_state(after)
    return params["table"], moved["table"], *slots, updates["table"]


TWO_ROWS = (jnp.array([1, 3]), jnp.array([[1.0, -2.0], [0.5, 3.0]]))
REST = np.array([0, 2])


@having("decay_all")
def test_decay_all_moves_touched_rows_and_decays_all(case):
    before, after, slots_before, slots_after, _ = step_rows(case, *TWO_ROWS)
    assert_equal(after[REST], before[REST])
    decay = [case.hyperparameters["b1"], case.hyperparameters.get("b2", 0.999)]
    for old, new, factor in zip(slots_before, slots_after, decay, strict=False):
        assert_equal(new[REST], old[REST] * jnp.float32(factor))


@having("refused")
def test_refused_rows_name_the_leaf(case):
    with pytest.raises(TypeError, match=r"no row-sparse gradients.*\['table'\]"):
        step_rows(case, *TWO_ROWS)


@sparse
def test_equal_rows_are_summed_first(case):
    values = jnp.array([[1.0, -2.0], [0.5, 3.0], [0.25, 1.0]])
    twice = step_rows(case, jnp.array([1, 3, 1]), values)
    summed = jnp.array([[1.25, -1.0], [0.5, 3.0]])
    once = step_rows(case, jnp.array([1, 3]), summed)
    assert_close(twice[:4], once[:4])
    if isinstance(twice[4], IndexedSlices):
        # The entry left over carries nothing.
        assert_equal(twice[4].values[2], jnp.zeros(2))


@sparse
def test_rows_out_of_range_are_dropped_in_compiled_code(case):
    values = jnp.array([[1.0, -2.0], [5.0, 5.0], [0.5, 3.0], [7.0, 7.0]])
    step = functools.partial(step_rows, case)
    inside = step(*TWO_ROWS)
    # `vmap` traces the indices as `jit` does, and costs no compilation.
    lane = jax.vmap(step)(jnp.array([[1, -1, 3, ROWS]]), values[None])
    assert_close([x[0] for x in lane[:2]], list(inside[:2]))
    assert_close([x[0] for x in lane[3]], inside[3])
    with pytest.raises(ValueError, match=r"\['table'\]"):
        step(jnp.array([1, ROWS]), TWO_ROWS[1])


@sparse
def test_no_rows(case):
    before, after, slots_before, slots_after, updates = step_rows(
        case, jnp.zeros([0], jnp.int32), jnp.zeros([0, 2])
    )
    if case.rows != "all":
        assert updates.values.shape == (0, 2)
        assert_equal(after, before)
    if case.rows == "touched":
        assert_equal(slots_after, slots_before)
    if case.rows == "decay_all":
        factor = jnp.float32(case.hyperparameters["b1"])
        assert_equal(slots_after[0], slots_before[0] * factor)


@having("touched")
def test_touched_needs_no_memory_of_the_tables_size(case):
    rows, width, k = 200_000, 16, 8
    tx = case.make()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, indices, values):
        grads = IndexedSlices(indices, values)
        updates, state = tx.update(grads, state, table)
        return optax.apply_updates(table, updates), state

    table = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    memory = by_hand.memory(
        step,
        table,
        jax.eval_shape(tx.init, table),
        jax.ShapeDtypeStruct((k,), jnp.int32),
        jax.ShapeDtypeStruct((k, width), jnp.float32),
    )
    # Far below one table of 12.8 MB; all tables are updated in place.
    assert memory.temporary < 100_000
    tables = 1 + len(tx.init(jnp.zeros([1])).slots)
    assert memory.aliased >= tables * rows * width * 4


@lifted
def test_none_is_no_gradient(case):
    tx = case.make()
    params: Any = make_params()
    _, state = tx.update(make_grads(0), tx.init(params), params)
    grads = {**make_grads(1), "table": None}
    updates, after = tx.update(grads, state, params)
    assert_equal(updates["table"], jnp.zeros_like(params["table"]))
    assert_equal(table_state(after), table_state(state))
    full_updates, full = tx.update(make_grads(1), state, params)
    assert_equal(updates["bias"], full_updates["bias"])
    assert_equal(table_state(after, "bias"), table_state(full, "bias"))
    assert after.update_count == 2
    assert_equal(after.powers, full.powers)
    nothing, _ = tx.update({"table": None, "bias": None}, state, params)
    assert_equal(nothing, jax.tree.map(jnp.zeros_like, params))


@every
def test_a_parameter_that_is_none_stays_none(case):
    params = {**make_params(), "static": None}
    tx = case.make()
    updates, state = tx.update(
        {**make_grads(0), "static": None}, tx.init(params), params
    )
    assert updates["static"] is None
    moved: Any = optax.apply_updates(params, updates)
    assert moved["static"] is None
    assert all(tree["static"] is None for tree in state.slots)


@every
def test_params_may_be_left_out_where_the_formula_allows(case):
    tx = case.make()
    state = tx.init(make_params())
    if case.needs_params:
        with pytest.raises(ValueError, match="params=None"):
            tx.update(make_grads(0), state)
    else:
        updates, _ = tx.update(make_grads(0), state)
        assert_close(updates, plain(case.name)[0][0])


@every
def test_explicit_sharding(case):
    """After Optax's alias test of this name: init and update keep sharding types."""
    mesh = mesh_of({"data": 2, "model": 2}, "Explicit")
    specs = {"table": P("data", "model"), "bias": P("model"), "scale": P()}
    shapes = {"table": (4, 6), "bias": (2,), "scale": ()}
    params = {
        name: jax.device_put(jnp.ones(shapes[name]), jax.NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    tx = case.make()
    seen = {}

    def types(tree):
        return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)

    def step(params, grads):
        state = tx.init(params)
        updates, new_state = tx.update(grads, state, params)
        moved = optax.apply_updates(params, updates)
        seen.update(updates=types(updates), params=types(moved))
        seen["slots"] = [types(tree) for tree in (*state.slots, *new_state.slots)]
        return moved

    # From JAX 0.12 on what is new in a trace lies on the mesh that is set.
    with jax.set_mesh(mesh):
        jax.eval_shape(step, params, params)
    wanted = types(params)
    assert wanted["table"] == P("data", "model")
    assert seen["updates"] == seen["params"] == wanted
    assert all(tree == wanted for tree in seen["slots"])
    # Outside of a trace too: the arrays lie where their types say.
    for tree in tx.init(params).slots:
        for name, slot in tree.items():
            assert slot.sharding.is_equivalent_to(params[name].sharding, slot.ndim)


@lifted
def test_slots_are_found_and_set_by_name(case):
    state = case.make().init(make_params())
    for name, tree in state.slots._asdict().items():
        chex.assert_trees_all_equal(optax.tree_utils.tree_get(state, name), tree)
        ones = jax.tree.map(jnp.ones_like, tree)
        changed: Any = optax.tree_utils.tree_set(state, **{name: ones})
        chex.assert_trees_all_equal(getattr(changed.slots, name), ones)
    assert optax.tree_utils.tree_get(state, "update_count") == 0


@lifted
def test_no_parameters_and_no_gradients(case):
    tx = case.make()
    updates, state = tx.update({}, tx.init({}), {})
    assert updates == {}
    assert state.update_count == 1


def test_decays_of_one_are_what_the_formulas_give():
    """No original refuses them: an average of such a decay stays where it starts."""
    params, grads = jnp.ones(2), jnp.array([2.0, -4.0])

    def first(tx) -> Any:
        return tx.update(grads, tx.init(params), params)

    update, state = first(rmsprop(0.5, decay=1.0, eps=0.0))
    np.testing.assert_array_equal(update, -0.5 * grads)  # the average of squares is 1
    np.testing.assert_array_equal(state.slots.rms, 1)
    update, state = first(adam(0.5, b2=1.0))
    np.testing.assert_array_equal(update, 0)  # the root of 1 - b2^t
    np.testing.assert_array_equal(state.slots.v, 0)
    # The bias correction of a first moment that does not move is 0 / 0.
    assert np.all(np.isnan(first(adam(0.5, b1=1.0))[0]))
