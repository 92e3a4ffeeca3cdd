"""What optimizers read: each number alone, each leaf alone, or more."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.core import programs
from optx_sync.core.programs import Elementwise, Mixes, Values

AXIS, REPLICAS, STEPS = "w", 3, 8
PARAMS: Any = {
    "b": jnp.linspace(-1, 1, 3),
    "c": jnp.float32(0.5),
    "s": jnp.linspace(-1, 2, 8).reshape(2, 2, 2),
    "w": jnp.linspace(-2, 2, 12).reshape(4, 3),
}
TREE = {"b": False, "c": False, "s": True, "w": True}
C = optax.contrib


@pytest.fixture(autouse=True)
def promotion():
    """Optax's own arithmetic."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def ndim(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_path(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "w" in str(path), params)


def late(count):
    return jnp.where(count < 3, 0.0, 0.1)


def multi(*links):
    return optax.MultiSteps(optax.chain(*links), 4).gradient_transformation()


def clip(bound=0.1):
    return optax.clip_by_global_norm(bound)


def own_clip(square=jnp.square, total=True):
    """A clip of one's own, which sums over the pieces."""

    def update(updates, state, params=None):
        squares = sum(jnp.sum(square(x)) for x in jax.tree.leaves(updates))
        if total:
            own = oxs.localize(squares, AXIS)
            squares = oxs.reduce(own, AXIS, reduction="sum")
        norm = jnp.sqrt(squares)
        return jax.tree.map(lambda x: jnp.where(norm < 1, x, x / norm), updates), state

    return optax.GradientTransformation(lambda params: (), update)


def each(function):
    return optax.stateless_with_tree_map(lambda x, _: function(x))


def loop(function):
    """Three times, in a loop whose carry is a number of rounds and the array."""
    return each(
        lambda x: jax.lax.while_loop(
            lambda now: now[0] < 3, lambda now: (now[0] + 1, function(now[1])), (0, x)
        )[1]
    )


def over(function):
    """In a scan over a constant array."""
    rates = jnp.array([0.1, 0.2, 0.3])
    return each(lambda x: jax.lax.scan(lambda x, r: (function(x, r), r), x, rates)[0])


def by_hand(function):
    """A function with a derivative of its own."""
    kept = jax.custom_jvp(function)
    kept.defjvp(lambda x, dx: (function(*x), dx[0]))
    return each(jax.checkpoint(kept))


def filled(params):
    return jax.tree.map(lambda x: np.full(np.shape(x), 0.5, np.float32), params)


