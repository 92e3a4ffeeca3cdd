"""The reduction core: dtypes, weights, groups, rows, axes, and what it refuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.audit import hlo
from optx_sync.comm.collectives import (
    all_to_all,
    axis_index,
    axis_size,
    checked_axes,
    gather,
    scatter_sum,
)
from optx_sync.comm.sends import sends
from optx_sync.comm.varying import vary_like
from tests.exchange.meeting import mapped
from tests.meshes import mesh_of
from tests.reference import replicas as reference
from tests.refusals import all_refused

REPLICAS = 4
GROUPS = [[0, 2], [1, 3]]
TWO_AXES = {"data": 4, "model": 2}
CONTEXTS = (
    *("pmap", "shard_map", "shard_map_unchecked", "vmap"),
    # Two by two along a tuple of axes.
    *("tuple_shard_map", "tuple_shard_map_unchecked", "tuple_vmap"),
)


def program(context, function):
    """`function(axis_name, *one replica's)` as a jitted function of [4, ...] arrays."""
    kind = context.removeprefix("tuple_")
    axis: Any = "data" if kind == context else ("outer", "data")
    return mapped(kind, functools.partial(function, axis), REPLICAS, axis)


def run(context, function, *args):
    return jax.device_get(program(context, function)(*args))


def over(sizes, function, check_vma, specs, out=None, **manual):
    """A function of shards of a mesh."""
    out = specs if out is None else out  # P() is an empty tuple
    ways = {"in_specs": specs, "out_specs": out, "check_vma": check_vma}
    return jax.jit(jax.shard_map(function, mesh=mesh_of(sizes), **ways, **manual))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


each_context = pytest.mark.parametrize("context", CONTEXTS)
# For what stands on the same collectives as `test_weights` and `test_dtypes`.
DISTINCT = ("shard_map", "vmap", "tuple_shard_map_unchecked")
some_contexts = pytest.mark.parametrize("context", DISTINCT)
LEAVES = {
    "float32": jnp.array([1.5, -2.0, 4.0, 8.5], jnp.float32),
    "float16": jnp.array([20000, 30000, -30000, 40000], jnp.float16),
    "bfloat16": jnp.array([1, 257.0, 3, 512], jnp.bfloat16),
    "int8": jnp.array([100, 100, 100, 27], jnp.int8),
    "int32": jnp.array([1, 2, 3, 5], jnp.int32),
    "bool": jnp.array([True, True, False, True]),
    "complex64": jnp.array([1 + 2j, 3, -1j, 0], jnp.complex64),
}


def all_of_them(axis_name, tree, weight):
    return {
        "mean": oxs.reduce(tree, axis_name),
        "sum": oxs.reduce(tree, axis_name, reduction="sum"),
        "weighted": oxs.reduce(tree, axis_name, weight=weight),
        "groups": oxs.reduce(tree, axis_name, group_assignment=GROUPS),
    }


def of_both(axis_name, tree, **given):
    """Reduced over all, and over groups."""
    return [
        oxs.reduce(tree, axis_name, group_assignment=groups, **given)
        for groups in (None, GROUPS)
    ]


@each_context
def test_dtypes(context):
    weight = np.array([1, 2, 1, 0], np.float32)
    got = run(context, all_of_them, LEAVES, jnp.asarray(weight))
    for name, leaf in LEAVES.items():
        kind = np.complex128 if name == "complex64" else np.float64
        x = np.asarray(leaf).astype(kind)
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        mean_dtype = leaf.dtype if inexact else jnp.float32
        sum_dtype = leaf.dtype if inexact else jnp.int32
        pairs = np.array([x[[0, 2]].mean(), x[[1, 3]].mean()])[[0, 1, 0, 1]]
        everyone = np.ones(REPLICAS)
        for variant, expected, dtype in (
            ("mean", x.mean() * everyone, mean_dtype),
            ("sum", x.sum() * everyone, sum_dtype),
            ("weighted", (x @ weight) / weight.sum() * everyone, mean_dtype),
            ("groups", pairs, mean_dtype),
        ):
            assert got[variant][name].dtype == dtype, (variant, name)
            expected = jnp.asarray(expected.astype(dtype))
            assert np.array_equal(got[variant][name], expected), (variant, name)


# Under check_vma=True such leaves are seen to be equal on all replicas, and refused.
@pytest.mark.parametrize("context", [c for c in CONTEXTS if c[-9:] != "shard_map"])
def test_python_numbers_and_numpy_arrays_are_leaves(context):
    def function(axis_name, x):
        tree = {"number": 3.0, "array": np.ones(2, np.float32), "none": None}
        return oxs.reduce(tree, axis_name, reduction="sum") | {"x": x}

    got = run(context, function, jnp.zeros(REPLICAS))
    assert got["none"] is None
    assert np.array_equal(got["number"], np.full(REPLICAS, 12.0))
    assert np.array_equal(got["array"], np.full((REPLICAS, 2), 4.0))


@each_context
def test_what_the_pieces_of_a_buffer_stand_on(context):
    def both_ways(axis_name, rows, numbers):
        assert axis_size(axis_name) == REPLICAS
        mine = scatter_sum(numbers, axis_name)
        turned, whole = all_to_all(rows, axis_name), gather(mine, axis_name)
        return axis_index(axis_name), turned, mine, whole

    rows = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    numbers = np.arange(4.0 * 8, dtype=np.float32).reshape(4, 8) ** 2
    index, turned, mine, whole = run(context, both_ways, rows, numbers)
    assert index.tolist() == [0, 1, 2, 3] and index.dtype == jnp.int32
    assert np.array_equal(turned, rows.swapaxes(0, 1)) and turned.dtype == np.uint8
    assert np.array_equal(mine, numbers.sum(0).reshape(4, 2))
    assert np.array_equal(whole, np.stack([numbers.sum(0)] * 4))


@each_context
def test_weights(context):
    x = np.random.default_rng(0).normal(size=(REPLICAS, 3)).astype(np.float32)
    x[2] = np.nan
    x[3, 1] = np.inf
    weights = {
        "some": np.array([3, 1, 0, 0], np.float32),
        "of_groups": np.array([0, 5, 0, 0], np.float32),
        "none": np.zeros(REPLICAS, np.float32),
        "integers": np.array([3, 1, 0, 0], np.int32),
        "half": np.array([3, 1, 0, 0], np.float16),
        # Their sums would wrap, or be rounded.
        "bytes": np.array([200, 201, 0, 0], np.uint8),
        "bfloat16": np.array([200, 201, 0, 0], jnp.bfloat16),
    }

    def function(axis_name, x, weights):
        tree = {"x": x, "half": x.astype(jnp.bfloat16)}
        return {name: of_both(axis_name, tree, weight=w) for name, w in weights.items()}

    half = x.astype(jnp.bfloat16).astype(np.float32)
    for name, both in run(context, function, x, weights).items():
        for groups, tree in zip((None, GROUPS), both, strict=True):
            given = {"weight": weights[name].astype(np.float32), "groups": groups}
            close(tree["x"], reference.reduce(x, **given))
            expected = reference.reduce(half, **given).astype(jnp.bfloat16)
            assert np.array_equal(tree["half"], expected), name


def of_wires(axis_name, x, weight, dtypes):
    """An array and a row of it, over all and over groups, by each wire's dtype."""
    tree = {"x": x, "slices": oxs.IndexedSlices(jnp.array([0]), x[None])}
    return [of_both(axis_name, tree, weight=weight, dtype=dtype) for dtype in dtypes]


