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
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from benchmarks import by_hand
from optx_sync.core.slices import IndexedSlices
from optx_sync.rows.gradients import value_and_grad
from optx_sync.rows.lookup import take
from optx_sync.rows.on_values import on_values
from tests.meshes import mesh_of
from tests.refusals import all_refused

ROWS = 9
LAST = 2**31 - 1
equal, close = np.testing.assert_array_equal, np.testing.assert_allclose
EITHER = pytest.mark.parametrize("how", [lambda fun: fun, jax.jit], ids=["", "jit"])


def some_slices(indices=(7, 3, 7, 0), width=2, dtype=jnp.float32, seed=0):
    random = np.random.default_rng(seed)
    values = random.normal(size=(len(indices), width))
    return IndexedSlices(np.array(indices, np.int32), jnp.asarray(values, dtype))


def dense_reference(slices, rows=ROWS):
    dense = np.zeros((rows, *slices.values.shape[1:]), np.float64)
    for index, value in zip(slices.indices, slices.values, strict=True):
        if 0 <= index < rows:
            dense[index] += np.asarray(value, np.float64)
    return dense


# The container.


def test_it_keeps_integers_of_any_dtype():
    slices = IndexedSlices(jnp.array([4, -1], jnp.int8), jnp.ones((2, 3)))
    assert slices.indices.dtype == jnp.int32 and slices.values.shape == (2, 3)
    equal(slices.indices, [4, -1])
    for empty in ([], np.array([], np.int64)):
        none = IndexedSlices(empty, jnp.zeros((0, 3)))
        equal(none.sum_duplicates().to_dense(4), 0)
    # What cannot be known to be too large does not wrap to a row.
    wide = jnp.array([2**31 + 5, 1], jnp.uint32)
    equal(jax.jit(lambda i: IndexedSlices(i, jnp.ones(2)).indices)(wide), [LAST, 1])


def rows_at(indices, rows=2):
    IndexedSlices(indices, jnp.ones((rows, 2)))


test_what_are_no_rows_is_refused = all_refused(globals())(r"""
rows_at(jnp.ones(2))
rows_at(np.array([True, False]))
rows_at([0.5, 1])  # TypeError: indices must be integers
rows_at(jnp.array([]), 0)  # TypeError: they name rows; got dtype float32
rows_at([1, 2], 3)  # ValueError: one row for each index
rows_at([[1, 2]], 1)  # ValueError: must be \[k\]
rows_at(np.array([2**32]), 1)  # ValueError: int32
""")


@pytest.mark.parametrize(
    "indices", [(7, 3, 7, 0), (-1, 7, -5, 7), (LAST, 3, LAST, -1), (5, 5, 5), ()]
)
@EITHER
def test_sum_duplicates(indices, how):
    slices = some_slices(indices)
    unique = how(IndexedSlices.sum_duplicates)(slices)
    got = np.asarray(unique.indices, np.int64)
    rows = sorted({index for index in indices if 0 <= index < ROWS})
    equal(got[: len(rows)], rows)
    assert (got[len(rows) :] > 2**30).all() and (np.diff(got) > 0).all()
    equal(np.asarray(unique.values)[len(rows) :], 0)
    close(unique.to_dense(ROWS), dense_reference(slices), 1e-6)
    # Again, and once more after they were joined with others.
    again = unique.sum_duplicates()
    equal(again.indices, unique.indices)
    equal(again.values, unique.values)
    other = some_slices(seed=1).sum_duplicates()
    joined = jax.tree.map(lambda *two: jnp.concatenate(two), unique, other)
    assert (np.diff(np.asarray(joined.sum_duplicates().indices, np.int64)) > 0).all()
    want = dense_reference(slices) + dense_reference(some_slices(seed=1))
    close(joined.sum_duplicates().to_dense(ROWS), want, 1e-6)