BY_NUMBERS = """
optax.sgd(0.1)
optax.sgd(0.7, 0.9, nesterov=True)
optax.adam(0.1)
optax.adam(0.1, mu_dtype=jnp.bfloat16)
optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100))
optax.adam(optax.piecewise_constant_schedule(0.1, {2: 0.5, 5: 0.1}))
optax.adamw(0.1)
optax.adamw(0.1, weight_decay=0.5, mask=TREE)
optax.adamw(0.1, weight_decay=0.5, mask=by_path)
optax.nadamw(0.1)
optax.adamax(0.1)
optax.amsgrad(0.1)
optax.adagrad(0.1)
optax.adadelta(0.1)
optax.adabelief(0.1)
optax.adan(0.1)
optax.lion(0.1)
optax.radam(0.1)
optax.rmsprop(0.1, centered=True, momentum=0.9)
optax.rprop(0.1)
optax.sgd(late)
optax.sign_sgd(0.1)
optax.yogi(0.1)
optax.chain(optax.clip(1.0), optax.adam(0.1))
optax.chain(optax.adam(0.1), optax.apply_every(4))
optax.chain(optax.adam(0.1), optax.ema(0.9))
optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())
optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
optax.masked(optax.scale_by_adam(), TREE)
optax.partition({True: optax.adam(0.1), False: optax.sgd(0.1)}, TREE)
multi(optax.adam(0.1))
multi(optax.adamw(0.1, weight_decay=0.5, mask=TREE))
C.ademamix(0.1)
C.adopt(0.1)
C.schedule_free_adamw(0.1)
oxs.optimizers.adam(0.1)
oxs.optimizers.amsgrad(0.1)
oxs.optimizers.ftrl(0.1)
oxs.optimizers.rmsprop(0.1)
oxs.clip_by_global_norm(1.0, AXIS)
optax.chain(oxs.clip_by_global_norm(1.0, AXIS), optax.adam(0.1))
multi(oxs.clip_by_global_norm(0.1, AXIS), optax.sgd(0.1))
optax.inject_hyperparams(oxs.clip_by_global_norm, static_args="axis_name")(1.0, AXIS)
own_clip()
own_clip(lambda x: jnp.where(jnp.isnan(x), 0, x / 3) ** 2)
own_clip(lambda x: x != 0)
optax.chain(optax.scale_by_adam(), own_clip())
loop(lambda x: x / 2)
loop(lambda x: jax.lax.fori_loop(0, 3, lambda k, x: x / (k + 1), x))
by_hand(lambda x: jnp.where(x > 0, x, 0.1 * x))
optax.add_decayed_weights(0.1, mask=None)
optax.GradientTransformation(filled, lambda g, s, p: (jax.tree.map(jnp.add, g, s), s))
"""
# And what is said of what is not.
MIXED = """
clip()  # the update of ['b'] reads all of the gradient of ['b'], by `reduce_sum`
optax.lamb(0.1)  # by `reduce_sum`
optax.lars(0.1)  # by `reduce_sum`
optax.fromage(0.1)  # by `reduce_sum`
optax.novograd(0.1)  # by `reduce_sum`
optax.noisy_sgd(0.1, key=0)  # reads what `random_bits` makes by place
optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))  # what `random_bits` makes
optax.adafactor(0.1)  # by `reduce_sum`
optax.scale_by_factored_rms(min_dim_size_to_factor=2)  # has shape
optax.polyak_sgd()  # by `reduce_sum`
optax.flatten(optax.adam(0.1))  # by `concatenate`
optax.adaptive_grad_clip(0.1)  # by `reduce_sum`
optax.centralize()  # the update of ['s'] is made in another way .* a mask by `ndim`
optax.normalize_by_update_norm()  # by `reduce_sum`
optax.scale_by_param_block_rms()  # reads all of the parameter of ['b']
optax.clip_by_block_rms(1.0)  # by `reduce_sum`
optax.zero_nans()  # the state at .found_nan['b'] reads all .* by `reduce_or`
optax.adamw(0.1, mask=ndim)  # the update of ['s'] is made in another way
optax.adamw(0.1, weight_decay=1e-6, mask=ndim)  # in another way
optax.adamw(late, weight_decay=0.5, mask=ndim)  # in another way
multi(optax.adamw(0.1, weight_decay=0.5, mask=ndim))  # the update of ['s'] is made in
optax.partition({True: optax.adam(0.1), False: optax.sgd(0.1)}, ndim)  # another one
multi(optax.zero_nans(), clip(), optax.sgd(0.1))  # by `reduce_sum`
multi(optax.adam(0.1), optax.scale_by_param_block_rms())  # all of the parameter of
multi(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))  # what `random_bits` makes
optax.apply_if_finite(optax.adam(0.1), 3)  # by `reduce_and`
optax.apply_if_finite(optax.chain(clip(), optax.sgd(late)), 3)  # by `reduce_
C.muon(0.1)  # its state for flat pieces is another one
C.prodigy()  # by `dot_general`
C.dog()  # by `reduce_sum`
C.dadapt_adamw()  # by `dot_general`
oxs.optimizers.normalized_sgd(0.1)  # by `reduce_sum`
oxs.clip_by_global_norm(1.0, "another")  # reads all of the gradient of
own_clip(total=False)  # by `reduce_sum`
own_clip(jnp.exp)  # by `reduce_sum`
own_clip(lambda x: x / jnp.abs(x))  # by `reduce_sum`
own_clip(jnp.ones_like)  # reads the size of a piece
each(lambda x: x / x.size)  # in another way
each(lambda x: x / jax.lax.psum(1, AXIS))  # in another way
each(lambda x: x * jax.lax.axis_index(AXIS))  # the place or the number of the pieces
each(lambda x: jax.lax.psum(x, AXIS))  # reads all of the gradient of ['b'], by `psum`
each(lambda x: jax.lax.cond(x.sum() > 0, jnp.negative, jnp.abs, x))  # by `reduce_sum`
each(lambda x: x * jnp.arange(x.size).reshape(x.shape))  # what `iota` makes by place
each(lambda x: jnp.flip(x.reshape(-1)).reshape(x.shape))  # by `rev`
each(lambda x: jnp.cumsum(x.reshape(-1)).reshape(x.shape))  # by `cumsum`
each(lambda x: jnp.array(np.arange(x.size)).reshape(x.shape) * x)  # a constant array of
loop(lambda x: x / max(x.ndim, 2))  # the update of ['s'] is made in another way
loop(lambda x: x / x.sum())  # by `reduce_sum`
over(lambda x, rate: x * rate / x.sum())  # by `reduce_sum`
by_hand(lambda x: x / x.sum())  # by `reduce_sum`
C.sophia(0.1)  # it cannot be traced: ValueError: obj_fn must be
optax.stateless(lambda g, p: {**g, "w": g["w"].reshape(4, 3)})  # traced on flat pieces
"""
LEAVES = """
C.muon(0.1, ns_steps=2)
multi(C.muon(0.1, ns_steps=2))
optax.adafactor(0.1)
optax.lamb(0.1)
optax.novograd(0.1)
optax.centralize()
optax.adamw(0.1, weight_decay=0.5, mask=ndim)
optax.chain(optax.zero_nans(), optax.scale_by_trust_ratio())
optax.chain(optax.clip_by_block_rms(1.0), optax.adam(0.1))
"""
TOGETHER = """
clip()  # the update of ['b'] reads all of the gradient of ['c'], by `reduce_sum`
oxs.clip_by_global_norm(1.0, AXIS)  # all of the gradient of ['c'], by `reduce_sum`
own_clip()  # all of the gradient of ['c'], by `reduce_sum`
C.prodigy()  # all of the gradient of ['c']
C.dog()  # all of the
multi(optax.zero_nans(), clip(), optax.sgd(0.1))  # all of the gradient of ['c']
optax.apply_if_finite(optax.adam(0.1), 3)  # by `reduce_and`
optax.apply_if_finite(optax.chain(clip(), optax.sgd(late)), 3)  # by `reduce_
optax.stateless(lambda g, p: {**g, "b": g["b"] + g["w"][0]})  # of ['w'], by `
optax.stateless(lambda g, p: {**g, "c": p["c"] * g["s"][0, 0, 0]})  # gradient of ['s']
"""


