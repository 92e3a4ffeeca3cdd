"""Sparse models of click-like data: FTRL against Adagrad and gradient descent.

    python examples/train_clicks_ftrl.py                       # about half a minute
    python examples/train_clicks_ftrl.py --lines 4000 --out short_clicks.png

The data come with Python: lines of its standard library, with the question whether a
line is from the library's own tests (without them: whether its file is in a package).
A line's tokens and pairs of neighbours are hashed into 2^18 features, of which it has
about twenty; most are seen in very few lines. The last line is like

    clicks.png: ftrl, l1 = 1: 22,740 of adagrad's 142,935 weights
"""

import argparse
import re
import sysconfig
import time
import zlib
from itertools import pairwise, product
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.metrics import roc_auc_score

import optx_sync as oxs

FEATURES = 2**18  # weights in the table
WIDTH = 48  # features of a line; 2 % of the lines have more
LINES = 100_000  # of about 800,000; 80 % to train, 10 % to choose, 10 % to test
BATCH, SEED, PRUNED = 32, 0, "adagrad's largest weights"
METHODS = {  # the l1 penalties to show, and the rates to choose from
    "ftrl": ([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0], [0.2, 0.4, 0.8]),
    "adagrad": ([0.0], [0.1, 0.2, 0.4]),
    "gradient_descent": ([0.0], [0.05, 0.1, 0.2]),
}
STYLES = {"ftrl": "C0o-", "adagrad": "C1s", PRUNED: "C1:", "gradient_descent": "C2s"}


def load(count):
    """Hashed features [count, WIDTH] and labels [count] of lines in random order."""
    root, lines, labels = Path(sysconfig.get_path("stdlib")), [], []
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if "site-packages" not in folders:
            lines += (new := path.read_text("utf-8", "replace").splitlines())
            labels += [("test" in folders, bool(folders))] * len(new)
    labels = np.array(labels, np.float32).T
    # An id out of range is no feature: in compiled code it gives 0 and learns nothing.
    ids, kept = np.full((count, WIDTH), FEATURES, np.int32), []
    for index in np.random.default_rng(SEED).permutation(len(lines)):
        tokens = re.findall(r"\w+|[^\w\s]", lines[index])
        if len(tokens) >= 3 and len(kept) < count:
            tokens += [" ".join(pair) for pair in pairwise(tokens)]
            found = {zlib.crc32(token.encode()) % FEATURES for token in tokens}
            ids[len(kept), : len(found)] = sorted(found)[:WIDTH]
            kept.append(index)
    return ids[: len(kept)], labels[0 if labels[0].any() else 1, kept]


@jax.jit
def logits_of(weights, ids):
    return oxs.take(weights, ids).sum(-1)


def loss_of(weights, ids, labels):
    return optax.sigmoid_binary_cross_entropy(logits_of(weights, ids), labels).sum()


def train(method, l1, rate, ids, labels):
    """The weights after one pass over ids [steps, BATCH, WIDTH]."""
    penalty = {"l1": l1} if method == "ftrl" else {}
    tx = getattr(oxs.optimizers, method)(rate, **penalty)
    grad_of = oxs.value_and_grad(loss_of, rows=lambda ids, labels: ids)

    def step(carry, batch):
        weights, state = carry
        _, slices = grad_of(weights, *batch)
        updates, state = tx.update(slices, state, weights)
        return (optax.apply_updates(weights, updates), state), None

    weights = jnp.zeros(FEATURES)
    return jax.lax.scan(step, (weights, tx.init(weights)), (ids, labels))[0][0]


def draw(rows, out):
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for method, style in STYLES.items():
        points = [row[2:0:-1] for (name, _), row in rows.items() if name == method]
        axis.plot(*zip(*points, strict=True), style, label=method)
    for (method, l1), (_, loss, size, *_) in rows.items():
        if method == "ftrl":
            axis.text(size, loss, f"\nl1 = {l1:g} ", ha="right", va="top", fontsize=8)
    axis.set(xscale="log", xlabel="non-zero weights", ylabel="1 - AUC on test lines")
    axis.set_title("How many weights does a model of sparse features need?")
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.margins(0.12)
    axis.legend(frameon=False)
    figure.savefig(out, dpi=150)


def main():
    parser = argparse.ArgumentParser(description="FTRL against dense optimizers.")
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--out", default="clicks.png", help="where the picture goes")
    arguments = parser.parse_args()
    ids, labels = load(arguments.lines)
    steps = len(ids) * 8 // 10 // BATCH
    cuts = steps * BATCH, (steps * BATCH + len(ids)) // 2
    (ids, *held_ids), (labels, *held) = np.split(ids, cuts), np.split(labels, cuts)
    data = ids.reshape(steps, BATCH, WIDTH), labels.reshape(steps, BATCH)

    def losses(weights):  # on the validation and on the test lines
        scores = [logits_of(weights, ids) for ids in held_ids]
        return [1 - roc_auc_score(*pair) for pair in zip(held, scores, strict=True)]

    jitted = jax.jit(train, static_argnums=0)
    compiled = {name: jitted.lower(name, 0.0, 1.0, *data).compile() for name in METHODS}
    grid = [(name, *pair) for name in METHODS for pair in product(*METHODS[name])]
    rows, dense = {}, []  # of each method and penalty, the best on the validation lines
    for method, l1, rate in track(grid, "training"):
        start = time.perf_counter()
        weights = np.asarray(compiled[method](l1, rate, *data))
        seconds = time.perf_counter() - start
        row = (*losses(weights), np.count_nonzero(weights), rate, seconds)
        rows[method, l1] = min(rows.get((method, l1), row), row)
        dense += [weights] if method == "adagrad" else []
    table = Table("method", "l1", "rate", "AUC loss", "non-zero weights", "seconds")
    for (method, l1), (_, loss, size, rate, seconds) in rows.items():
        numbers = f"{l1:g}", f"{rate:g}", f"{loss:.2%}", f"{size:,}", f"{seconds:.1f}"
        table.add_row(method, *numbers)
    Console().print(table)
    sparse, all_of = rows["ftrl", 1.0][2], rows["adagrad", 0.0][2]
    # The measure of a penalty: dense training, and then only the largest weights.
    for l1 in METHODS["ftrl"][0]:
        size = rows["ftrl", l1][2]
        cut = [np.where(abs(w) < np.sort(abs(w))[-size], 0, w) for w in dense]
        rows[PRUNED, l1] = min((*losses(weights), size) for weights in cut)
    draw(rows, arguments.out)
    print(f"{arguments.out}: ftrl, l1 = 1: {sparse:,} of adagrad's {all_of:,} weights")


if __name__ == "__main__":
    main()
