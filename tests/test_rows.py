"""Row-sparse gradients: the container, the look-up, and what Optax does with them."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from benchmarks import by_hand
from optx_sync.gradients import value_and_grad
from optx_sync.rows.lookup import take
from optx_sync.rows.on_values import on_values
from optx_sync.rows.slices import IndexedSlices

ROWS = 9
LAST = 2**31 - 1


def some_slices(indices=(7, 3, 7, 0), width=2, dtype=jnp.float32, seed=0):
    random = np.random.default_rng(seed)
    values = random.normal(size=(len(indices), width))
    return IndexedSlices(np.array(indices, np.int32), jnp.asarray(values, dtype))


def dense_reference(slices, rows=ROWS):
    dense = np.zeros((rows, *slices.values.shape[1:]), np.float64)
    indices = np.asarray(slices.indices)
    for index, value in zip(
        indices, np.asarray(slices.values, np.float64), strict=True
    ):
        if 0 <= index < rows:
            dense[index] += value
    return dense


# The container.


def test_constructor_keeps_indices_and_values():
    slices = IndexedSlices(jnp.array([4, -1], jnp.int8), jnp.ones((2, 3)))
    assert slices.indices.dtype == jnp.int32
    np.testing.assert_array_equal(slices.indices, [4, -1])
    assert slices.values.shape == (2, 3)


@pytest.mark.parametrize("indices", [jnp.ones(2), np.array([True, False]), [0.5, 1]])
def test_indices_that_are_not_integers_are_refused(indices):
    with pytest.raises(TypeError, match="indices must be integers"):
        IndexedSlices(indices, jnp.ones((2, 3)))


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int64)])
def test_an_empty_list_of_rows(empty):
    slices = IndexedSlices(empty, jnp.zeros((0, 3)))
    assert slices.indices.dtype == jnp.int32
    np.testing.assert_array_equal(slices.sum_duplicates().to_dense(4), 0)
    # An array says its dtype, and an empty one of floats is no list of rows.
    with pytest.raises(TypeError, match="they name rows; got dtype float32"):
        IndexedSlices(jnp.array([]), jnp.zeros((0, 3)))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one row for each index"):
        IndexedSlices([1, 2], jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="one axis"):
        IndexedSlices([[1, 2]], jnp.ones((1, 2)))


def test_wide_indices_do_not_wrap_to_a_row():
    with pytest.raises(ValueError, match="int32"):
        IndexedSlices(np.array([2**32]), jnp.ones((1, 2)))
    indices = jnp.array([2**31 + 5, 1], jnp.uint32)
    got = jax.jit(lambda i: IndexedSlices(i, jnp.ones(2)).indices)(indices)
    np.testing.assert_array_equal(got, [LAST, 1])


@pytest.mark.parametrize(
    "indices",
    [(7, 3, 7, 0), (-1, 7, -5, 7), (LAST, 3, LAST, -1), (2,), (5, 5, 5), ()],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_sum_duplicates(indices, compiled):
    slices = some_slices(indices)
    sum_duplicates = IndexedSlices.sum_duplicates
    unique = (jax.jit(sum_duplicates) if compiled else sum_duplicates)(slices)
    got = np.asarray(unique.indices)
    rows = sorted({index for index in indices if 0 <= index < ROWS})
    np.testing.assert_array_equal(got[: len(rows)], rows)
    assert (got[len(rows) :] > 2**30).all()
    assert (np.diff(got.astype(np.int64)) > 0).all()
    assert (np.asarray(unique.values)[len(rows) :] == 0).all()
    np.testing.assert_allclose(unique.to_dense(ROWS), dense_reference(slices), 1e-6)
    again = unique.sum_duplicates()
    np.testing.assert_array_equal(again.indices, unique.indices)
    np.testing.assert_array_equal(again.values, unique.values)


def test_sum_duplicates_again_after_slices_were_joined():
    def join(left, right):
        return jnp.concatenate([left, right])

    first, second = some_slices().sum_duplicates(), some_slices(seed=1)
    joined = jax.tree.map(join, first, second.sum_duplicates())
    want = dense_reference(first) + dense_reference(second)
    unique = joined.sum_duplicates()
    assert (np.diff(np.asarray(unique.indices, np.int64)) > 0).all()
    np.testing.assert_allclose(unique.to_dense(ROWS), want, 1e-6)


def test_half_precision_adds_up_in_float32():
    # In bfloat16, 256 + 1 is 256: one hundred ones would be lost one by one.
    values = jnp.array([256.0] + 100 * [1.0], jnp.bfloat16)
    slices = IndexedSlices(np.full(101, 3), values)
    assert slices.sum_duplicates().values.dtype == jnp.bfloat16
    assert slices.sum_duplicates().values[0] == 356
    assert slices.to_dense(ROWS)[3] == 356
    assert (jnp.zeros(ROWS, jnp.bfloat16) + slices)[3] == 356


@pytest.mark.parametrize("compiled", [False, True])
def test_to_dense_drops_rows_out_of_range(compiled):
    slices = some_slices((-1, 8, 9, LAST, -ROWS, 8))
    to_dense = functools.partial(IndexedSlices.to_dense, rows=ROWS)
    got = (jax.jit(to_dense) if compiled else to_dense)(slices)
    np.testing.assert_allclose(got, dense_reference(slices), 1e-6)


def test_leading_axes_are_a_batch():
    batch = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), some_slices(), some_slices((1, 1, 2, 8))
    )
    want = np.stack(
        [x.to_dense(ROWS) for x in (some_slices(), some_slices((1, 1, 2, 8)))]
    )
    np.testing.assert_allclose(batch.to_dense(ROWS), want, 1e-6)
    np.testing.assert_allclose(batch.sum_duplicates().to_dense(ROWS), want, 1e-6)
    np.testing.assert_allclose(jnp.ones_like(want) + batch, 1 + want, 1e-6)
    lanes = jax.vmap(lambda slices: slices.sum_duplicates())(batch)
    np.testing.assert_allclose(lanes.to_dense(ROWS), want, 1e-6)


def test_transformations_of_jax_take_the_pytree():
    slices = some_slices()
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(slices)]
    shown = [jax.tree_util.keystr(path) for path in paths]
    assert shown == [".indices", ".values"]
    doubled = slices.map_values(lambda values: 2 * values)
    chosen = jax.lax.cond(jnp.array(False), lambda: slices, lambda: doubled)
    np.testing.assert_array_equal(chosen.values, 2 * slices.values)
    carried, _ = jax.lax.scan(lambda x, _: (x, None), slices, None, length=2)
    np.testing.assert_array_equal(carried.indices, slices.indices)
    shapes = jax.eval_shape(IndexedSlices.sum_duplicates, slices)
    assert shapes.indices == jax.ShapeDtypeStruct((4,), jnp.int32)
    structure = jax.tree.structure(slices)
    for placeholder in (None, object(), 0):
        leaves = [placeholder, placeholder]
        assert jax.tree.leaves(structure.unflatten(leaves)) == [
            leaf for leaf in leaves if leaf is not None
        ]
    donated = jax.jit(lambda x: x.map_values(jnp.negative), donate_argnums=0)
    np.testing.assert_array_equal(donated(some_slices()).values, -slices.values)


@pytest.mark.parametrize("check_vma", [True, False])
def test_slices_are_gathered_from_all_devices(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    indices, values = jnp.arange(16) % 5, jnp.arange(32.0).reshape(16, 2)

    def step(indices, values, table):
        slices = IndexedSlices(indices, values).sum_duplicates()
        every = jax.tree.map(
            lambda leaf: jax.lax.all_gather(leaf, "data", tiled=True), slices
        )
        return table + every.sum_duplicates()

    got = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("data"), P("data"), P()),
            out_specs=P("data"),
            check_vma=check_vma,
        )
    )(indices, values, jnp.zeros((5, 2)))
    want = dense_reference(IndexedSlices(indices, values), 5)
    np.testing.assert_allclose(got.reshape(8, 5, 2), np.broadcast_to(want, (8, 5, 2)))


# Adding to a table.


@pytest.mark.parametrize("values_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("table_dtype", [jnp.float32, jnp.bfloat16])
def test_apply_updates_is_the_dense_one(table_dtype, values_dtype):
    slices = some_slices(dtype=values_dtype)
    random = np.random.default_rng(1)
    table = jnp.asarray(random.normal(size=(ROWS, 2)), table_dtype)
    apply_updates: Any = jax.jit(optax.apply_updates)
    got = apply_updates({"a": table}, {"a": slices})["a"]
    assert got.dtype == table_dtype
    if table_dtype == jnp.float32:
        np.testing.assert_allclose(got, table + dense_reference(slices), 1e-6)
    else:
        with jax.numpy_dtype_promotion("standard"):
            want = apply_updates(table, slices.to_dense(ROWS))
        np.testing.assert_array_equal(got, want)


def test_flax_train_state_takes_slices():
    params = {"embedding": jnp.ones((ROWS, 2)), "bias": jnp.ones(2)}
    tx = on_values(optax.sgd(0.5))
    state = TrainState.create(apply_fn=lambda: None, params=params, tx=tx)
    slices = some_slices()
    grads = {"embedding": slices, "bias": jnp.ones(2)}
    state = jax.jit(TrainState.apply_gradients)(state, grads=grads)
    want = 1 - 0.5 * dense_reference(slices)
    np.testing.assert_allclose(state.params["embedding"], want, 1e-6)
    np.testing.assert_array_equal(state.params["bias"], 0.5)


def test_known_rows_out_of_range_are_refused():
    apply_updates: Any = optax.apply_updates
    table = jnp.zeros((ROWS, 2))
    for bad in (ROWS, -1):
        slices = some_slices((3, bad))
        with pytest.raises(ValueError, match=rf"row {bad}\b.*table of {ROWS} rows"):
            _ = table + slices
        with pytest.raises(ValueError, match=f"row {bad}"):
            apply_updates({"a": table}, {"a": slices})
        # A constant is known while tracing.
        with pytest.raises(ValueError, match=f"row {bad}"):
            jax.jit(lambda t, bad=bad: t + some_slices((3, bad)))(table)
    padded = some_slices((3, 3, -1)).sum_duplicates()
    np.testing.assert_allclose(table + padded, padded.to_dense(ROWS))


def test_compiled_code_drops_rows_out_of_range():
    table = jnp.zeros((ROWS, 2))
    slices = some_slices((3, ROWS, -1, -ROWS, LAST, 3))
    got = jax.jit(lambda t, s: t + s)(table, slices)
    np.testing.assert_allclose(got, dense_reference(slices), 1e-6)
    got = jax.jit(lambda t, s: t + s)(table.astype(jnp.bfloat16), slices)
    want = dense_reference(slices)
    np.testing.assert_array_equal(got, jnp.asarray(want, jnp.bfloat16))


def test_a_table_of_another_shape_is_refused():
    for table in (jnp.zeros((ROWS, 3)), jnp.zeros(ROWS), jnp.zeros(())):
        with pytest.raises(ValueError, match="do not fit their table"):
            _ = table + some_slices()
        with pytest.raises(ValueError, match="do not fit their table"):
            jax.jit(lambda t, s: t + s)(table, some_slices())


def test_numpy_tables_and_the_other_side():
    slices = some_slices()
    want = 1 + dense_reference(slices)
    np.testing.assert_allclose(np.ones((ROWS, 2), np.float32) + slices, want, 1e-6)
    np.testing.assert_allclose(slices + jnp.ones((ROWS, 2)), want, 1e-6)


@pytest.mark.parametrize(
    "operation",
    [
        lambda s: -s,
        lambda s: s * 2.0,
        lambda s: 2.0 * s,
        lambda s: jnp.float32(2) * s,
        lambda s: np.float32(2) * s,
        lambda s: np.ones((4, 2)) * s,
        lambda s: s + s,
        lambda s: 1.0 + s,
        lambda s: jnp.ones((ROWS, 2)) - s,
        lambda s: jnp.asarray(s),
        lambda s: jnp.sqrt(s),
    ],
)
def test_other_arithmetic_is_refused(operation):
    with pytest.raises(TypeError):
        operation(some_slices())


def buffers(jaxpr):
    """The sizes of all arrays that a jaxpr makes, at any depth."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
        for parameter in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            if hasattr(parameter, "jaxpr"):
                yield from buffers(parameter.jaxpr)
            elif hasattr(parameter, "eqns"):
                yield from buffers(parameter)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_donated_table_is_updated_in_place(dtype):
    table = jnp.zeros((100_000, 2), dtype)
    add: Any = jax.jit(optax.apply_updates, donate_argnums=0)
    memory = by_hand.memory(add, {"a": table}, {"a": some_slices()})
    assert memory.aliased == table.nbytes
    # XLA on the CPU makes a float32 copy of a bfloat16 operand of a scatter.
    if dtype == jnp.float32:
        assert memory.temporary < 10_000
    got = add({"a": table}, {"a": some_slices()})["a"]
    assert table.is_deleted()
    assert float(jnp.abs(got[:ROWS]).sum()) > 0