def rows(text):
    pairs = (line.partition("  # ") for line in text.strip().splitlines())
    return {call: said for call, _, said in pairs}


@functools.cache
def made(call):
    return optax.with_extra_args_support(eval(call, globals()))


def shapes(tree=PARAMS):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def of_leaves(tx, tree=PARAMS, values=None):
    return programs.leafwise(tx, shapes(tree), (AXIS,), values or Values())


def by_numbers(tx, tree=PARAMS):
    Elementwise(tx, (AXIS,), "shard_state=True").require(tree)


def refused(act, text):
    """What is said of each that is not refused with the words of the table."""
    found = {}
    for call, said in rows(text).items():
        try:
            found[call] = act(made(call))
        except Mixes as why:
            if not re.search(re.escape(said).replace(r"\.\*", ".*"), str(why)):
                found[call] = why
    return found


@pytest.mark.filterwarnings("ignore:Specifying a key")
@pytest.mark.parametrize(
    "act, alone, others",
    [(by_numbers, BY_NUMBERS, MIXED), (of_leaves, LEAVES, TOGETHER)],
    ids=["numbers", "leaves"],
)
def test_who_acts_on_each_number_or_leaf_alone(act, alone, others):
    for call in rows(alone):
        act(made(call))
    assert refused(act, others) == {}


def run(tx, grads):
    """The parameters after every step."""
    tx = optax.with_extra_args_support(tx)

    def step(carry, now):
        params, state = carry
        updates, state = tx.update(now, state, params, value=jnp.float32(1))
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), grads)[1]


def drawn():
    numbers = np.random.default_rng(0)
    shape = REPLICAS, STEPS
    return jax.tree.map(
        lambda x: numbers.normal(size=(*shape, *x.shape)).astype("f4"), PARAMS
    )


