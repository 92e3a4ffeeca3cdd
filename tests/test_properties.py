"""What holds for any tree, any workers and any options, drawn at random.

`make test` tries a few cases, the same ones every time; `make fuzz` (tests/fuzz.py)
tries others until it is stopped.
"""

import collections
import dataclasses
import os
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from tests.contexts import begun
from tests.exchange.meeting import AXIS
from tests.meshes import mesh_of

CONTEXTS = ("vmap", "shard_map", "shard_map_unchecked")
OURS = os.path.dirname(oxs.__file__)
# Cases that were tried and those that were refused, by property: for tests/fuzz.py.
TRIED: collections.Counter[str] = collections.Counter()

# What stands in a case by its name, so that a case can be read.
EXCHANGES: dict[str, oxs.exchange.Exchange] = {
    code: eval(code, vars(oxs.exchange))
    for code in (
        "all_reduce() all_reduce('bfloat16') quantized() quantized(4,7) "
        "quantized(16) top_k(2,50) rotated(quantized(1,8),'hadamard',8) "
        "rotated(top_k(3,5),'dct',4) "
        "quantized(2,7) top_k(3,5,2) power_sgd() power_sgd(2,1) "
        "error_feedback(all_reduce()) "
        "error_feedback(quantized(4),0.5) error_feedback(top_k(1,4)) "
        "error_feedback(power_sgd()) median() trimmed_mean(1) sign_majority() "
        "geometric_median(2) krum(1) krum(0,2) clipped(0.5) "
        "clipped('median') clipped(1.0,quantized()) radial() penalized() "
        "radial(error_feedback(quantized(4))) penalized(quantized())"
    ).split()
}
CODED = (
    "quantized",
    "rotated",
    "top_k",
    "power",
    "sign",
    "krum",
)  # Rounding can flip a choice.
NAMED: dict[str, Any] = {
    **EXCHANGES,
    "schedule": lambda step: 1 + step // 2,
    "strided(2)": oxs.rules.strided(2),
    "strided(3)": oxs.rules.strided(3),
    "last row": lambda _, leaf: (
        [*[0] * (leaf.shape[0] - 1), 1] if leaf.shape and leaf.shape[0] else 0
    ),
    "ring()": oxs.graphs.ring(),
    "exponential()": oxs.graphs.exponential(),
    "random_pairs()": oxs.graphs.random_pairs(),
    "grid(2)": oxs.graphs.grid(2),
    "metropolis": oxs.graphs.metropolis([(0, 1), (1, 2)]),
    "sgd": optax.sgd(0.5),
    # The inner ones are ours: of a gradient None Optax's momentum forgets the trace.
    "momentum": oxs.optimizers.momentum(0.5, 0.5),
    "optax momentum": optax.sgd(0.5, momentum=0.5),
    # Optax's own promotes dtypes, which tests/conftest.py forbids.
    "adam": oxs.optimizers.adam(0.1),
    "adagrad": oxs.optimizers.adagrad(0.1),
    "delayed": oxs.outer.delayed_nesterov(0.5, every=2),
    "half": lambda step: 0.5,
    "jnp.float32": jnp.float32,
    "jnp.bfloat16": jnp.bfloat16,
}

CENTER = {
    "communication_period": [2, 1, 3, 4, "schedule"],
    "inner_state": ["keep", "average", "reset"],
    "drop_nonfinite": [False, True],
    "accumulator_dtype": [None, "jnp.float32", "jnp.bfloat16"],
    "measure": [False, True],
    "shard_state": [False, True],
    "fragments": [1, 2, 3, "strided(2)", "last row"],
    "overlap": [False, True],
    "exchange": list(EXCHANGES),
}
OUTER = {"outer": ["sgd", "optax momentum", "adam", "delayed"]}
# The options that are drawn, the first value the simplest.
OPTIONS: dict[str, dict[str, list]] = {
    "cross_shard": {
        "reduction": ["mean", "sum"],
        "group_assignment": ["groups"],
        "exchange": list(EXCHANGES),
        "shard_state": [False, True],
        "measure": [False, True],
    },
    "sync_replicas": {
        "replicas_to_aggregate": [1, 2, 3, 5],
        "variable_averages": [None, 0.5, "half"],
        "drop_nonfinite": [False, True],
        "accumulator_dtype": [None, "jnp.float32", "jnp.bfloat16"],
        "exchange": list(EXCHANGES),
        "measure": [False, True],
    },
    "local_sgd": CENTER,
    "diloco": {**CENTER, **OUTER},
    "agn": {
        **CENTER,
        **OUTER,
        "accumulate": ["gradients", "updates"],
        "reduction": ["mean", "sum"],
    },
    "elastic_average": {**CENTER, "moving_rate": [0.1, 0.2], "rho": [0.0, 0.5]},
    "gossip": {
        "graph": "ring() random_pairs() exponential() grid(2) metropolis".split(),
        "communication_period": [1, 2, 3, "schedule"],
        "outer": OUTER["outer"],
        "seed": [0, 1],
        "drop_nonfinite": [False, True],
        "accumulator_dtype": [None, "jnp.float32"],
    },
    "noloco": {
        "communication_period": [1, 2, 3],
        "outer": OUTER["outer"],
        "seed": [0, 1],
        "drop_nonfinite": [False, True],
    },
}
REQUIRED = ("communication_period", "replicas_to_aggregate", "moving_rate")