@some_contexts
@pytest.mark.parametrize("weight", [[1, np.nan, 0, 1], [1, 3e38, 0, 3e38]])
def test_weights_without_a_sum_are_loud(context, weight):
    function = functools.partial(of_wires, dtypes=("float32", "float16"))
    weight = jnp.array(weight, jnp.float32)
    for both in run(context, function, jnp.full((REPLICAS, 2), 1e-3), weight):
        for grouped, tree in enumerate(both):
            loud = np.array([not grouped, True, not grouped, True])
            for leaf in (tree["x"], tree["slices"].values[:, 0]):
                assert np.array_equal(np.isnan(leaf).all(-1), loud)
                assert np.array_equal(np.isnan(leaf).any(-1), loud)


@some_contexts
def test_token_counts_do_not_overflow_on_a_half_precision_wire(context):
    function = functools.partial(of_wires, dtypes=("float16", "bfloat16"))
    x = np.array([[1.0], [5.0], [2.0], [8.0]], np.float32)
    weight = np.array([50000, 100000, 50000, 0], np.float32)
    for both in run(context, function, x, jnp.asarray(weight, jnp.int32)):
        for groups, tree in zip((None, GROUPS), both, strict=True):
            expected = reference.reduce(x, weight=weight, groups=groups)
            # The quotients are powers of two: exact in any dtype.
            assert np.array_equal(tree["x"], expected)
            assert np.array_equal(tree["slices"].values[:, 0], expected)