def test_half_precision_adds_up_in_float32():
    # In bfloat16, 256 + 1 is 256: one hundred ones would be lost one by one.
    values = jnp.array([256.0] + 100 * [1.0], jnp.bfloat16)
    slices = IndexedSlices(np.full(101, 3), values)
    assert slices.sum_duplicates().values.dtype == jnp.bfloat16
    assert slices.sum_duplicates().values[0] == slices.to_dense(ROWS)[3] == 356
    assert (jnp.zeros(ROWS, jnp.bfloat16) + slices)[3] == 356
    # And in the look-up's gradient.
    run = value_and_grad(
        lambda table, ids: take(table, ids).sum(dtype=jnp.float32), rows=lambda ids: ids
    )
    _, grads = jax.jit(run)(jnp.ones(ROWS, jnp.bfloat16), jnp.zeros(300, jnp.int32))
    assert grads.to_dense(ROWS)[0] == 300


def test_leading_axes_are_a_batch():
    one, other = some_slices(), some_slices((1, 1, 2, 8))
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    want = np.stack([dense_reference(one), dense_reference(other)])
    close(batch.to_dense(ROWS), want, 1e-6)
    close(batch.sum_duplicates().to_dense(ROWS), want, 1e-6)
    close(jnp.ones_like(want) + batch, 1 + want, 1e-6)
    lanes = jax.vmap(lambda slices: slices.sum_duplicates())(batch)
    close(lanes.to_dense(ROWS), want, 1e-6)


def test_transformations_of_jax_take_the_pytree():
    slices = some_slices()
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(slices)]
    assert [jax.tree_util.keystr(path) for path in paths] == [".indices", ".values"]
    doubled = slices.map_values(lambda values: 2 * values)
    chosen = jax.lax.cond(jnp.array(False), lambda: slices, lambda: doubled)
    equal(chosen.values, 2 * slices.values)
    carried, _ = jax.lax.scan(lambda x, _: (x, None), slices, None, length=2)
    equal(carried.indices, slices.indices)
    shapes = jax.eval_shape(IndexedSlices.sum_duplicates, slices)
    assert shapes.indices == jax.ShapeDtypeStruct((4,), jnp.int32)
    for placeholder in (None, object(), 0):
        made = jax.tree.structure(slices).unflatten([placeholder] * 2)
        assert jax.tree.leaves(made) == [placeholder] * 2 * (placeholder is not None)


# Adding to a table.


