"""When elastic averaging is stable on x^2 / 2: a part of `reproduce_elastic_averaging`.

Workers that exchange in every step, in turns (round-robin), are a linear map of all
their parameters and the center. Zhang, Choromanska, LeCun, "Deep learning with Elastic
Averaging SGD", 2015, give the learning rates eta and moving rates alpha for which it is
stable: 0 <= eta <= 2 and 0 <= alpha <= (4 - 2 eta) / (4 - eta), with any number.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from matplotlib.figure import Figure

import optx_sync as oxs

SHADES = ("#66CCEE", "#EE6677")  # stable, unstable


def round_robin(eta, alpha, workers: int, *, simultaneous: bool) -> np.ndarray:
    """One turn of all workers on x^2 / 2, as a linear map; the center comes last.

    The paper's own form takes gradient and pull at the same point; TensorFlow, and so
    the library, steps first and pulls from where it then is.
    """
    pulled = 1.0 if simultaneous else 1.0 - eta  # times x: what alpha is applied to
    cycle = np.eye(workers + 1)
    for worker in range(workers):
        step = np.zeros((*eta.shape, workers + 1, workers + 1)) + np.eye(workers + 1)
        step[..., worker, worker] = 1.0 - eta - alpha * pulled
        step[..., worker, -1] = alpha
        step[..., -1, worker] = alpha * pulled
        step[..., -1, -1] = 1.0 - alpha
        cycle = step @ cycle
    return cycle


def radius_of(maps: np.ndarray) -> np.ndarray:
    return np.abs(np.linalg.eigvals(maps)).max(-1)


def simulated(eta, alpha, workers: int, cycles: int) -> np.ndarray:
    """All workers' x and the center's after some turns, by the library."""

    def run(eta, alpha):
        final = oxs.simulate.asynchronous(
            optax.sgd(eta),
            oxs.elastic_rule(moving_rate=alpha, rho=0.0),
            jnp.ones(()),
            lambda worker, params, event: params,
            np.arange(cycles * workers) % workers,
            num_workers=workers,
            communication_period=1,
            record=cycles * workers,
        ).final
        return jnp.append(final.workers.params, final.center)

    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.vmap(jax.vmap(run)))(eta, alpha))


def draw() -> Figure:
    """Spectral radii of both forms, side by side."""
    eta, alpha = np.meshgrid(np.linspace(0.001, 3, 150), np.linspace(0.001, 1.5, 150))
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, simultaneous in zip(figure.subplots(1, 2), (True, False), strict=True):
        radius = radius_of(round_robin(eta, alpha, 3, simultaneous=simultaneous))
        filled = axes.contourf(eta, alpha, radius, [0, 1, np.inf], colors=SHADES)
        edge = np.linspace(0, 2, 99)
        axes.plot(edge, (4 - 2 * edge) / (4 - edge), color="black", linewidth=1.2)
        axes.set(xlabel="learning rate times curvature, eta", xlim=(0, 3))
        axes.set(ylabel="moving rate, alpha", ylim=(0, 1.5))
        axes.set_title("at one point (paper)" if simultaneous else "step, then pull")
        proxies = filled.legend_elements()[0]
        axes.legend(proxies, ["stable", "unstable"], loc="upper right")
    return figure


def write(page: report.Report) -> None:
    """When elastic averaging is stable, in the paper's form and in the library's."""
    # 30 x 30 points, none of them on a boundary.
    eta, alpha = np.meshgrid(np.linspace(-0.21, 2.71, 30), np.linspace(-0.11, 1.31, 30))
    condition = (0 <= eta) & (eta <= 2) & (0 <= alpha)
    condition &= alpha * (4 - eta) <= 4 - 2 * eta
    rows, apart = [], 0.0
    for workers in (1, 3, 8, 16):
        papers = round_robin(eta, alpha, workers, simultaneous=True)
        librarys = round_robin(eta, alpha, workers, simultaneous=False)
        stable, own = (radius_of(maps) <= 1 for maps in (papers, librarys))
        expected = np.linalg.matrix_power(librarys, 3).sum(-1)  # from x = c = 1
        off = abs(simulated(eta, alpha, workers, 3) - expected) / (1 + abs(expected))
        apart = max(apart, float(off.max()))
        counts = stable, stable != condition, own, stable & ~own
        rows.append([workers, *(int(points.sum()) for points in counts)])
    page.table(
        f"Stable points (learning rate eta, moving rate alpha), of {eta.size}",
        ["p", "paper's form", "other than it says", "library's form", "only paper's"],
        rows,
    )
    page.criterion(
        "The paper's form is stable just where 0 <= eta <= 2 and 0 <= alpha <= "
        "(4 - 2 eta) / (4 - eta), with any p",
        all(row[2] == 0 for row in rows),
        f"{sum(row[2] for row in rows)} of {eta.size * len(rows):,} points differ",
    )
    page.criterion(
        "Three turns of `oxs.simulate.asynchronous` are the library form's linear map",
        apart < 1e-12,
        f"relative difference at most {apart:.1e}",
    )
    page.picture(
        draw(),
        "Stability on x^2 / 2 of 3 workers that exchange in every step, in turns. The "
        "line is the paper's condition. The library steps first and then pulls, as "
        "TensorFlow does.",
        "stability",
    )