def wire(context, tree, **arguments):
    """The dtypes of what collectives are given; XLA:CPU widens them afterwards."""

    def function(axis_name, tree):
        return oxs.reduce(tree, axis_name, **arguments)

    text = program(context, function).lower(tree).as_text("hlo")
    return sorted(
        array.dtype
        for body in hlo.read(text).computations.values()
        for instruction in body
        if instruction.opcode in ("all-reduce", "reduce-scatter", "all-gather")
        for array in hlo.operands(instruction, body)
    )


@pytest.mark.parametrize("context", ["shard_map", "shard_map_unchecked"])
def test_half_precision_travels_wide_unless_asked_otherwise(context):
    tree = {"b": jnp.ones((4, 3), jnp.bfloat16), "f": jnp.ones((4, 2), jnp.float32)}
    assert wire(context, tree) == ["f32", "f32"]
    assert wire(context, tree, dtype=jnp.bfloat16) == ["bf16", "bf16"]
    half = {"h": jnp.ones((4, 3), jnp.float16)}
    assert wire(context, half) == ["f32"]
    assert wire(context, half, dtype="float16") == ["f16"]
    grouped = wire(context, tree, group_assignment=GROUPS, dtype=jnp.bfloat16)
    assert set(grouped) == {"bf16"}


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_mesh_that_is_manual_in_part_sums_bfloat16_alike(check_vma):
    """XLA:CPU ends the process where the widening of such a sum is left to it."""

    def sums(x):
        def mean(x, groups=None):
            return oxs.reduce(x, "data", dtype=jnp.bfloat16, group_assignment=groups)

        exchange = oxs.exchange.all_reduce(jnp.bfloat16)
        found = mean(x), mean(x, GROUPS), exchange.scatter(x[0], (), "data").mean
        return jax.tree.map(lambda x: oxs.localize(x, "data"), found)

    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    found = [
        over(sizes, sums, check_vma, P("data"), axis_names={"data"})(x)
        for sizes in ({"data": 4}, {"data": 4, "model": 2})
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_rows_travel_in_the_wire_dtype():
    def travels(of, context="shard_map", **arguments):
        values = jnp.ones((2, 8), of)
        slices = oxs.IndexedSlices(jnp.zeros(2, jnp.int32), values)
        return wire(context, by_hand.replicate(slices, REPLICAS), **arguments)

    assert travels(jnp.float32) == ["f32", "s32"]
    assert travels(jnp.float32, dtype=jnp.bfloat16) == ["bf16", "s32"]
    assert travels(jnp.bfloat16) == ["f32", "s32"]
    assert travels(jnp.float16, "pmap", group_assignment=GROUPS) == ["f32", "s32"]


SLICES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "groups": {"group_assignment": GROUPS},
    "sum_groups": {"reduction": "sum", "group_assignment": GROUPS},
    "weighted": {"weight": np.array([2, 0, 1, 5], np.float32)},
    "weighted_groups": {
        "weight": np.array([2, 0, 0, 5], np.float32),
        "group_assignment": GROUPS,
    },
    "no_weight": {"weight": np.zeros(4, np.float32)},
}


