"""The reduction core: dtypes, weights, groups, rows, axes, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand, hlo
from optx_sync.comm.collectives import (
    all_to_all,
    axis_index,
    axis_size,
    checked_axes,
    gather,
    scatter_sum,
)
from optx_sync.comm.varying import vary_like
from tests.meshes import mesh_of
from tests.reference import replicas as reference
from tests.refusals import refused

REPLICAS = 4
GROUPS = [[0, 2], [1, 3]]
# name: (axis name, how four replicas are laid out on it)
CONTEXTS = {
    "pmap": ("data", (4,)),
    "shard_map": ("data", (4,)),
    "shard_map_unchecked": ("data", (4,)),
    "vmap": ("data", (4,)),
    "tuple_shard_map": (("outer", "data"), (2, 2)),
    "tuple_shard_map_unchecked": (("outer", "data"), (2, 2)),
    "tuple_vmap": (("outer", "data"), (2, 2)),
}


def program(context, function):
    """`function(axis_name, *one replica's)` as a jitted function of [4, ...] arrays."""
    axis_name, shape = CONTEXTS[context]

    def local(*args):
        return function(axis_name, *args)

    if context == "pmap":
        return jax.pmap(local, axis_name=axis_name, devices=jax.devices()[:REPLICAS])
    if context.endswith("vmap"):
        if isinstance(axis_name, str):
            return jax.jit(jax.vmap(local, axis_name=axis_name))
        outer, data = axis_name
        nested = jax.vmap(jax.vmap(local, axis_name=data), axis_name=outer)

        def flat(*args):
            args = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), args)
            result = nested(*args)
            return jax.tree.map(lambda x: x.reshape(REPLICAS, *x.shape[2:]), result)

        return jax.jit(flat)

    def stacked(*args):
        return jax.tree.map(lambda x: x[None], local(*by_hand.first(args)))

    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    return jax.jit(
        jax.shard_map(
            stacked,
            mesh=mesh_of(dict(zip(names, shape, strict=True))),
            in_specs=P(axis_name),
            out_specs=P(axis_name),
            check_vma=not context.endswith("unchecked"),
        )
    )


def run(context, function, *args):
    return program(context, function)(*args)


def numpy(tree):
    return jax.tree.map(np.asarray, tree)


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


@each_context
def test_dtypes(context):
    def all_of_them(axis_name, tree, weight):
        return {
            "mean": oxs.reduce(tree, axis_name),
            "sum": oxs.reduce(tree, axis_name, reduction="sum"),
            "weighted": oxs.reduce(tree, axis_name, weight=weight),
            "groups": oxs.reduce(tree, axis_name, group_assignment=GROUPS),
        }

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
        mine = scatter_sum(numbers, axis_name)
        return all_to_all(rows, axis_name), mine, gather(mine, axis_name)

    rows = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    numbers = np.arange(4.0 * 8, dtype=np.float32).reshape(4, 8) ** 2
    turned, mine, whole = run(context, both_ways, rows, numbers)
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
        return {
            (name, grouped): oxs.reduce(
                {"x": x, "half": x.astype(jnp.bfloat16)},
                axis_name,
                weight=weight,
                group_assignment=GROUPS if grouped else None,
            )
            for name, weight in weights.items()
            for grouped in (False, True)
        }

    got = run(context, function, x, weights)
    for (name, grouped), tree in got.items():
        weight = weights[name].astype(np.float32)
        groups = GROUPS if grouped else None
        close(tree["x"], reference.reduce(x, weight=weight, groups=groups))
        half = x.astype(jnp.bfloat16).astype(np.float32)
        expected = reference.reduce(half, weight=weight, groups=groups)
        assert np.array_equal(tree["half"], expected.astype(jnp.bfloat16)), name


@some_contexts
@pytest.mark.parametrize("weight", [[1, np.nan, 0, 1], [1, 3e38, 0, 3e38]])
def test_weights_without_a_sum_are_loud(context, weight):
    def function(axis_name, x, weight):
        slices = oxs.IndexedSlices(jnp.array([1]), x[None])
        return {
            (grouped, dtype): oxs.reduce(
                {"x": x, "slices": slices},
                axis_name,
                weight=weight,
                group_assignment=GROUPS if grouped else None,
                dtype=dtype,
            )
            for grouped in (False, True)
            for dtype in ("float32", "float16")
        }

    weight = jnp.array(weight, jnp.float32)
    got = run(context, function, jnp.full((REPLICAS, 2), 1e-3), weight)
    for (grouped, _), tree in got.items():
        loud = np.array([not grouped, True, not grouped, True])
        rows = tree["slices"].values[:, 0]
        for leaf in (tree["x"], rows):
            assert np.array_equal(np.isnan(leaf).all(-1), loud)
            assert np.array_equal(np.isnan(leaf).any(-1), loud)


@some_contexts
def test_token_counts_do_not_overflow_on_a_half_precision_wire(context):
    def function(axis_name, x, weight):
        return {
            (dtype, grouped): oxs.reduce(
                {"x": x, "slices": oxs.IndexedSlices(jnp.array([0]), x[None])},
                axis_name,
                weight=weight,
                dtype=dtype,
                group_assignment=GROUPS if grouped else None,
            )
            for dtype in ("float16", "bfloat16")
            for grouped in (False, True)
        }

    x = np.array([[1.0], [5.0], [2.0], [8.0]], np.float32)
    weight = np.array([50000, 100000, 50000, 0], np.float32)
    got = run(context, function, x, jnp.asarray(weight, jnp.int32))
    for (_, grouped), tree in got.items():
        groups = GROUPS if grouped else None
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
        found = mean(x), mean(x, GROUPS), exchange.scatter(x[0], "data")
        return jax.tree.map(lambda x: oxs.localize(x, "data"), found)

    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    found = [
        jax.jit(
            jax.shard_map(
                sums,
                mesh=mesh_of(sizes),
                in_specs=P("data"),
                out_specs=P("data"),
                axis_names={"data"},
                check_vma=check_vma,
            )
        )(x)
        for sizes in ({"data": 4}, {"data": 4, "model": 2})
    ]
    jax.tree.map(np.testing.assert_array_equal, *numpy(found))


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
    mesh = mesh_of({"data": 4})
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P())
    return jax.jit(mapped)(*args)


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


def test_groups_are_known_to_differ_under_check_vma():
    def function(x):
        return oxs.reduce(x, "data", group_assignment=GROUPS)

    with pytest.raises(ValueError, match="out_specs"):
        replicated_out(function, jnp.arange(4.0))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_other_mesh_axes_are_left_alone(check_vma, groups):
    """A leaf sharded over a second axis beside one replicated over it."""

    def function(sharded, whole):
        tree = {"sharded": sharded, "whole": whole}
        return oxs.reduce(tree, "data", group_assignment=groups)

    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    specs = (P("data", "model"), P("data"))
    got = jax.jit(
        jax.shard_map(
            function,
            mesh=mesh_of({"data": 4, "model": 2}),
            in_specs=specs,
            out_specs={"sharded": specs[0], "whole": specs[1]},
            check_vma=check_vma,
        )
    )
    expected = reference.reduce(x, groups=groups)
    if groups is None and check_vma:  # Known to be equal, so one copy comes out.
        got = jax.jit(
            jax.shard_map(
                function,
                mesh=mesh_of({"data": 4, "model": 2}),
                in_specs=specs,
                out_specs={"sharded": P(None, "model"), "whole": P()},
            )
        )
        expected = expected[:1]
    result = got(x, x)
    assert np.array_equal(result["sharded"], expected)
    assert np.array_equal(result["whole"], expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_axes_that_the_compiler_shards_are_left_alone(check_vma):
    mesh = mesh_of({"data": 4, "model": 2})
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))

    def function(x):
        grouped = oxs.reduce(x, "data", group_assignment=GROUPS)
        return grouped, oxs.reduce(x, "data") + 0 * x

    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=check_vma,
    )
    grouped, mean = jax.jit(mapped)(placed)
    assert np.array_equal(grouped, reference.reduce(x, groups=GROUPS))
    assert np.array_equal(mean, reference.reduce(x))


@some_contexts
def test_empty_arrays_and_trees(context):
    def function(axis_name, x, weight):
        return {
            "groups": oxs.reduce(x, axis_name, group_assignment=GROUPS),
            "weighted": oxs.reduce(x, axis_name, weight=weight),
            "tree": oxs.reduce({}, axis_name, weight=weight),
            "rows": oxs.reduce(
                oxs.IndexedSlices(jnp.zeros(0, jnp.int32), x), axis_name
            ).values,
        }

    got = run(context, function, jnp.zeros((4, 0, 3)), jnp.ones(4))
    assert (
        got["groups"].shape == got["weighted"].shape == got["rows"].shape == (4, 0, 3)
    )
    assert got["tree"] == {}


@some_contexts
def test_one_group_of_all_and_groups_of_one(context):
    def function(axis_name, x):
        return (
            oxs.reduce(x, axis_name, group_assignment=[[3, 1, 0, 2]]),
            oxs.reduce(x, axis_name, group_assignment=[[2], [0], [3], [1]]),
        )

    x = jnp.array([1.0, 2, 4, 8])
    everyone, alone = run(context, function, x)
    assert np.array_equal(everyone, np.full(4, 3.75))
    assert np.array_equal(alone, x)


@each_context
def test_index_and_size(context):
    def function(axis_name, x):
        size = axis_size(axis_name)
        assert isinstance(size, int)
        return axis_index(axis_name), x + size

    index, size = run(context, function, jnp.zeros(4))
    assert index.tolist() == [0, 1, 2, 3] and index.dtype == jnp.int32
    assert size.tolist() == [4.0] * 4


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
    with jax.enable_x64(True):

        def function(axis_name, tree, weight):
            return {
                "mean": oxs.reduce(tree, axis_name),
                "weighted": oxs.reduce(tree, axis_name, weight=weight),
                "groups": oxs.reduce(tree, axis_name, group_assignment=GROUPS),
                "python": oxs.reduce(tree, axis_name, weight=2.0),
            }

        third = np.array([1, 2, 3, 4]) / 3
        tree = {"double": third, "single": third.astype(np.float32)}
        weight = np.array([1.0, 2.0, 3.0, 0.0])
        for context in ("shard_map", "vmap"):
            got = run(context, function, tree, weight)
            for result in got.values():
                assert result["double"].dtype == jnp.float64
                assert result["single"].dtype == jnp.float32
            mean = third @ weight / weight.sum()
            assert np.allclose(got["weighted"]["double"], mean, rtol=1e-15)
            assert np.allclose(got["python"]["double"], third.mean(), rtol=1e-15)


# What is refused.


def refuse(said, axis_name="data", **arguments):
    def function(_, x):
        return oxs.reduce(x, axis_name, **arguments)

    with refused(said):
        run("vmap", function, jnp.arange(4.0))


@pytest.mark.parametrize(
    "groups",
    [
        *(((0, 1), (2, 3)), [(0, 1), (2, 3)], np.array([[0, 1], [2, 3]])),
        *([0, 1, 2, 3], [[0, 1], [2, 3.0]], [[True, False], [2, 3]], [], [[]]),
        *([[0, 1], [2, 3], [0, 1]], [[0, 0], [1, 2]], [[0, 1], [2]]),
        *([[0, 1], [2, 4]], [[0, 1]], [[0, 1], [2, 3], [4, 5]]),
        *([[-1, 0], [1, 2]], [[0, 1, 2], [3]]),
    ],
)
def test_groups_that_are_no_partition(groups):
    said = r"ValueError: a partition of range\(4\) .*equal size; got "
    refuse(said, group_assignment=groups)


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("ValueError: 'mean' or 'sum'; got 'max'", {"reduction": "max"}),
        (
            "ValueError: weighted mean.*leave weight out",
            {"reduction": "sum", "weight": 1},
        ),
        (r"ValueError: weight must be .*float64\[2\]", {"weight": np.ones(2)}),
        (r"TypeError: weight must be .* \[0, inf\); got '2'", {"weight": "2"}),
        (r"ValueError: weight must be .* \[0, inf\); got -1", {"weight": -1}),
        ("ValueError: weight must be .* got nan", {"weight": float("nan")}),
        ("ValueError: weight must be .* got inf", {"weight": np.inf}),
        ("ValueError: floating dtype of 16 bits.*int32", {"dtype": jnp.int32}),
        ("ValueError: 16 bits.*float8", {"dtype": jnp.float8_e4m3fn}),
        ("TypeError: axis_name must be the name.*3", {"axis_name": 3}),
        (r"TypeError: axis_name must be the name.*\(\)", {"axis_name": ()}),
        ("TypeError: axis_name must be the name", {"axis_name": ("data", None)}),
        ("ValueError: axis twice", {"axis_name": ("data", "data")}),
        ("ValueError: (?s)No mapped axis.*'rows'.*update.*run", {"axis_name": "rows"}),
    ],
)
def test_arguments_that_mean_nothing(said, arguments):
    refuse(said, **arguments)


def test_an_axis_outside_of_any_mapped_context():
    for function in (oxs.reduce, oxs.localize):
        with pytest.raises(ValueError, match=r"jax.shard_map or jax.pmap.*jax.vmap\("):
            function(jnp.ones(2), "data")


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

    def mapped(check_vma):
        return jax.jit(
            jax.shard_map(
                function,
                mesh=mesh_of({"data": 2}),
                in_specs=P("data"),
                out_specs=P("data"),
                check_vma=check_vma,
            )
        )

    x = jnp.array([[1.0, 2], [4, 8]])
    with pytest.raises(ValueError, match=r"\['lane'\].*Pass check_vma=False"):
        mapped(True)(x)
    expected = [[3, 3], [12, 12]] if axis_name == "lane" else [[15, 15], [15, 15]]
    assert np.array_equal(mapped(False)(x)[..., 0], expected)


def test_a_vmap_over_something_else_inside_checked_shard_map():
    def function(x):
        return jax.vmap(lambda lane: oxs.reduce(lane, "data"))(x[0])

    got = replicated_out(function, jnp.arange(8.0).reshape(4, 2))
    assert np.array_equal(got, [3, 4])