# The look-up and its gradient.


def make_params(dtype=jnp.float32, rows=ROWS):
    random = np.random.default_rng(3)
    return {
        "embedding": jnp.asarray(random.normal(size=(rows, 2)), dtype),
        "dense": {"kernel": jnp.asarray(random.normal(size=(2, 3)), dtype)},
    }


def loss(params, batch):
    looked_up = take(params["embedding"], batch["ids"])
    return jnp.sum(jnp.tanh(looked_up) @ params["dense"]["kernel"], dtype=jnp.float32)


ids_of = {"embedding": lambda batch: batch["ids"]}
BATCH = {"ids": jnp.array([[3, 7], [3, 0], [8, 3]])}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("table", [jnp.arange(6.0), jnp.arange(24.0).reshape(6, 2, 2)])
def test_take_is_indexing(table, compiled):
    look_up = jax.jit(take) if compiled else take
    for ids in (
        jnp.array([[5, 0, 0]]),
        np.array([2], np.uint8),
        4,
        np.zeros((0,), int),
    ):
        np.testing.assert_array_equal(look_up(table, ids), np.asarray(table)[ids])


def test_take_out_of_range():
    table = jnp.arange(1.0, 7.0)
    for bad in (6, -1):
        with pytest.raises(ValueError, match=f"row {bad} is out of range"):
            take(table, jnp.array([1, bad]))
    ids = jnp.array([1, 6, -1, LAST])
    np.testing.assert_array_equal(jax.jit(take)(table, ids), [2, 0, 0, 0])
    gradient = jax.jit(jax.grad(lambda t, i: take(t, i).sum()))(table, ids)
    np.testing.assert_array_equal(gradient, [0, 1, 0, 0, 0, 0])