# Those of the tables whose arithmetic is not that of another one.
NUMBERS: Any = {
    True: """
optax.adamw(0.1, weight_decay=0.5, mask=by_path)
optax.partition({True: optax.adam(0.1), False: optax.sgd(0.1)}, TREE)
optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
multi(optax.adamw(0.1, weight_decay=0.5, mask=TREE))
multi(oxs.clip_by_global_norm(0.1, AXIS), optax.sgd(0.1))
own_clip(lambda x: jnp.where(jnp.isnan(x), 0, x / 3) ** 2)
loop(lambda x: x / 2)
optax.GradientTransformation(filled, lambda g, s, p: (jax.tree.map(jnp.add, g, s), s))
""",
    "leaves": """
multi(C.muon(0.1, ns_steps=2))
optax.novograd(0.1)
multi(optax.adamw(0.1, weight_decay=0.5, mask=ndim))
multi(optax.adam(0.1), optax.scale_by_param_block_rms())
optax.chain(optax.zero_nans(), optax.scale_by_trust_ratio())
""",
}


@pytest.mark.parametrize("how", NUMBERS)
def test_those_have_the_numbers_of_one_device(how):
    grads, txs = drawn(), {call: made(call) for call in rows(NUMBERS[how])}
    mean = jax.tree.map(lambda x: x.mean(0, keepdims=True), grads)

    @jax.jit
    def every(grads, mean):
        def mapped(tx, grads):
            return jax.vmap(functools.partial(run, tx), axis_name=AXIS)(grads)

        cut = {
            call: mapped(oxs.cross_shard(tx, AXIS, shard_state=how), grads)
            for call, tx in txs.items()
        }
        return cut, {call: mapped(tx, mean) for call, tx in txs.items()}

    cut, whole = every(grads, mean)
    for call, found in cut.items():
        for one, two in zip(*map(jax.tree.leaves, (found, whole[call])), strict=True):
            two = np.broadcast_to(two, one.shape)
            np.testing.assert_allclose(one, two, 1e-6, 1e-6, err_msg=call)


# They passed while transformations were tried on numbers: their first steps are zero,
# or a NaN is caught. By the leaves the first and the last one are right.
PASSED = """
multi(optax.adamw(0.1, weight_decay=0.5, mask=ndim))  # by `ndim`. Give a mask as a
optax.adamw(late, weight_decay=0.5, mask=ndim)  # mask by `ndim`. Give a mask as a tree
multi(optax.zero_nans(), clip(), optax.sgd(0.1))  # oxs.clip_by_global_norm(1.0, 'w')
optax.apply_if_finite(optax.chain(clip(), optax.sgd(late)), 3)  # by `reduce_
multi(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))  # what `random_bits` makes by place
multi(optax.adam(0.1), optax.scale_by_param_block_rms())  # all of the parameter of
"""
SHARED = """
multi(optax.zero_nans(), clip(), optax.sgd(0.1))  # oxs.all_reduce_grads('w')
optax.apply_if_finite(optax.chain(clip(), optax.sgd(late)), 3)  # by `reduce_
multi(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))  # program for one leaf is another
"""


@pytest.mark.filterwarnings("ignore:Specifying a key")
@pytest.mark.parametrize(
    "wrap, said, table",
    [
        (
            lambda tx: oxs.cross_shard(tx, AXIS, shard_state=True),
            "shard_state=True gives inner flat pieces .* Or leave shard_state=True out",
            PASSED,
        ),
        (
            lambda tx: oxs.diloco(optax.sgd(0.1), AXIS, outer=tx, shard_state=True),
            "shard_state=True gives the outer optimizer flat pieces",
            PASSED,
        ),
        (
            lambda tx: oxs.cross_shard(tx, AXIS, shard_state="leaves"),
            "shard_state='leaves' gives inner each leaf where it is owned",
            SHARED,
        ),
    ],
    ids=["cross_shard", "diloco", "leaves"],
)
def test_what_its_first_steps_do_not_show_is_refused(wrap, said, table):
    def start(tx):
        with pytest.raises(ValueError, match=said) as found:
            wrap(tx).init(PARAMS)
        raise Mixes(str(found.value))

    assert refused(start, table) == {}
