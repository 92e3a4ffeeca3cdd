"""The text of Python's documentation, and a small model of its characters."""

import functools
import hashlib
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

CONTEXT, EMBEDDING, HIDDEN = 12, 16, 272  # characters seen, and the layers' widths


@functools.cache
def read_text():
    """(facts, training characters, validation windows, test windows), as numbers."""
    whole = "\n".join(pydoc_data.topics.topics.values())
    text = "\n\n".join(dict.fromkeys(whole.split("\n\n")))
    alphabet, codes = np.unique(list(text), return_inverse=True)
    blocks = np.array_split(codes.astype(np.int32), 100)
    views = np.lib.stride_tricks.sliding_window_view
    held_out = [
        np.concatenate([views(block, CONTEXT + 1) for block in blocks[first::20]])
        for first in (9, 19)
    ]
    train = [block for number, block in enumerate(blocks) if number % 10 != 9]
    facts = {
        "length": len(whole),
        "sha256": hashlib.sha256(whole.encode()).hexdigest(),
        "kept": len(text),
        "alphabet": len(alphabet),
    }
    return facts, np.concatenate(train), *held_out


def initial(seed):
    """Parameters of the model."""
    normal = np.random.default_rng(seed).standard_normal
    alphabet, width = read_text()[0]["alphabet"], CONTEXT * EMBEDDING
    params = {
        "embedding": normal((alphabet, EMBEDDING)),
        "hidden": normal((width, HIDDEN)) / width**0.5,
        "hidden_bias": np.zeros(HIDDEN),
        "output": normal((HIDDEN, alphabet)) / HIDDEN**0.5,
        "output_bias": np.zeros(alphabet),
    }
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def loss_of(params, windows):
    """Nats per character: the last of each window, given those before it."""
    before, after = windows[:, :-1], windows[:, -1]
    inputs = params["embedding"][before].reshape(len(windows), -1)
    hidden = jnp.tanh(inputs @ params["hidden"] + params["hidden_bias"])
    logits = hidden @ params["output"] + params["output_bias"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, after).mean()
