"""slot and slot_names, over states nested in every way that Optax nests them."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync import optimizers as catalogue

PARAMS = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}


@pytest.mark.parametrize(
    ("tx", "names"),
    [
        (catalogue.ftrl(0.1), ("accum", "linear")),
        (catalogue.adam(0.1), ("m", "v")),
        (catalogue.gradient_descent(0.1), ()),
        (optax.adam(0.1), ("mu", "nu")),
        (optax.chain(optax.clip(1.0), catalogue.momentum(0.1, 0.9)), ("momentum",)),
        (oxs.cross_shard(catalogue.adagrad(0.1), "data"), ("accumulator",)),
        (
            oxs.elastic_average(catalogue.momentum(0.1, 0.9), "w", learning_rate=0.1),
            ("center", "taken", "momentum"),
        ),
        (oxs.agn(catalogue.adam(0.1), "w"), tuple("center outer.m outer.v accumulated "
         "inner.m inner.v".split())),
        (optax.inject_hyperparams(catalogue.adagrad)(0.1), ("accumulator",)),
        (
            optax.multi_transform(
                {"x": catalogue.adagrad(0.1), "y": optax.sgd(0.1, 0.9)},
                {"a": "x", "b": "y"},
            ),
            ("accumulator", "trace"),
        ),
        (optax.chain(optax.trace(0.9), optax.trace(0.8)), ("0.trace", "1.trace")),
    ],
)  # fmt: skip
def test_names_lead_to_slots(tx, names):
    state = tx.init(PARAMS)
    assert oxs.optimizers.slot_names(state) == names
    for name in names:
        assert set(oxs.optimizers.slot(state, name)) == {"a", "b"}


def test_a_slot_is_the_tree_in_the_state():
    state = oxs.agn(catalogue.adagrad(0.1), "w").init(PARAMS)
    np.testing.assert_array_equal(
        oxs.optimizers.slot(state, "inner.accumulator")["a"], jnp.full(2, 0.1)
    )
    assert oxs.optimizers.slot(state, "center") is optax.tree_utils.tree_get(
        state, "center"
    )


def test_unknown_and_ambiguous_names_list_what_there_is():
    state = oxs.agn(optax.sgd(0.1, momentum=0.9), "w").init(PARAMS)
    with pytest.raises(ValueError, match=r"No slot .* 'mu'.*'outer.trace'"):
        oxs.optimizers.slot(state, "mu")
    with pytest.raises(TypeError, match=r"of an optimizer; got dict. Pass opt_state"):
        oxs.optimizers.slot({"w": jnp.zeros(2)}, "mu")
    with pytest.raises(ValueError, match=r"More than one slot .* 'trace'"):
        oxs.optimizers.slot(state, "trace")