def test_take_refuses_what_is_no_look_up():
    with pytest.raises(TypeError, match="ids must be integers"):
        take(jnp.ones(3), jnp.ones(2))
    tables: list[Any] = [some_slices(), 3.0, jnp.ones(())]
    for table in tables:
        with pytest.raises(TypeError, match="take looks rows up"):
            take(table, jnp.array([0]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_is_the_dense_one(dtype, compiled):
    params = make_params(dtype)
    grad_fn = value_and_grad(loss, rows=ids_of)
    value, grads = (jax.jit(grad_fn) if compiled else grad_fn)(params, BATCH)
    want_value, want = jax.value_and_grad(loss)(params, BATCH)
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(value, want_value, tolerance)
    assert isinstance(grads["embedding"], IndexedSlices)
    assert grads["embedding"].values.dtype == dtype
    np.testing.assert_array_equal(grads["embedding"].indices[:4], [0, 3, 7, 8])
    got = grads["embedding"].to_dense(ROWS)
    pairs = jax.tree.map(
        lambda *pair: tuple(np.asarray(x, np.float32) for x in pair),
        [got, grads["dense"]],
        [want["embedding"], want["dense"]],
    )
    for a, b in jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, tuple)):
        # An entry is a sum: two programs round it as its largest terms are.
        np.testing.assert_allclose(a, b, tolerance, 1e-6 * np.abs(b).max())