# (JAX makes of `pmap` an unchecked `shard_map`.)
@pytest.mark.parametrize("context", [*DISTINCT, "shard_map_unchecked"])
def test_rows_equal_the_dense_answer(context):
    rows = 7
    rng = np.random.default_rng(3)
    # Replica 1 alone sends row 6, and NaN; some rows come twice from one replica.
    indices = np.array([[0, 3, 3], [6, 2, 6], [3, 5, 0], [1, 1, 1]], np.int32)
    values = rng.normal(size=(REPLICAS, 3, 2)).astype(np.float32)
    poisoned = values.copy()
    poisoned[1] = np.nan
    dense = np.zeros((REPLICAS, rows, 2), np.float32)
    for replica in range(REPLICAS):
        np.add.at(dense[replica], indices[replica], values[replica])
    static = {
        name: {k: v for k, v in arguments.items() if k != "weight"}
        for name, arguments in SLICES.items()
    }
    weights = {name: a["weight"] for name, a in SLICES.items() if "weight" in a}

    def function(axis_name, indices, values, poisoned, weights):
        return {
            name: oxs.reduce(
                {
                    "table": oxs.IndexedSlices(
                        indices, poisoned if name in weights else values
                    ),
                    "dense": values[0, 0],
                },
                axis_name,
                weight=weights.get(name),
                **static[name],
            )
            for name in SLICES
        }

    got = run(context, function, indices, values, poisoned, weights)
    for name, tree in got.items():
        arguments = dict(SLICES[name])
        groups = arguments.pop("group_assignment", None)
        expected = reference.reduce(dense, groups=groups, **arguments)
        close(
            tree["dense"], reference.reduce(values[:, 0, 0], groups=groups, **arguments)
        )
        for replica in range(REPLICAS):
            slices = jax.tree.map(lambda x, at=replica: x[at], tree["table"])
            assert slices.values.shape[0] == (6 if groups else 12)
            close(slices.to_dense(rows), expected[replica])
            touched = {int(i) for i in slices.indices if i < rows}
            group = next(g for g in groups or [[0, 1, 2, 3]] if replica in g)
            senders = [
                i for i in group if "weight" not in arguments or arguments["weight"][i]
            ]
            assert touched == {int(i) for s in senders for i in indices[s]}, name


def test_rows_of_integers_like_arrays_of_integers():
    def function(axis_name, x):
        slices = oxs.IndexedSlices(jnp.zeros(1, jnp.int32), x[None])
        mean = oxs.reduce(slices, axis_name)
        return mean.values, oxs.reduce(slices, axis_name, reduction="sum").values

    mean, total = run("vmap", function, jnp.array([1, 2, 3, 2**24], jnp.int32))
    assert mean.dtype == jnp.float32 and mean[0, 0] == (6 + 2**24) / 4
    assert total.dtype == jnp.int32 and total[0, 0] == 6 + 2**24
    _, small = run("vmap", function, jnp.array([100, 100, 100, 27], jnp.int8))
    assert small.dtype == jnp.int32 and small[0, 0] == 327


def test_rows_that_every_replica_names_alike():
    def function(axis_name, x):
        # Constant indices do not vary over the axis, the values do.
        slices = oxs.IndexedSlices(jnp.array([2, 0]), jnp.stack([x, x]))
        return oxs.reduce(slices, axis_name).to_dense(3)

    got = run("shard_map", function, jnp.arange(4.0))
    assert np.array_equal(got, np.tile([1.5, 0, 1.5], (4, 1)))


def replicated_out(function, *args):
    return over({"data": 4}, function, True, P("data"), P())(*args)


def test_result_is_known_to_be_equal_under_check_vma():
    def function(x):
        slices = oxs.IndexedSlices(jnp.array([1]) + jax.lax.axis_index("data"), x)
        tree = {"x": x[0], "slices": slices}
        return (
            oxs.reduce(tree, "data"),
            oxs.reduce(tree, "data", weight=x[0, 0]),
            oxs.reduce(tree, "data", reduction="sum"),
        )

    x = jnp.arange(8.0).reshape(4, 2)
    mean, _, total = replicated_out(function, x)
    assert np.array_equal(mean["x"], [3, 4])
    assert np.array_equal(total["slices"].to_dense(5), [[0, 0], *x.tolist()])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_other_mesh_axes_are_left_alone(check_vma, groups):
    """A leaf sharded over a second axis beside one replicated over it."""

    def function(sharded, whole):
        return oxs.reduce((sharded, whole), "data", group_assignment=groups)

    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    out, expected = None, reference.reduce(x, groups=groups)
    if groups is None and check_vma:  # Known to be equal, so one copy comes out.
        out, expected = (P(None, "model"), P()), expected[:1]
    specs = P("data", "model"), P("data")
    for found in over(TWO_AXES, function, check_vma, specs, out)(x, x):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_axes_that_the_compiler_shards_are_left_alone(check_vma):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    placed = jax.device_put(x, NamedSharding(mesh_of(TWO_AXES), P("data", "model")))

    def function(x):
        grouped = oxs.reduce(x, "data", group_assignment=GROUPS)
        return grouped, oxs.reduce(x, "data") + 0 * x

    specs = P("data")
    run_both = over(TWO_AXES, function, check_vma, specs, axis_names={"data"})
    grouped, mean = run_both(placed)
    assert np.array_equal(grouped, reference.reduce(x, groups=GROUPS))
    assert np.array_equal(mean, reference.reduce(x))