@pytest.mark.parametrize("values_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("table_dtype", [jnp.float32, jnp.bfloat16])
def test_apply_updates_is_the_dense_one(table_dtype, values_dtype):
    slices = some_slices(dtype=values_dtype)
    table = jnp.asarray(some_slices(range(ROWS), seed=1).values, table_dtype)
    apply_updates: Any = jax.jit(optax.apply_updates)
    got = apply_updates({"a": table}, {"a": slices})["a"]
    assert got.dtype == table_dtype
    if table_dtype == jnp.float32:
        close(got, table + dense_reference(slices), 1e-6)
    else:
        with jax.numpy_dtype_promotion("standard"):
            equal(got, apply_updates(table, slices.to_dense(ROWS)))


def test_numpy_tables_the_other_side_and_a_train_state():
    slices = some_slices()
    dense = dense_reference(slices)
    close(np.ones((ROWS, 2), np.float32) + slices, 1 + dense, 1e-6)
    close(slices + jnp.ones((ROWS, 2)), 1 + dense, 1e-6)
    params = {"embedding": jnp.ones((ROWS, 2)), "bias": jnp.ones(2)}
    tx = on_values(optax.sgd(0.5))
    state = TrainState.create(apply_fn=lambda: None, params=params, tx=tx)
    grads = {"embedding": slices, "bias": jnp.ones(2)}
    state = jax.jit(TrainState.apply_gradients)(state, grads=grads)
    close(state.params["embedding"], 1 - 0.5 * dense, 1e-6)
    equal(state.params["bias"], 0.5)


def test_rows_out_of_range_are_refused_where_they_are_known():
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
    close(table + padded, padded.to_dense(ROWS))
    # Elsewhere they are dropped.
    slices = some_slices((3, ROWS, -1, -ROWS, LAST, 3))
    want = dense_reference(slices)
    close(jax.jit(lambda s: s.to_dense(ROWS))(slices), want, 1e-6)
    close(slices.to_dense(ROWS), want, 1e-6)
    add = jax.jit(lambda t, s: t + s)
    close(add(table, slices), want, 1e-6)
    equal(add(table.astype(jnp.bfloat16), slices), jnp.asarray(want, jnp.bfloat16))


@EITHER
def test_a_table_of_another_shape_is_refused(how):
    for table in (jnp.zeros((ROWS, 3)), jnp.zeros(ROWS), jnp.zeros(())):
        with pytest.raises(ValueError, match="do not fit their table"):
            how(lambda t, s: t + s)(table, some_slices())


def test_other_arithmetic_is_refused():
    for operation in (
        lambda s: -s,
        lambda s: s * 2.0,
        lambda s: jnp.float32(2) * s,
        lambda s: np.ones((4, 2)) * s,
        lambda s: s + s,
        lambda s: 1.0 + s,
        lambda s: jnp.ones((ROWS, 2)) - s,
        lambda s: jnp.sqrt(s),
    ):
        with pytest.raises(TypeError):
            operation(some_slices())


def buffers(jaxpr):
    """The sizes of all arrays that a jaxpr makes, at any depth."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
        inner = jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        )
        for one in inner:
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield from buffers(one)


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


@EITHER
@pytest.mark.parametrize("table", [jnp.arange(6.0), jnp.arange(24.0).reshape(6, 2, 2)])
def test_take_is_indexing(table, how):
    for ids in (jnp.array([[5, 0, 0]]), np.array([2], np.uint8), 4, np.zeros(0, int)):
        equal(how(take)(table, ids), np.asarray(table)[ids])


def test_take_out_of_range():
    table = jnp.arange(1.0, 7.0)
    for bad in (6, -1):
        with pytest.raises(ValueError, match=f"row {bad} is out of range"):
            take(table, jnp.array([1, bad]))
    ids = jnp.array([1, 6, -1, LAST])
    equal(jax.jit(take)(table, ids), [2, 0, 0, 0])
    gradient = jax.jit(jax.grad(lambda t, i: take(t, i).sum()))(table, ids)
    equal(gradient, [0, 1, 0, 0, 0, 0])


@EITHER
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_is_the_dense_one(dtype, how):
    params = make_params(dtype)
    value, grads = how(value_and_grad(loss, rows=ids_of))(params, BATCH)
    want_value, want = jax.value_and_grad(loss)(params, BATCH)
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-7
    close(value, want_value, tolerance)
    table = grads["embedding"]
    assert isinstance(table, IndexedSlices) and table.values.dtype == dtype
    equal(table.indices[:4], [0, 3, 7, 8])
    for got, dense in (
        (table.to_dense(ROWS), want["embedding"]),
        (grads["dense"]["kernel"], want["dense"]["kernel"]),
    ):
        # An entry is a sum: two programs round it as its largest terms are.
        got, dense = np.asarray(got, np.float32), np.asarray(dense, np.float32)
        close(got, dense, tolerance, 1e-6 * np.abs(dense).max())


def test_no_array_of_the_table_s_size_is_made():
    params, table_size = make_params(rows=100_000), 200_000
    run = value_and_grad(loss, rows=ids_of)
    jaxpr = jax.make_jaxpr(run)(params, BATCH)
    assert max(buffers(jaxpr.jaxpr)) < table_size / 100
    dense = jax.make_jaxpr(jax.value_and_grad(loss))(params, BATCH)
    assert max(buffers(dense.jaxpr)) == table_size  # the measure measures
    memory = by_hand.memory(jax.jit(run), params, BATCH)
    assert memory.temporary + memory.outputs < table_size / 10
    # A whole step updates the donated table in place.
    tx = on_values(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    state = tx.init(params)

    def step(params, batch):
        updates, _ = tx.update(run(params, batch)[1], state, params)
        return optax.apply_updates(params, updates)

    memory = by_hand.memory(jax.jit(step, donate_argnums=0), params, BATCH)
    assert memory.aliased >= 4 * table_size
    assert memory.temporary < 4 * table_size / 10


def test_has_aux_keywords_and_inner_transformations():
    @jax.checkpoint
    def encode(table, ids):
        return jax.jit(take)(table, ids)

    def loss_with_aux(params, ids, *, scale):
        encoded = jax.vmap(lambda ids: encode(params["embedding"], ids))(ids)
        return scale * encoded.sum(), encoded

    rows = {"embedding": lambda ids, scale: ids, "dense": None}
    grad_fn = value_and_grad(loss_with_aux, rows, has_aux=True)
    params, ids = make_params(), BATCH["ids"]
    (value, aux), grads = jax.jit(grad_fn)(params, ids, scale=2.0)
    equal(aux, params["embedding"][ids])
    close(value, 2 * aux.sum(), 1e-6)
    want = jax.grad(lambda p: loss_with_aux(p, ids, scale=2.0)[0])(params)
    close(grads["embedding"].to_dense(ROWS), want["embedding"], 1e-6)
    equal(grads["dense"]["kernel"], 0)


def test_rows_may_name_a_bare_table_or_a_subtree():
    table = jnp.arange(12.0).reshape(6, 2)
    grad_fn = value_and_grad(lambda t, i: take(t, i).sum(), rows=lambda ids: ids)
    _, grads = jax.jit(grad_fn)(table, jnp.array([1, 1]))
    equal(grads.to_dense(6)[1], [2, 2])

    def two_tables(params, ids):
        return sum(take(table, ids).sum() for table in params["tables"])

    params = {"tables": [table, table], "bias": jnp.ones(3)}
    grad_fn = value_and_grad(two_tables, {"tables": lambda ids: ids})
    _, grads = jax.jit(grad_fn)(params, jnp.array([4]))
    assert all(isinstance(leaf, IndexedSlices) for leaf in grads["tables"])
    equal(grads["bias"], np.zeros(3))


@EITHER
def test_no_ids_at_all(how):
    batch = {"ids": jnp.zeros((0,), jnp.int32)}
    value, grads = how(value_and_grad(loss, ids_of))(make_params(), batch)
    assert value == 0 and grads["embedding"].values.shape == (0, 2)


def test_ids_that_rows_did_not_name():
    for some in (lambda batch: batch["ids"][:1], lambda batch: batch["ids"][:0]):
        grad_fn = value_and_grad(loss, rows={"embedding": some})
        with pytest.raises(ValueError, match=r"\['embedding'\].*rows did not name"):
            grad_fn(make_params(), BATCH)
        assert jnp.isnan(jax.jit(grad_fn)(make_params(), BATCH)[0])


def test_a_look_up_makes_no_nan_of_its_own():
    def squares(params, ids):
        return jnp.sum(jnp.square(take(params["embedding"], ids)))

    ids, params = jnp.array([1, 3, 1]), {"embedding": jnp.ones((5, 2))}
    run = value_and_grad(squares, rows={"embedding": lambda ids: ids})
    with jax.debug_nans(True):
        equal(run(params, ids)[1]["embedding"].indices[:2], [1, 3])
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
    # Unused entries, such as sum_duplicates makes: they pass the checks, and count in
    # no norm.
    assert (grads["embedding"].indices[1:] > 2**30).all()
    equal(grads["embedding"].values[1:], 0)
    want_value, want = grad_fn(make_params(), {"ids": jnp.array([3])})
    close(value, want_value, 1e-6)
    table = want["embedding"].to_dense(ROWS)
    close(grads["embedding"].to_dense(ROWS), table, 1e-6)


@EITHER
def test_a_table_is_used_by_take_only(how):
    for use in (
        lambda table: table[jnp.array([0])],
        lambda table: jnp.take(table, 0, axis=0),
        lambda table: jnp.ones((1, ROWS)) @ table,
        lambda table: table.T,
        lambda table: table.at[0].get(),
        lambda table: np.asarray(table),
        lambda table: table * 2.0,
        lambda table: -table,
        lambda table: table == 0,
        lambda table: list(table),
    ):

        def wrong(params, batch, use=use):
            return jnp.sum(use(params["embedding"]))

        with pytest.raises(TypeError, match=r"\['embedding'\].*oxs\.take"):
            how(value_and_grad(wrong, rows=ids_of))(make_params(), BATCH)

    def decayed(params, batch):
        return loss(params, batch) + optax.tree.norm(params)

    with pytest.raises((TypeError, NotImplementedError)):
        how(value_and_grad(decayed, rows=ids_of))(make_params(), BATCH)

    def looking(params, batch):
        table = params["embedding"]
        assert (table.shape, table.ndim, table.dtype) == ((ROWS, 2), 2, jnp.float32)
        return loss(params, batch)

    how(value_and_grad(looking, rows=ids_of))(make_params(), BATCH)


def grads_of(changed: Any = None, **rows):
    params = make_params() | (changed or {})
    return value_and_grad(loss, rows=rows or ids_of)(params, BATCH)


def ids(batch):
    return batch["ids"]


def with_float_ids(batch):
    return batch["ids"].astype("f4")


test_what_names_no_rows_is_refused = all_refused(globals())(r"""
grads_of(embedding=3)  # TypeError: rows at \['embedding'\] must be a function
value_and_grad(3, ids_of)  # TypeError: loss must be a function
grads_of(embeding=ids)  # ValueError: rows names \['embeding'\]
grads_of({"none": None}, none=ids)  # ValueError: rows names \['none'\]
grads_of(embedding=with_float_ids)  # TypeError: \['embedding'\] must be integers
grads_of({"embedding": jnp.ones(())})
    # TypeError: rows for \['embedding'\] needs a table
grads_of({"embedding": jnp.ones(ROWS, "i4")})  # TypeError: grad requires real
take(jnp.ones(3), jnp.ones(2))  # TypeError: ids must be integers
take(some_slices(), [0])
take(3.0, [0])
take(jnp.ones(()), [0])  # TypeError: take needs a table
""")


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
def test_each_replica_has_its_own_rows(context):
    params, all_ids = make_params(), jnp.arange(8 * 3).reshape(8, 3) % ROWS

    def step(params, ids):
        params = params | {"dense": oxs.localize(params["dense"], "data")}
        return value_and_grad(loss, rows=ids_of)(params, {"ids": ids})

    def on_shard(params, ids):
        return jax.tree.map(lambda leaf: leaf[None], step(params, ids[0]))

    if context == "vmap":
        run = jax.vmap(step, in_axes=(None, 0), axis_name="data")
    else:
        run = jax.shard_map(
            on_shard,
            mesh=mesh_of({"data": 8}),
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=context == "shard_map",
        )
    values, grads = jax.jit(run)(params, all_ids)
    dense = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))
    want_values, want = dense(params, {"ids": all_ids})
    close(values, want_values, 1e-5)
    close(grads["embedding"].to_dense(ROWS), want["embedding"], 1e-5, 1e-6)
    close(grads["dense"]["kernel"], want["dense"]["kernel"], 1e-5, 1e-6)


# What Optax does with slices.


def always(step, **_):
    return step >= 0


def measure(updates, *_, **__):
    return {"total": jnp.zeros(())}


def private():
    return optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0)


def double():
    return optax.scale(2.0)


def doubled(updates, _):
    return jax.tree.map(lambda u: u * 2.0, updates)


# How each transformation of Optax that keeps no arrays is made.
STATELESS = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.1, key=0),
    "apply_if_finite": lambda: optax.apply_if_finite(double(), 3),
    "centralize": optax.centralize,
    "chain": lambda: optax.chain(optax.clip(0.5), optax.scale(-2.0)),
    "clip": lambda: optax.clip(0.5),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
    "conditionally_mask": lambda: optax.conditionally_mask(double(), always),
    "conditionally_transform": lambda: optax.conditionally_transform(double(), always),
    "differentially_private_aggregate": private,
    "flatten": lambda: optax.flatten(optax.clip(0.5)),
    "freeze": lambda: optax.freeze(True),
    "fromage": lambda: optax.fromage(0.1),
    "identity": optax.identity,
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.scale)(step_size=2.0),
    "keep_params_nonnegative": optax.keep_params_nonnegative,
    "masked": lambda: optax.masked(double(), True),
    "named_chain": lambda: optax.named_chain(("a", double())),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "normalize": optax.contrib.normalize,
    "normalize_by_update_norm": optax.normalize_by_update_norm,
    "partition": lambda: optax.partition({"a": double()}, "a"),
    "polyak_sgd": lambda: optax.polyak_sgd(0.1),
    "reduce_on_plateau": optax.contrib.reduce_on_plateau,
    "scale": lambda: optax.scale(-1.0),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.1),
    "scale_by_param_block_norm": optax.scale_by_param_block_norm,
    "scale_by_param_block_rms": optax.scale_by_param_block_rms,
    "scale_by_polyak": optax.scale_by_polyak,
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: 0.1 / (1 + n)),
    "scale_by_sign": optax.scale_by_sign,
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "selective_transform": lambda: optax.selective_transform(
        double(), freeze_mask=False
    ),
    "set_to_zero": optax.set_to_zero,
    "sgd": lambda: optax.sgd(0.1),
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "snapshot": lambda: optax.snapshot("total", measure),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(
        double()
    ),
    "stateless": lambda: optax.stateless(doubled),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda u, _: u * 2.0
    ),
    "with_extra_args_support": lambda: optax.with_extra_args_support(double()),
    "zero_nans": optax.zero_nans,
}
# These are right on IndexedSlices that nobody announced; all others raise.
RIGHT = {"centralize", "freeze", "identity", "set_to_zero", "snapshot", "zero_nans"}
# `on_values` refuses these; the others do to the values what they do to the dense
# gradient, but for `clip_by_block_rms`, whose mean is over the values.
REFUSED = {
    *("adaptive_grad_clip", "add_decayed_weights", "add_noise", "fromage", "noisy_sgd"),
    *("differentially_private_aggregate", "keep_params_nonnegative"),
    *("scale_by_param_block_norm", "scale_by_param_block_rms", "scale_by_trust_ratio"),
}
# These keep arrays, but need arguments of their own kind to show it; measure_with_ema
# returns a measurement in place of updates.
KEEPS_ARRAYS = {
    *("ema", "galore", "lookahead", "measure_with_ema", "mechanize", "sam", "trace"),
    *("scale_by_backtracking_linesearch", "scale_by_galore", "schedule_free"),
    "scale_by_zoom_linesearch",
}
# The same as `partition` and `inject_hyperparams`, and what warns and then goes away:
# `dpsgd` is `differentially_private_aggregate` with its deprecated argument.
ALIASES = {"multi_transform", "inject_stateful_hyperparams", "dpsgd"}
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
    # Optax's own arithmetic needs it, e.g. a count times a float. `value` is for
    # optimizers that read the loss.
    with jax.numpy_dtype_promotion("standard"):
        return tx.update(grads, tx.init(PARAMS), PARAMS, value=jnp.float32(1.5))[0]


def same(got, want):
    jax.tree.map(lambda a, b: close(a, b, 1e-6, 1e-7), got, want)


def public_transformations():
    """Every public function of Optax that says it returns a transformation."""
    for module in (optax, optax.transforms, optax.contrib):
        for name, function in vars(module).items():
            if inspect.isfunction(function) and not name.startswith("_"):
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
def test_optax_on_slices_is_right_or_raises_and_on_values_is_right(name):
    tx, grads = STATELESS[name](), table_grads(nan=name == "zero_nans")
    alone, wrapped = (
        jax.jit(functools.partial(run_once, one)) for one in (tx, on_values(tx))
    )
    if name not in REFUSED:
        dense = run_once(tx, densely(grads))
    if name not in RIGHT:
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            alone(grads)
    elif name == "zero_nans":  # NaN + 1 in one row: the NaN alone is zeroed
        finite = grads["embedding"].map_values(jnp.nan_to_num).to_dense(ROWS)
        same(densely(alone(grads)), grads | {"embedding": finite})
    else:
        same(densely(alone(grads)), dense)
    if name in REFUSED:
        with pytest.raises(TypeError, match="on_values"):
            wrapped(grads)
        return
    got, unique = wrapped(grads), grads["embedding"].sum_duplicates()
    equal(got["embedding"].indices, unique.indices)
    if name == "clip_by_block_rms":
        values = run_once(tx, grads | {"embedding": unique.values})
        clipped = unique.map_values(lambda _: values["embedding"])
        dense = values | {"embedding": clipped.to_dense(ROWS)}
    same(densely(got), dense)


def test_on_values_keeps_none_and_counts_and_gives_dense_leaves_their_parameters():
    tx = on_values(optax.scale_by_schedule(lambda count: jnp.float32(1) + count))
    grads: Any = {"embedding": some_slices(), "bias": None}
    state = tx.init(PARAMS)
    updates: Any = None
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            updates, state = tx.update(grads, state, PARAMS)
    assert updates["bias"] is None and optax.tree.get(state, "count") == 2
    want = 2 * dense_reference(some_slices())
    close(updates["embedding"].to_dense(ROWS), want, 1e-6)
    decay = optax.add_decayed_weights(0.1)
    decay = on_values(optax.masked(decay, {"embedding": False, "bias": True}))
    grads = table_grads()
    updates = run_once(decay, grads)
    same(densely(updates), densely(grads) | {"bias": grads["bias"] + 0.2})


def test_on_values_refuses_a_transformation_with_arrays():
    tx = on_values(optax.adam(0.1))
    with pytest.raises(TypeError, match=r"float32\[3\] at .*mu\['bias'\]"):
        tx.init(PARAMS)
    with pytest.raises(TypeError, match="on_values"):
        tx.update(table_grads(), optax.adam(0.1).init(PARAMS))


def test_on_values_init_takes_shapes_and_placeholders():
    tx = on_values(optax.chain(optax.zero_nans(), optax.sgd(lambda count: 0.1)))
    state = tx.init(PARAMS)
    shapes = jax.eval_shape(lambda: PARAMS)
    marked = optax.tree.map_params(tx, lambda leaf: leaf, state)
    for other in (tx.init(shapes), marked):
        assert jax.tree.structure(other) == jax.tree.structure(state)


@EITHER
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_functions_and_optimizers_of_optax_never_count_indices(how):
    grads = table_grads()
    refusals = (TypeError, ValueError, NotImplementedError, AssertionError)  # of JAX
    for function in (
        optax.global_norm,
        optax.tree.norm,
        optax.tree.sum,
        optax.tree.max,
        lambda tree: optax.tree.scale(2.0, tree),
        lambda tree: optax.tree.add(tree, tree),
        lambda tree: optax.tree.vdot(tree, tree),
        lambda tree: optax.tree.cast(tree, jnp.bfloat16),
        lambda tree: optax.incremental_update(tree, tree, 0.1),
    ):
        with pytest.raises(refusals):
            how(function)(grads)
    for make in (optax.adam, optax.adagrad, optax.lion, optax.adamw):
        tx = make(0.1)
        with pytest.raises((TypeError, ValueError)):
            tx.update(grads, tx.init(PARAMS), PARAMS)