def test_gradients_of_a_frequent_id_add_up_in_float32():
    # In bfloat16, 256 + 1 is 256.
    ids = jnp.zeros(300, jnp.int32)
    grad_fn = value_and_grad(
        lambda t, ids: take(t, ids).sum(dtype=jnp.float32), rows=lambda ids: ids
    )
    _, slices = jax.jit(grad_fn)(jnp.ones(ROWS, jnp.bfloat16), ids)
    assert slices.to_dense(ROWS)[0] == 300


def test_no_array_of_the_table_s_size_is_made():
    params, table_size = make_params(rows=50_000), 100_000
    grad_fn = value_and_grad(loss, rows=ids_of)

    def step(params, batch):
        value, grads = grad_fn(params, batch)
        return value, grads

    jaxpr = jax.make_jaxpr(step)(params, BATCH)
    assert max(buffers(jaxpr.jaxpr)) < table_size / 100
    dense = jax.make_jaxpr(jax.value_and_grad(loss))(params, BATCH)
    assert max(buffers(dense.jaxpr)) == table_size  # the measure measures
    memory = by_hand.memory(jax.jit(step), params, BATCH)
    assert memory.temporary + memory.outputs < table_size / 10


def test_a_whole_step_updates_the_donated_table_in_place():
    params = make_params(rows=100_000)
    table_bytes = params["embedding"].nbytes
    tx = on_values(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    state = tx.init(params)

    def step(params, batch):
        _, grads = value_and_grad(loss, rows=ids_of)(params, batch)
        updates, _ = tx.update(grads, state, params)
        return optax.apply_updates(params, updates)

    memory = by_hand.memory(jax.jit(step, donate_argnums=0), params, BATCH)
    assert memory.aliased >= table_bytes
    assert memory.temporary < table_bytes / 10


def test_has_aux_keywords_and_inner_transformations():
    @jax.checkpoint
    def encode(table, ids):
        return jax.jit(take)(table, ids)

    def loss_with_aux(params, ids, *, scale):
        encoded = jax.vmap(lambda ids: encode(params["embedding"], ids))(ids)
        return scale * encoded.sum(), encoded

    grad_fn = value_and_grad(
        loss_with_aux,
        {"embedding": lambda ids, scale: ids, "dense": None},
        has_aux=True,
    )
    params, ids = make_params(), BATCH["ids"]
    (value, aux), grads = jax.jit(grad_fn)(params, ids, scale=2.0)
    np.testing.assert_array_equal(aux, params["embedding"][ids])
    np.testing.assert_allclose(value, 2 * aux.sum(), 1e-6)
    want = jax.grad(lambda p: loss_with_aux(p, ids, scale=2.0)[0])(params)
    np.testing.assert_allclose(
        grads["embedding"].to_dense(ROWS), want["embedding"], 1e-6
    )
    np.testing.assert_array_equal(grads["dense"]["kernel"], 0)


def test_rows_may_name_a_bare_table_or_a_subtree():
    table = jnp.arange(12.0).reshape(6, 2)
    grad_fn = value_and_grad(lambda t, i: take(t, i).sum(), rows=lambda ids: ids)
    _, grads = jax.jit(grad_fn)(table, jnp.array([1, 1]))
    np.testing.assert_array_equal(grads.to_dense(6)[1], [2, 2])

    def two_tables(params, ids):
        return sum(take(table, ids).sum() for table in params["tables"])

    params = {"tables": [table, table], "bias": jnp.ones(3)}
    grad_fn = value_and_grad(two_tables, {"tables": lambda ids: ids})
    _, grads = jax.jit(grad_fn)(params, jnp.array([4]))
    assert all(isinstance(leaf, IndexedSlices) for leaf in grads["tables"])
    np.testing.assert_array_equal(grads["bias"], np.zeros(3))


def test_no_ids_at_all():
    batch = {"ids": jnp.zeros((0,), jnp.int32)}
    for grad_fn in (
        value_and_grad(loss, ids_of),
        jax.jit(value_and_grad(loss, ids_of)),
    ):
        value, grads = grad_fn(make_params(), batch)
        assert value == 0
        assert grads["embedding"].values.shape == (0, 2)


def test_ids_that_rows_did_not_name():
    for some in (lambda batch: batch["ids"][:1], lambda batch: batch["ids"][:0]):
        grad_fn = value_and_grad(loss, rows={"embedding": some})
        with pytest.raises(ValueError, match=r"\['embedding'\].*rows did not name"):
            grad_fn(make_params(), BATCH)
        value, _ = jax.jit(grad_fn)(make_params(), BATCH)
        assert jnp.isnan(value)


def test_a_look_up_makes_no_nan_of_its_own():
    def squares(params, ids):
        return jnp.sum(jnp.square(take(params["embedding"], ids)))

    ids, params = jnp.array([1, 3, 1]), {"embedding": jnp.ones((5, 2))}
    run = value_and_grad(squares, rows={"embedding": lambda ids: ids})
    with jax.debug_nans(True):
        _, grads = run(params, ids)
    np.testing.assert_array_equal(grads["embedding"].indices[:2], [1, 3])
    # What is not a number in the data is still found.
    params["embedding"] = params["embedding"].at[3].set(jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        run(params, ids)


def test_ids_out_of_range():
    grad_fn = value_and_grad(loss, rows=ids_of)
    for bad in (ROWS, -1):
        with pytest.raises(ValueError, match=rf"\['embedding'\]: row {bad}\b"):
            grad_fn(make_params(), {"ids": jnp.array([3, bad])})
    ids = jnp.array([3, ROWS, -1, LAST])
    value, grads = jax.jit(grad_fn)(make_params(), {"ids": ids})
    # Left over entries, such as sum_duplicates makes: they pass the checks, and count
    # in no norm.
    assert (grads["embedding"].indices[1:] > 2**30).all()
    np.testing.assert_array_equal(grads["embedding"].values[1:], 0)
    want_value, want = grad_fn(make_params(), {"ids": jnp.array([3])})
    np.testing.assert_allclose(value, want_value, 1e-6)
    np.testing.assert_allclose(
        grads["embedding"].to_dense(ROWS), want["embedding"].to_dense(ROWS), 1e-6
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table[jnp.array([0])],
        lambda table: jnp.take(table, 0, axis=0),
        lambda table: jnp.ones((1, ROWS)) @ table,
        lambda table: table @ jnp.ones((2, 1)),
        lambda table: table.T,
        lambda table: table.at[0].get(),
        lambda table: jnp.sum(table),
        lambda table: np.asarray(table),
        lambda table: table * 2.0,
        lambda table: -table,
        lambda table: table == 0,
        lambda table: list(table),
    ],
)
def test_a_table_is_used_by_take_only(use):
    def wrong(params, batch):
        return jnp.sum(use(params["embedding"]))

    with pytest.raises(TypeError, match=r"\['embedding'\].*oxs\.take"):
        value_and_grad(wrong, rows=ids_of)(make_params(), BATCH)
    with pytest.raises(TypeError, match=r"\['embedding'\].*oxs\.take"):
        jax.jit(value_and_grad(wrong, rows=ids_of))(make_params(), BATCH)


def test_a_norm_of_all_parameters_inside_the_loss_is_refused():
    def decayed(params, batch):
        return loss(params, batch) + optax.tree.norm(params)

    with pytest.raises((TypeError, NotImplementedError)):
        value_and_grad(decayed, rows=ids_of)(make_params(), BATCH)
    with pytest.raises(TypeError):
        jax.jit(value_and_grad(decayed, rows=ids_of))(make_params(), BATCH)


def test_the_stand_in_has_the_table_s_shape():
    def check(params, batch):
        table = params["embedding"]
        assert table.shape == (ROWS, 2) and table.ndim == 2
        assert table.dtype == jnp.float32
        return loss(params, batch)

    value_and_grad(check, rows=ids_of)(make_params(), BATCH)


def test_wrong_rows_are_refused():
    with pytest.raises(TypeError, match=r"function that returns ids.*\['embedding'\]"):
        value_and_grad(loss, rows={"embedding": 3})
    with pytest.raises(TypeError, match="loss must be a function"):
        value_and_grad(3, rows=ids_of)  # pyright: ignore[reportArgumentType]
    for name in ("embeding", "none"):
        params = make_params() | {"none": None}
        grad_fn = value_and_grad(loss, rows={name: lambda batch: batch["ids"]})
        with pytest.raises(ValueError, match=rf"rows names \['{name}'\]"):
            grad_fn(params, BATCH)
    floats = {"embedding": lambda batch: batch["ids"].astype(jnp.float32)}
    with pytest.raises(TypeError, match=r"ids for \['embedding'\] must be integers"):
        value_and_grad(loss, rows=floats)(make_params(), BATCH)
    for bad in (jnp.ones(()), jnp.ones(ROWS, jnp.int32)):
        with pytest.raises(TypeError, match=r"\['embedding'\], which is not a table"):
            value_and_grad(loss, rows=ids_of)(make_params() | {"embedding": bad}, BATCH)


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked", "pmap"])
def test_each_replica_has_its_own_rows(context):
    params = make_params()
    ids = jnp.arange(8 * 3).reshape(8, 3) % ROWS

    def step(params, ids):
        params = params | {"dense": oxs.localize(params["dense"], "data")}
        return value_and_grad(loss, rows=ids_of)(params, {"ids": ids})

    if context == "vmap":
        run = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name="data"))
    elif context == "pmap":
        run = jax.pmap(step, in_axes=(None, 0), axis_name="data")
    else:

        def on_shard(params, ids):
            return jax.tree.map(lambda leaf: leaf[None], step(params, ids[0]))

        run = jax.jit(
            jax.shard_map(
                on_shard,
                mesh=jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)),
                in_specs=(P(), P("data")),
                out_specs=P("data"),
                check_vma=context == "shard_map",
            )
        )
    values, grads = run(params, ids)
    dense = jax.jit(jax.value_and_grad(loss))
    for replica in range(8):
        want_value, want = dense(params, {"ids": ids[replica]})
        got = jax.tree.map(lambda leaf: leaf[replica], grads)  # noqa: B023
        np.testing.assert_allclose(values[replica], want_value, 1e-5)
        np.testing.assert_allclose(
            got["embedding"].to_dense(ROWS), want["embedding"], 1e-5, 1e-6
        )
        np.testing.assert_allclose(
            got["dense"]["kernel"], want["dense"]["kernel"], 1e-5, 1e-6
        )