@some_contexts
def test_empty_arrays_and_trees_and_groups_of_all_and_of_one(context):
    def function(axis_name, empty, x, weight):
        rows = oxs.IndexedSlices(jnp.zeros(0, jnp.int32), empty)
        of_none = (
            oxs.reduce(empty, axis_name, group_assignment=GROUPS),
            oxs.reduce(empty, axis_name, weight=weight),
            oxs.reduce(rows, axis_name).values,
        )
        assert oxs.reduce({}, axis_name, weight=weight) == {}
        everyone = oxs.reduce(x, axis_name, group_assignment=[[3, 1, 0, 2]])
        alone = oxs.reduce(x, axis_name, group_assignment=[[2], [0], [3], [1]])
        return of_none, everyone, alone

    x = jnp.array([1.0, 2, 4, 8])
    of_none, everyone, alone = run(context, function, jnp.zeros((4, 0, 3)), x, x)
    assert [found.shape for found in of_none] == [(4, 0, 3)] * 3
    assert np.array_equal(everyone, np.full(4, 3.75))
    assert np.array_equal(alone, x)


@each_context
def test_localize_changes_types_only(context):
    def function(axis_name, x):
        tree = {"x": x, "constant": jnp.ones(2), "none": None}
        tree["slices"] = oxs.IndexedSlices(jnp.array([1]), jnp.ones((1, 2)))
        local = oxs.localize(oxs.localize(tree, axis_name), axis_name)
        expected = set(checked_axes(axis_name))
        for leaf in jax.tree.leaves(local):
            assert jax.typeof(leaf).manual_axis_type.varying == expected
        assert jax.tree.structure(local) == jax.tree.structure(tree)
        names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
        assert expected == (names if context.endswith("shard_map") else set())
        back = vary_like({"new": jnp.zeros(2), "x": jnp.zeros(())}, {"x": x})
        assert jax.typeof(back["x"]).manual_axis_type.varying == expected
        assert not jax.typeof(back["new"]).manual_axis_type.varying
        return local["constant"] * x

    got = run(context, function, jnp.arange(4.0))
    assert np.array_equal(got, np.arange(4.0)[:, None] * np.ones(2))


def test_double_precision():
    third = np.array([1, 2, 3, 4]) / 3
    tree = {"double": third, "single": third.astype(np.float32)}
    weight = np.array([1.0, 2.0, 3.0, 0.0])

    def function(axis_name, tree, weight):
        alike = oxs.reduce(tree, axis_name, weight=2.0)
        return all_of_them(axis_name, tree, weight) | {"python": alike}

    with jax.enable_x64(True):
        for context in ("shard_map", "vmap"):
            got = run(context, function, tree, weight)
            for result in got.values():
                assert result["double"].dtype == jnp.float64
                assert result["single"].dtype == jnp.float32
            mean = third @ weight / weight.sum()
            assert np.allclose(got["weighted"]["double"], mean, rtol=1e-15)
            assert np.allclose(got["python"]["double"], third.mean(), rtol=1e-15)


# What is refused.


def reduced(axis_name: Any = "data", **arguments):
    def function(_, x):
        return oxs.reduce(x, axis_name, **arguments)

    return run("vmap", function, jnp.arange(4.0))


def grouped(groups):
    return reduced(group_assignment=groups)


def sent(collective, x):
    return run("vmap", lambda axis_name, x: collective(x, axis_name), x)


