"""How few weights FTRL-Proximal needs: McMahan et al., 2013, on lines of source code.

    python benchmarks/reproduce_ftrl.py             # 2 minutes alone on two cores
    python benchmarks/reproduce_ftrl.py --quick     # short

Google's data are not public. The data here come with Python: lines of its standard
library, and the question whether a line is from the library's own tests.
"""

import hashlib
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import sparse_methods as sparse
from pictures import Line, Panel
from report import grid, listed, of_seeds, reproduce
from sklearn.metrics import roc_auc_score

FEATURES = 2**18
WIDTH = 48  # features of a line; 2 % of the lines have more
ROWS = 16  # lines of a step; with 1 and with 64 the AucLoss is the same within 0.0002
# Lines to train, to choose rates, to test; seeds.
FULL = {"lines": (80_000, 20_000, 20_000), "seeds": 3}
SHORT = {"lines": (640, 640, 640), "seeds": 1}


class Method(NamedTuple):
    make: Callable
    penalties: tuple[float, ...]  # l1, or k; FOBOS: the sum of its l1 over the pass
    tuning: tuple[float, float]  # those with which the rate is chosen
    rates: tuple[float, ...] = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4)


L1 = (0.0, 0.125, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
FOBOS_L1 = (0.125, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0, 16.0, 32.0)
COUNTS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)
ROWS_L1 = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56)
ROWS_RATES = (0.1, 0.18, 0.25, 0.35, 0.5, 0.7)
METHODS = {
    "FTRL": Method(sparse.ftrl, L1, (0.5, 2.0)),
    "RDA": Method(sparse.rda, L1, (0.5, 2.0)),
    "FOBOS": Method(sparse.fobos, FOBOS_L1, (0.5, 2.0)),
    "OGD-Count": Method(sparse.ogd_count, COUNTS, (2.0, 8.0)),
    "proximal_adagrad": Method(
        sparse.proximal_adagrad, ROWS_L1, (0.02, 0.1), ROWS_RATES
    ),
}
GLOBAL = "global rate"
GLOBAL_GRID = [(rate, 0.5) for rate in (1.4, 2.0, 2.8, 4.0, 5.6, 8.0)]
GLOBAL_GRID += [(rate, 0.0) for rate in (0.035, 0.05, 0.07, 0.1, 0.14, 0.2)]
# Twelve models at a time, of other rates and penalties, on the same batches.
train = jax.jit(
    jax.vmap(sparse.train, in_axes=(None, 0, 0, None, None, None)),
    static_argnums=(0, 3),
)


class Point(NamedTuple):
    validation: float  # AucLoss
    test: float  # AucLoss
    nonzeros: int


def load(counts):
    """Hashed features and labels of as many lines as each count says; what they are."""
    root, lines, labels = Path(sysconfig.get_path("stdlib")), [], []
    digest, files = hashlib.sha256(), 0
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if "site-packages" not in folders:
            text = path.read_text("utf-8", "replace")
            digest.update(text.encode())
            files += 1
            lines += (new := text.splitlines())
            labels += [(folders[:1] == ("test",), bool(folders))] * len(new)
    # An id out of range is no feature: in compiled code it gives 0 and learns nothing.
    ids, kept = np.full((sum(counts), WIDTH), FEATURES, np.int32), []
    for index in np.random.default_rng(0).permutation(len(lines)):
        if len(kept) == len(ids):
            break
        tokens = re.findall(r"\w+|[^\w\s]", lines[index])
        if len(tokens) >= 3:
            tokens += [" ".join(pair) for pair in pairwise(tokens)]
            found = {zlib.crc32(token.encode()) % FEATURES for token in tokens}
            ids[len(kept), : len(found)] = sorted(found)[:WIDTH]
            kept.append(index)
    # Some interpreters come without tests: then the question is for packages.
    tests, packages = np.array(labels, np.float32)[kept].T
    label, first = tests if tests.any() else packages, slice(counts[0])
    about = {
        "python": platform.python_version(),
        "files": files,
        "lines": len(lines),
        "sha256": digest.hexdigest(),
        "used": counts[0],
        "positive": label[first].mean(),
        "features": np.unique(ids[first]).size - 1,
    }
    cuts = np.cumsum(counts)[:-1]
    return list(zip(np.split(ids, cuts), np.split(label, cuts), strict=True)), about


def points_of(make, pairs, batches, held):
    """Train a model for each (rate, penalty), and measure it: rows of a `Point`."""
    rates, penalties = jnp.asarray(pairs, jnp.float32).T
    points = []
    for weights in np.asarray(train(make, rates, penalties, FEATURES, *batches)):
        padded = np.append(weights, np.float32(0.0))
        validation, test = (
            1 - roc_auc_score(labels, padded[ids].sum(1)) for ids, labels in held
        )
        points.append(Point(validation, test, int(np.count_nonzero(weights))))
    return np.array(points)