# What Optax does with slices.


def always(step, **_):
    return step >= 0


def measure(updates, *_, **__):
    return {"total": jnp.zeros(())}


# How each transformation of Optax that keeps no arrays is made, what it does with
# IndexedSlices that nobody announced ("right" or "raises"), and what it does inside
# `on_values`: "dense", what it does to the dense gradient; "values", what it does to
# the values; "refused", a TypeError.
STATELESS = {
    "adaptive_grad_clip": (lambda: optax.adaptive_grad_clip(0.1), "raises", "refused"),
    "add_decayed_weights": (
        lambda: optax.add_decayed_weights(0.1),
        "raises",
        "refused",
    ),
    "add_noise": (lambda: optax.add_noise(0.1, 0.1, key=0), "raises", "refused"),
    "apply_if_finite": (
        lambda: optax.apply_if_finite(optax.scale(2.0), 3),
        "raises",
        "dense",
    ),
    "centralize": (optax.centralize, "right", "dense"),
    "chain": (
        lambda: optax.chain(optax.clip(0.5), optax.scale(-2.0)),
        "raises",
        "dense",
    ),
    "clip": (lambda: optax.clip(0.5), "raises", "dense"),
    "clip_by_block_rms": (lambda: optax.clip_by_block_rms(0.1), "raises", "values"),
    "clip_by_global_norm": (lambda: optax.clip_by_global_norm(0.5), "raises", "dense"),
    "conditionally_mask": (
        lambda: optax.conditionally_mask(optax.scale(2.0), always),
        "raises",
        "dense",
    ),
    "conditionally_transform": (
        lambda: optax.conditionally_transform(optax.scale(2.0), always),
        "raises",
        "dense",
    ),
    "differentially_private_aggregate": (
        lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0),
        "raises",
        "refused",
    ),
    "flatten": (lambda: optax.flatten(optax.clip(0.5)), "raises", "dense"),
    "freeze": (lambda: optax.freeze(True), "right", "dense"),
    "fromage": (lambda: optax.fromage(0.1), "raises", "refused"),
    "identity": (optax.identity, "right", "dense"),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.scale)(step_size=2.0),
        "raises",
        "dense",
    ),
    "keep_params_nonnegative": (optax.keep_params_nonnegative, "raises", "refused"),
    "masked": (lambda: optax.masked(optax.scale(2.0), True), "raises", "dense"),
    "named_chain": (
        lambda: optax.named_chain(("a", optax.scale(2.0))),
        "raises",
        "dense",
    ),
    "noisy_sgd": (lambda: optax.noisy_sgd(0.1, key=0), "raises", "refused"),
    "normalize": (optax.contrib.normalize, "raises", "dense"),
    "normalize_by_update_norm": (optax.normalize_by_update_norm, "raises", "dense"),
    "partition": (
        lambda: optax.partition({"a": optax.scale(2.0)}, "a"),
        "raises",
        "dense",
    ),
    "polyak_sgd": (lambda: optax.polyak_sgd(0.1), "raises", "dense"),
    "reduce_on_plateau": (optax.contrib.reduce_on_plateau, "raises", "dense"),
    "scale": (lambda: optax.scale(-1.0), "raises", "dense"),
    "scale_by_learning_rate": (
        lambda: optax.scale_by_learning_rate(0.1),
        "raises",
        "dense",
    ),
    "scale_by_param_block_norm": (
        optax.scale_by_param_block_norm,
        "raises",
        "refused",
    ),
    "scale_by_param_block_rms": (optax.scale_by_param_block_rms, "raises", "refused"),
    "scale_by_polyak": (optax.scale_by_polyak, "raises", "dense"),
    "scale_by_schedule": (
        lambda: optax.scale_by_schedule(lambda count: 0.1 / (1 + count)),
        "raises",
        "dense",
    ),
    "scale_by_sign": (optax.scale_by_sign, "raises", "dense"),
    "scale_by_trust_ratio": (optax.scale_by_trust_ratio, "raises", "refused"),
    "selective_transform": (
        lambda: optax.selective_transform(optax.scale(2.0), freeze_mask=False),
        "raises",
        "dense",
    ),
    "set_to_zero": (optax.set_to_zero, "right", "dense"),
    "sgd": (lambda: optax.sgd(0.1), "raises", "dense"),
    "sign_sgd": (lambda: optax.sign_sgd(0.1), "raises", "dense"),
    "snapshot": (lambda: optax.snapshot("total", measure), "right", "dense"),
    "split_real_and_imaginary": (
        lambda: optax.contrib.split_real_and_imaginary(optax.scale(2.0)),
        "raises",
        "dense",
    ),
    "stateless": (
        lambda: optax.stateless(
            lambda updates, _: jax.tree.map(lambda u: u * 2.0, updates)
        ),
        "raises",
        "dense",
    ),
    "stateless_with_tree_map": (
        lambda: optax.stateless_with_tree_map(lambda u, _: u * 2.0),
        "raises",
        "dense",
    ),
    "with_extra_args_support": (
        lambda: optax.with_extra_args_support(optax.scale(2.0)),
        "raises",
        "dense",
    ),
    "zero_nans": (optax.zero_nans, "right", "dense"),
}
# These keep arrays, but need arguments of their own kind to show it; measure_with_ema
# returns a measurement in place of updates.
KEEPS_ARRAYS = {
    "ema",
    "galore",
    "lookahead",
    "measure_with_ema",
    "mechanize",
    "sam",
    "scale_by_backtracking_linesearch",
    "scale_by_galore",
    "scale_by_zoom_linesearch",
    "schedule_free",
    "trace",
}
# The same as `partition` and `inject_hyperparams`, and what warns and then goes away:
# `dpsgd` is `differentially_private_aggregate` with its deprecated argument.
ALIASES = {"multi_transform", "inject_stateful_hyperparams", "dpsgd"}
# What an optimizer that reads the loss wants to know.
EXTRA = {"value": jnp.float32(1.5)}
PARAMS = {"embedding": jnp.full((ROWS, 2), 0.5), "bias": jnp.full((3,), 2.0)}