test_refused = all_refused(globals())(r"""
grouped(((0, 1), (2, 3)))
grouped([(0, 1), (2, 3)])
grouped(np.array([[0, 1], [2, 3]]))
grouped([0, 1, 2, 3])
grouped([[0, 1], [2, 3.0]])
grouped([[True, False], [2, 3]])
grouped([])
grouped([[]])
grouped([[0, 1], [2, 3], [0, 1]])
grouped([[0, 0], [1, 2]])
grouped([[0, 1], [2]])
grouped([[0, 1], [2, 4]])
grouped([[0, 1]])
grouped([[0, 1], [2, 3], [4, 5]])
grouped([[-1, 0], [1, 2]])
grouped([[0, 1, 2], [3]])  # ValueError: a partition of range\(4\) .*equal size; got
reduced(reduction="max")  # ValueError: 'mean' or 'sum'; got 'max'
reduced(reduction="sum", weight=1)  # ValueError: weighted mean.*leave weight out
reduced(weight=np.ones(2))  # ValueError: weight must be .*float64\[2\]
reduced(weight="2")  # TypeError: weight must be .* \[0, inf\); got '2'
reduced(weight=-1)  # ValueError: weight must be .*; got -1
reduced(weight=float("nan"))  # ValueError: weight must be .*; got nan
reduced(weight=np.inf)  # ValueError: weight must be .*; got inf
reduced(dtype=jnp.int32)  # ValueError: floating dtype of 16 bits.*int32
reduced(dtype=jnp.float8_e4m3fn)  # ValueError: 16 bits.*float8
reduced(3)  # TypeError: axis_name must be the name.*3
reduced(())  # TypeError: axis_name must be the name.*\(\)
reduced(("data", None))  # TypeError: axis_name must be the name
reduced(("data", "data"))  # ValueError: axis twice
reduced("rows")  # ValueError: (?s)No mapped axis.*'rows'.*update.*run
oxs.reduce(jnp.ones(2), "data")
oxs.localize(jnp.ones(2), "data")
    # ValueError: jax.shard_map or jax.pmap.*jax.vmap\(
sent(oxs.exchange.gather, jnp.ones(4))  # ValueError: scalar has no.*x\[None\]
sent(oxs.exchange.all_to_all, jnp.ones(4))  # ValueError: 4 rows.*float32\[\]
sent(oxs.exchange.all_to_all, jnp.ones((4, 3)))  # ValueError: 4 rows.*float32\[3\]
replicated_out(lambda x: oxs.reduce(x, "data", group_assignment=GROUPS), np.ones(4))
    # ValueError: out_specs
""")


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("axis_name", ["lane", ("data", "lane")])
def test_an_axis_of_vmap_inside_checked_shard_map(axis_name, rows):
    def lane(x):
        if not rows:
            return oxs.reduce(x, axis_name, reduction="sum")[None]
        slices = oxs.IndexedSlices(jnp.array([0]), x[None])
        return oxs.reduce(slices, axis_name, reduction="sum").to_dense(1)

    def function(x):
        return jax.vmap(lane, axis_name="lane")(x[0])[None]

    def of_all(check_vma):
        return over({"data": 2}, function, check_vma, P("data"))

    x = jnp.array([[1.0, 2], [4, 8]])
    with pytest.raises(ValueError, match=r"\['lane'\].*Pass check_vma=False"):
        of_all(True)(x)
    expected = [[3, 3], [12, 12]] if axis_name == "lane" else [[15, 15], [15, 15]]
    assert np.array_equal(of_all(False)(x)[..., 0], expected)


def test_a_vmap_over_something_else_inside_checked_shard_map():
    def function(x):
        return jax.vmap(lambda lane: oxs.reduce(lane, "data"))(x[0])

    got = replicated_out(function, jnp.arange(8.0).reshape(4, 2))
    assert np.array_equal(got, [3, 4])


def test_what_a_traced_program_sends_is_counted():
    def scattered(x):
        return jax.lax.psum_scatter(x, "data", tiled=True)

    def function(x):
        summed = jax.lax.psum(x, ("data", "model"))  # 4 float32
        four = jax.lax.ppermute(x[:3].astype(jnp.int4), "data", [(0, 1), (1, 0)])

        def one(carry, _):
            return jax.lax.pmax(carry[:2], "data").sum() * carry, None

        looped, _ = jax.lax.scan(one, x, length=3)
        ways = (
            scattered,
            lambda x: x[:1],  # sends nothing, and does not count
            lambda x: scattered(jnp.tile(x, 3))[:1],
        )
        chosen = jax.lax.switch(four[0].astype(int), ways, looped)
        return summed + chosen

    mesh = {"data": 4, "model": 2}
    program = jax.make_jaxpr(over(mesh, function, False, P()))(jnp.ones(4))
    assert sends(program.jaxpr) == (
        {
            ("all-reduce", ("data", "model")): 16,
            ("collective-permute", ("data",)): 2,  # 3 numbers of 4 bits
            ("all-reduce", ("data",)): 3 * 8,
        },
        {("reduce-scatter", ("data",)): (16 + 48) / 2},
    )