class Pair(NamedTuple):
    """A container with names of fields."""

    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, and what its gradient is: "array", "rows" or "none"."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    grad: str = "array"


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of a wrapper."""

    wrapper: str
    options: dict[str, Any]
    tree: Any
    workers: int = 1
    steps: int = 1
    inner: str = "sgd"
    axis_name: str | None = AXIS
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    direct: bool = True
    seed: int = 0
    nonfinite: bool = False


SHAPES = [(), (3,), (0,), (1,), (0, 3), (2, 0), (2, 3), (5, 2), (1, 1), (17,)]
SHAPES += [(2, 2, 2), (8, 8)]


LEAVES = st.builds(
    Leaf,
    st.sampled_from(SHAPES),
    st.sampled_from(("float32", "float32", "bfloat16", "float16")),
    st.sampled_from(["array"] * 4 + ["none", "rows"]),
)


def trees():
    """Nested containers of leaves, among them `None`."""
    return st.recursive(
        LEAVES | st.none(),
        lambda inside: (
            st.lists(inside, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inside, max_size=3)
            | st.builds(Pair, inside, inside)
            | st.tuples(inside)
        ),
        max_leaves=5,
    )


def options(wrapper):
    named = {k: st.sampled_from(v) for k, v in OPTIONS[wrapper].items()}
    # A few of them at a time: nearly all that is combined with all is refused.
    others = [name for name in named if name not in REQUIRED]
    return st.lists(st.sampled_from(others), max_size=3, unique=True).flatmap(
        lambda few: st.fixed_dictionaries(
            {name: s for name, s in named.items() if name in (*REQUIRED, *few)}
        )
    )


@st.composite
def cases(draw):
    """Runs of all wrappers."""
    wrapper = draw(st.sampled_from(list(OPTIONS)))
    chosen = draw(options(wrapper))
    workers = draw(st.sampled_from([2, 1, 3, 4, 8]))
    if chosen.get("group_assignment") == "groups":
        order = draw(st.permutations(range(workers)))
        size = draw(st.integers(1, workers))
        chosen["group_assignment"] = [
            list(order[i : i + size]) for i in range(0, workers, size)
        ]
    extra = {}
    if wrapper not in ("cross_shard", "sync_replicas"):
        meet = draw(st.sampled_from([None, None, True, False, "traced"]))
        extra = {} if meet is None else {"meet": meet}
    elif wrapper == "sync_replicas":
        extra = draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "contributes": st.sampled_from(["traced", True, False]),
                    "gradient_step": st.sampled_from([0, "traced"]),
                },
            )
        )
    if chosen.get("measure"):
        extra |= draw(
            st.fixed_dictionaries({}, optional={"batch_size": st.sampled_from([3])})
        )
    centered = wrapper in ("local_sgd", "diloco", "agn", "elastic_average")
    alone = centered and draw(st.integers(0, 7)) == 7
    return Case(
        wrapper,
        chosen,
        draw(trees()),
        workers,
        draw(st.integers(1, 5)),
        draw(st.sampled_from(["sgd", "momentum", "adam", "adagrad"])),
        None if alone else AXIS,
        extra,
        draw(st.booleans()),
        draw(st.integers(0, 9)),
        draw(st.sampled_from([False, False, True])),
    )


def is_leaf(x):
    return isinstance(x, Leaf)


def transformation(case):
    keywords = {
        name: NAMED.get(value, value) if isinstance(value, str) else value
        for name, value in case.options.items()
    }
    positional = [keywords.pop(k) for k in ("replicas_to_aggregate",) if k in keywords]
    wrapper: Callable = getattr(oxs, case.wrapper)
    return wrapper(NAMED[case.inner], case.axis_name, *positional, **keywords)


def one_params(case):
    rng = np.random.default_rng(case.seed)

    def param(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(param, case.tree, is_leaf=is_leaf)


def all_grads(case):
    """Gradients [N, T, ...]; with a NaN or infinity in places if asked for."""
    rng = np.random.default_rng(case.seed + 1)
    lead = (case.workers, case.steps)

    def grad(leaf):
        if leaf.grad == "none":
            return None
        if leaf.grad == "rows" and leaf.shape:
            rows = min(3, leaf.shape[0])
            indices = rng.integers(0, max(1, leaf.shape[0]), (*lead, rows))
            values = rng.normal(size=(*lead, rows, *leaf.shape[1:]))
            values = jnp.asarray(values, leaf.dtype)
            return oxs.IndexedSlices(jnp.asarray(indices, jnp.int32), values)
        x = rng.normal(size=lead + leaf.shape)
        if case.nonfinite:
            where = rng.integers(0, case.workers), rng.integers(0, case.steps)
            x[where] = rng.choice([np.nan, np.inf])
        return jnp.asarray(x, leaf.dtype)

    return jax.tree.map(grad, case.tree, is_leaf=is_leaf)


def extras(case):
    """Static extra arguments, traced ones [N, T], and those equal on all [T]."""
    rng = np.random.default_rng(case.seed + 2)
    static = {k: v for k, v in case.extra.items() if v != "traced"}
    traced, equal = {}, {}
    for name in sorted(set(case.extra) - set(static)):
        draws = rng.integers(0, 2, (case.workers, case.steps))
        dtype = jnp.int32 if name == "gradient_step" else jnp.bool_
        if name == "meet":
            equal[name] = jnp.asarray(draws[0], dtype)
        else:
            traced[name] = jnp.asarray(draws, dtype)
    return static, traced, equal


def steps_of(case, tx, static):
    """T steps of one worker: the parameters after each of them, and the state."""

    def run(worker, params, state, grads, traced, equal):
        del worker  # Of trees without arrays it tells how many workers there are.

        def step(carry, now):
            params, state = carry
            grads, traced, equal = now
            extra = {**static, **traced, **equal}
            if case.direct:
                new, state = oxs.apply_gradients(tx, grads, state, params, **extra)
            else:
                updates, state = tx.update(grads, state, params, **extra)
                # Optax adds wide updates to half precision by promotion.
                with jax.numpy_dtype_promotion("standard"):
                    new = optax.apply_updates(params, updates)
            return (new, state), new

        (_, state), history = jax.lax.scan(
            step, (params, state), (grads, traced, equal), length=case.steps
        )
        return history, state

    return run


def program(case, context):
    """A function of arrays, and the arrays."""
    tx = transformation(case)
    static, traced, equal = extras(case)
    run = steps_of(case, tx, static)
    params, state, axes = begun(tx, one_params(case), case.workers)
    if case.axis_name is None:  # It does not know of the others, if there are any.
        axes = jax.tree.map(lambda _: 0, state)
        state = by_hand.replicate(tx.init(one_params(case)), case.workers)
    args = (jnp.arange(case.workers), params, state, all_grads(case), traced, equal)
    mesh = None if context == "vmap" else mesh_of({AXIS: case.workers})
    if context != "shard_map_unchecked":
        ways: Any = {"in_axes": (0, 0, axes, 0, 0, None), "out_axes": (0, axes)}
        return by_hand.map_workers(run, AXIS, mesh=mesh, **ways), args

    def local(worker, params, state, grads, traced, equal):
        params, grads, traced = by_hand.first((params, grads, traced))
        state = by_hand.first(state, axes)
        history, state = run(worker, params, state, grads, traced, equal)
        return by_hand.replicate(history, 1), by_hand.replicate(state, 1, axes)

    specs = jax.tree.map(
        lambda axis: P() if axis is None else P(AXIS), axes, is_leaf=lambda x: x is None
    )
    every = P(AXIS)
    in_specs = (every, every, specs, every, every, P())
    ways = {"in_specs": in_specs, "out_specs": (every, specs), "check_vma": False}
    return jax.shard_map(local, mesh=mesh, **ways), args


def refusal(function, *args):
    """(result, None) or (None, message); a refusal must be one of ours."""
    flags: dict[str, Any] = jax.config.values
    filtering = flags["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        return function(*args), None
    except (ValueError, TypeError) as error:
        raised = traceback.extract_tb(error.__traceback__)[-1]
        said = (raised.line or "").startswith("raise")
        if said and raised.filename.startswith(OURS):
            return None, str(error)
        raise
    finally:
        jax.config.update("jax_traceback_filtering", filtering)


def traced(case, context):
    """(types of the arguments, types of the results) of a run."""
    within, args = program(case, context)
    # A step that changes the structure or types of its state is an error of `scan`.
    return types(args), types(jax.eval_shape(within, *args))


def check_input(case):
    """A run is traced in all contexts and keeps its types, or is refused by us."""
    TRIED["input"] += 1
    found = {}
    for context in CONTEXTS:
        result, message = refusal(traced, case, context)
        if result is None:
            found[context] = message
            continue
        (_, params, before, *_), (history, after) = result
        assert after == before, context
        over_time = jax.tree.map(
            lambda x: Type((x.shape[0], case.steps, *x.shape[1:]), x.dtype), params
        )
        assert history == over_time, context
        found[context] = history, after
    refused = {isinstance(x, str) for x in found.values()}
    assert len(refused) == 1, found
    TRIED["input, refused"] += refused == {True}
    if refused == {False}:
        assert found["vmap"] == found["shard_map"], found
        assert found["vmap"] == found["shard_map_unchecked"], found


@dataclasses.dataclass(frozen=True)
class Type:
    """What an array is."""

    shape: tuple[int, ...]
    dtype: Any


def types(tree):
    return jax.tree.map(lambda x: Type(x.shape, x.dtype), tree)


def check_answer(case):
    """A run has one answer in all contexts."""
    TRIED["answer"] += 1
    _, message = refusal(traced, case, CONTEXTS[0])
    if message is not None:
        TRIED["answer, refused"] += 1
        hypothesis.reject()
    answers = []
    for context in CONTEXTS:
        within, args = program(case, context)
        history, state = jax.jit(within)(*args)
        answers.append(jax.device_get((history, state)))
    code = str(case.options.get("exchange"))
    coded, rounded = any(one in code for one in CODED), "bfloat16" in code
    for context, answer in zip(CONTEXTS[1:], answers[1:], strict=True):
        assert_same(answer, answers[0], context, coded, rounded)


def assert_same(actual, expected, message, coded=False, rounded=False):
    """Trees of arrays, to rounding in their dtypes; with codes all but a few of them.

    `rounded`: sums have travelled in bfloat16, added in one order or another.

    A code is an integer: a value between two of them can go either way.
    """
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        where = message, jax.tree_util.keystr(path), a, e
        assert a.shape == e.shape and a.dtype == e.dtype, where
        half = jnp.issubdtype(e.dtype, jnp.floating) and e.dtype.itemsize == 2
        relative = 4 * float(jnp.finfo(e.dtype).eps) if half else 3e-5
        if rounded:
            relative = 4 * float(jnp.finfo(jnp.bfloat16).eps)
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        finite = np.isfinite(e)
        assert np.array_equal(np.isfinite(a), finite), where
        scale = max(1.0, np.abs(e[finite]).max(initial=0))
        error = np.abs(np.where(finite, a, 0) - np.where(finite, e, 0)) / scale
        wrong = np.count_nonzero(error > relative)
        assert wrong <= (1 + e.size // 8 if coded else 0), where
        assert error.max(initial=0) <= (1 if coded else relative), where


# A property: what it is tried on, and what must hold of it.
PROPERTIES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "input": (cases(), check_input),
    "answer": (cases(), check_answer),
}
# Enough for the budget of the suite; the same cases in every run.
EXAMPLES = {"input": 12, "answer": 4}


def case_of(name, **settings):
    """A property as a function without arguments."""
    strategy, check = PROPERTIES[name]

    def holds(case):
        check(case)

    wrapped = hypothesis.given(strategy)(holds)
    health_checks: Any = hypothesis.HealthCheck
    return hypothesis.settings(
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
        suppress_health_check=list(health_checks),
        **settings,
    )(wrapped)


@pytest.mark.parametrize("name", PROPERTIES)
def test_holds_for_any_case(name):
    case_of(name, derandomize=True, max_examples=EXAMPLES[name])()


# What `make fuzz` has found.
EMPTY, MEETS = Leaf((0,)), "cross_shard"
FOUND = [
    Case(MEETS, {"exchange": "sign_majority()"}, EMPTY, 2),
    Case(MEETS, {"exchange": "all_reduce('bfloat16')"}, [EMPTY, Leaf((3,))], 4, 2),
]


@pytest.mark.parametrize("case", FOUND)
def test_what_failed_once_holds(case):
    check_answer(case)