def nonzeros_at(loss, points):
    """Non-zeros at a test AucLoss, their logarithm interpolated; NaN outside."""
    losses, sizes = np.array(sorted((test, size) for _, test, size in points)).T
    # Without points that another one beats in both.
    best = sizes < np.append(np.inf, np.minimum.accumulate(sizes)[:-1])
    found = np.interp(loss, losses[best], np.log(sizes[best]), np.nan, np.nan)
    return float(np.exp(found))


def more_than_ftrl(curves, name, at, penalty):
    """Percent more non-zeros than FTRL, at the AucLoss of method `at` with a penalty.

    One number for each seed; NaN where a curve does not reach that AucLoss.
    """
    index = METHODS[at].penalties.index(penalty)
    losses = [points[index][1] for points in curves[at]]
    sizes, leaders = (
        np.array([nonzeros_at(*pair) for pair in zip(losses, curves[n], strict=True)])
        for n in (name, "FTRL")
    )
    return list(100 * (sizes / leaders - 1))


def shown(percentages, digits=0):
    """The median of the seeds and their range, as tables show them."""
    if np.isnan(percentages).any():
        return "-"
    found = of_seeds(percentages, f"+,.{digits}f", " %", np.median)
    return found if len(percentages) > 1 else found.partition(" (")[0]


def compare(page, curves, best_global):
    """The tables, criteria and the picture of what the curves say."""
    middle = {name: np.median(runs, axis=0) for name, runs in curves.items()}
    rows = []
    for l1, (_, loss, size) in list(zip(L1, middle["FTRL"], strict=True))[1:]:
        peers = list(METHODS)[1:]
        more = (shown(more_than_ftrl(curves, name, "FTRL", l1)) for name in peers)
        rows.append([f"{l1:g}", f"{loss:.4f}", int(size), *more])
    page.table("weights", rows)

    count, rda, fobos = (
        {at: more_than_ftrl(curves, name, of, at) for at in penalties}
        for name, of, penalties in (
            ("OGD-Count", "OGD-Count", (4.0, 8.0)),
            ("RDA", "FTRL", (0.25, 1.0, 2.0, 4.0)),
            ("FOBOS", "FTRL", (0.25,)),
        )
    )
    gains = list(100 * (curves["FTRL"][:, 0, 1] / best_global[:, 1] - 1))
    found = [
        listed(of, map(shown, of.values()), f"{name} = {{:g}}: {{}}")
        for name, of in (("l1", rda), ("l1", fobos), ("k", count))
    ]
    found.append(shown(gains, 1))
    published = page.words["published"].items()
    rows = ([*pair, here] for pair, here in zip(published, found, strict=True))
    page.table("published", rows)
    page.data(curves=curves, fobos=fobos[0.25], rda=rda, ogd_count=count, gains=gains)
    lines = [Line(name, of.T[2], of.T[1]) for name, of in middle.items()]
    ends = [f(middle["FTRL"][:, 2]) for f in (np.min, np.max)]
    lines.append(
        Line("best global rate", ends, [np.median(best_global[:, 1])] * 2, ":")
    )
    ylim = 0.96 * middle["FTRL"][0][1], 1.03 * middle["FTRL"][-1][1]
    unit = "1 - AUC on test lines"
    page.picture([Panel("non-zero weights", unit, lines, log="x", ylim=ylim)])


def study(page, settings):
    ((ids, labels), *held), about = load(settings["lines"])
    page.text("lines", **about)

    def run(what, methods):
        """The points of all seeds, [seed, point, 3], of {name: (make, pairs)}."""

        def one(name, seed):
            order = np.random.default_rng(seed).permutation(len(labels))
            shape = len(labels) // ROWS, ROWS
            batches = ids[order].reshape(*shape, WIDTH), labels[order].reshape(shape)
            make, pairs = methods[name]
            return points_of(make, pairs, batches, held)

        found = grid(what, one, (methods, range(settings["seeds"])))
        return dict(zip(methods, found, strict=True))

    tuning = {n: (m.make, [*product(m.rates, m.tuning)]) for n, m in METHODS.items()}
    chosen, rows = {GLOBAL: (sparse.global_rate, GLOBAL_GRID)}, []
    for name, tried in run("choosing rates", tuning).items():
        method, losses = METHODS[name], tried[..., 0].mean(0).reshape(-1, 2).mean(1)
        rate = method.rates[losses.argmin()]
        chosen[name] = method.make, [*product([rate], method.penalties)]
        rows.append([name, rate, listed(method.rates, losses, "{:g}: {:.4f}")])
    curves, best_global = run("sweeps", chosen), []
    for seed, points in enumerate(curves.pop(GLOBAL)):
        best = points[:, 0].argmin()
        best_global.append(points[best])
        rate, power = GLOBAL_GRID[best]
        kind = "over root t" if power else "constant"
        found = f"{kind}: {points[best, 0]:.4f}"
        rows.append([f"{GLOBAL}, seed {seed}", rate, found])
    page.table("rates", rows)
    compare(page, curves, np.array(best_global))


if __name__ == "__main__":
    reproduce("reproduce_ftrl", __doc__, study, FULL, SHORT)