def table_grads(nan=False):
    slices = some_slices()
    if nan:
        slices = slices.map_values(lambda values: values.at[1, 0].set(jnp.nan))
    return {"embedding": slices, "bias": jnp.array([0.3, -2.0, 1.0])}


def densely(grads):
    return grads | {"embedding": grads["embedding"].to_dense(ROWS)}


def run_once(tx, grads) -> Any:
    tx = optax.with_extra_args_support(tx)
    # Optax's own arithmetic needs it, e.g. a count times a float.
    with jax.numpy_dtype_promotion("standard"):
        return tx.update(grads, tx.init(PARAMS), PARAMS, **EXTRA)[0]


def public_transformations():
    """Every public function of Optax that says it returns a transformation."""
    for module in (optax, optax.transforms, optax.contrib):
        for name, function in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            returns = str(inspect.signature(function).return_annotation)
            if "GradientTransformation" in returns:
                yield name, function


def keeps_arrays(function):
    """Whether a function with default arguments gives a transformation with arrays."""
    parameters = inspect.signature(function).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (0, 1, 3)
    ]
    if set(needed) - {"learning_rate"}:
        return False
    try:
        state = function(**dict.fromkeys(needed, 0.1)).init(PARAMS)
    except ValueError:  # optax.chain() of nothing
        return False
    return any(jnp.ndim(leaf) > 0 for leaf in jax.tree.leaves(state))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_the_table_covers_optax():
    found = {
        name
        for name, function in public_transformations()
        if not keeps_arrays(function) and name not in KEEPS_ARRAYS
    }
    assert found - ALIASES == set(STATELESS)


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("compiled", [False, True])
def test_optax_on_slices_is_right_or_raises(name, compiled):
    make, alone, _ = STATELESS[name]
    tx = make()
    run = functools.partial(run_once, tx)
    grads = table_grads(nan=name == "zero_nans")
    if compiled:
        run = jax.jit(run)
    if alone == "raises":
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            run(grads)
        return
    got, want = densely(run(grads)), run_once(tx, densely(grads))
    if name == "zero_nans":  # NaN + 1 in one row: the NaN alone is zeroed
        want = densely(
            {"embedding": grads["embedding"].map_values(jnp.nan_to_num)} | {"bias": 0}
        ) | {"bias": grads["bias"]}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), got, want)


@pytest.mark.parametrize("name", STATELESS)
def test_on_values(name):
    make, _, inside = STATELESS[name]
    tx, grads = make(), table_grads(nan=name == "zero_nans")
    run = jax.jit(functools.partial(run_once, on_values(tx)))
    if inside == "refused":
        with pytest.raises(TypeError, match="on_values"):
            run(grads)
        return
    got = run(grads)
    unique = grads["embedding"].sum_duplicates()
    np.testing.assert_array_equal(got["embedding"].indices, unique.indices)
    if inside == "values":
        values = run_once(tx, grads | {"embedding": unique.values})
        want = values | {"embedding": unique.map_values(lambda _: values["embedding"])}
        want = densely(want)
    else:
        want = run_once(tx, densely(grads))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-7), densely(got), want
    )


def test_on_values_keeps_none_and_counts():
    tx = on_values(optax.scale_by_schedule(lambda count: jnp.float32(1) + count))
    grads = {"embedding": some_slices(), "bias": None}
    params = {"embedding": jnp.ones((ROWS, 2)), "bias": jnp.ones(3)}
    state = tx.init(params)
    updates: Any
    with jax.numpy_dtype_promotion("standard"):
        _, state = tx.update(grads, state, params)
        updates, state = tx.update(grads, state, params)
    assert updates["bias"] is None
    np.testing.assert_allclose(
        updates["embedding"].to_dense(ROWS), 2 * dense_reference(some_slices()), 1e-6
    )
    assert optax.tree.get(state, "count") == 2


def test_on_values_gives_dense_leaves_their_parameters():
    decay = optax.masked(
        optax.add_decayed_weights(0.1), {"embedding": False, "bias": True}
    )
    grads = table_grads()
    updates = run_once(on_values(decay), grads)
    np.testing.assert_allclose(updates["bias"], grads["bias"] + 0.2, 1e-6)
    np.testing.assert_allclose(
        updates["embedding"].to_dense(ROWS), grads["embedding"].to_dense(ROWS), 1e-6
    )


def test_on_values_refuses_a_transformation_with_arrays():
    tx = on_values(optax.adam(0.1))
    with pytest.raises(TypeError, match=r"float32\[3\] at .*mu\['bias'\]"):
        tx.init(PARAMS)
    with pytest.raises(TypeError, match="on_values"):
        tx.update(table_grads(), optax.adam(0.1).init(PARAMS))


def test_on_values_init_takes_shapes_and_placeholders():
    tx = on_values(optax.chain(optax.zero_nans(), optax.sgd(lambda count: 0.1)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert jax.tree.structure(tx.init(shapes)) == jax.tree.structure(tx.init(PARAMS))
    state = tx.init(PARAMS)
    same = optax.tree.map_params(tx, lambda leaf: leaf, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)


@pytest.mark.parametrize(
    "function",
    [
        optax.global_norm,
        optax.tree.norm,
        optax.tree.sum,
        optax.tree.max,
        lambda tree: optax.tree.scale(2.0, tree),
        lambda tree: optax.tree.add(tree, tree),
        lambda tree: optax.tree.vdot(tree, tree),
        lambda tree: optax.tree.cast(tree, jnp.bfloat16),
        lambda tree: optax.incremental_update(tree, tree, 0.1),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_functions_of_optax_never_count_indices(function, compiled):
    refusals = (TypeError, ValueError, NotImplementedError, AssertionError)  # of JAX
    with pytest.raises(refusals):
        (jax.jit(function) if compiled else function)(table_grads())


@pytest.mark.parametrize("make", [optax.adam, optax.adagrad, optax.lion, optax.adamw])
def test_optimizers_of_optax_refuse_slices(make):
    tx = make(0.1)
    with pytest.raises((TypeError, ValueError)):
        tx.update(table_grads(), tx.init(PARAMS), PARAMS)
