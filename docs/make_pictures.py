"""Draw the pictures of "how replicas agree" with the library itself, into docs/images.

python docs/make_pictures.py
"""

import functools
import heapq
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import optx_sync as oxs

IMAGES = Path(__file__).parent / "images"
COLORS = ["#4477AA", "#EE6677", "#228833", "#CCBB44"]

# Four workers, each with a bowl of its own; together they have the bowl around zero.
OPTIMA = jnp.array([[1.5, 0.7], [-0.4, 1.1], [-1.7, -0.5], [0.6, -1.3]])
CURVATURE = jnp.array([1.0, 2.5])
START, STEPS, PERIOD = jnp.array([-3.0, 2.6]), 60, 10
SGD, NESTEROV = optax.sgd(0.08), optax.sgd(0.7, 0.5, nesterov=True)
RULES = {
    "elastic_average": oxs.rules.elastic(moving_rate=0.9 / 4, rho=0.0),
    "local_sgd": oxs.rules.local_sgd(),
    "agn": oxs.rules.agn(optax.sgd(0.4)),
    "diloco": oxs.rules.diloco(NESTEROV),
}

SECONDS = [1.0, 1.15, 1.3, 2.9]  # that a step takes; the last replica is slow
EVENTS, UNTIL = 64, 15.0


def trajectories(rule):
    """The paths of the workers [STEPS, 4, 2] and of the center [STEPS, 2]."""
    tx = oxs.center_variable(SGD, rule, "workers", communication_period=PERIOD)
    axes = oxs.by_hand.state_axes(tx, START)
    state = oxs.by_hand.replicate(tx.init(START), 4, axes)

    def step(params, state, optimum):
        updates, state = tx.update(CURVATURE * (params - optimum), state, params)
        return optax.apply_updates(params, updates), state

    def advance(carry, _):
        mapped = jax.vmap(step, (0, axes, 0), (0, axes), axis_name="workers")
        workers, state = mapped(*carry, OPTIMA)
        return (workers, state), (workers, oxs.center_params(state, START))

    return jax.lax.scan(
        advance, (oxs.by_hand.replicate(START, 4), state), length=STEPS
    )[1]


def draw_trajectories():
    """One panel for each rule."""
    grid = {"sharex": True, "sharey": True, "layout": "constrained"}
    figure, panels = plt.subplots(2, 2, figsize=(8.4, 7.6), **grid)
    x, y = np.meshgrid(np.linspace(-3.6, 2.4, 120), np.linspace(-2.2, 3.1, 120))
    for axis, (name, rule) in zip(panels.flat, RULES.items(), strict=True):
        bowl = CURVATURE[0] * x**2 + CURVATURE[1] * y**2
        axis.contour(x, y, bowl, levels=9, colors="0.88", linewidths=0.8, zorder=0)
        workers, center = trajectories(rule)
        for number, color in enumerate(COLORS):
            path = np.vstack([START, workers[:, number]])
            axis.plot(*path.T, color=color, linewidth=1.1, label=f"worker {number}")
            axis.plot(*OPTIMA[number], "x", color=color, ms=8, mew=2)
        rounds = np.vstack([START, center[PERIOD - 1 :: PERIOD]])
        axis.plot(*rounds.T, "ko-", ms=4.5, label="center, once a round")
        axis.plot(0, 0, "k*", ms=13, markerfacecolor="white", label="optimum of all")
        axis.plot([], "x", color="0.3", ms=8, mew=2, label="optimum of a worker")
        axis.set_title(f"oxs.{name}", family="monospace")
        axis.set_aspect("equal")
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(IMAGES / "trajectories.png", dpi=130)


@functools.partial(jax.jit, static_argnums=1)
def replay(schedule, required):
    """What the four replicas did; an event that names nobody changes nothing."""
    return oxs.simulate.sync_replicas(
        optax.sgd(0.1), jnp.zeros(()), lambda *_: jnp.ones(()), schedule,
        replicas_to_aggregate=required, total_num_replicas=4, num_tokens=0,
    )  # fmt: skip


def run_clock(required):
    """Bars (replica, start, end, accepted), and the times of updates."""
    schedule, started = np.full(EVENTS, -1, np.int32), np.zeros(4)
    bars, updates, waited = [], [], np.zeros(4, bool)
    due = [(seconds, replica) for replica, seconds in enumerate(SECONDS)]
    for event in range(EVENTS):
        now, schedule[event] = heapq.heappop(due)
        if now > UNTIL:
            break
        run, replica = replay(schedule, required), schedule[event]
        bars.append((replica, started[replica], now, run.accepted[event]))
        updates += [now] * int(run.updated[event])
        goes_on = (waited | (np.arange(4) == replica)) & ~run.blocked[event]
        for other in np.flatnonzero(goes_on):
            started[other] = now
            heapq.heappush(due, (now + SECONDS[other], other))
        waited = run.blocked[event]
    return bars, updates


def draw_stragglers():
    """One panel without a backup replica, one with."""
    grid = {"sharex": True, "layout": "constrained"}
    figure, panels = plt.subplots(2, 1, figsize=(9, 4.8), **grid)
    for axis, required in zip(panels, (4, 3), strict=True):
        bars, updates = run_clock(required)
        for replica, start, end, accepted in bars:
            look = {"color": COLORS[0 if accepted else 1], "edgecolor": "white"}
            axis.barh(replica, end - start, left=start, height=0.62, **look)
        axis.vlines(updates, -0.5, 3.5, color="black", label="update")
        title = f"replicas_to_aggregate={required} of 4: {len(updates)} updates"
        axis.set_title(title, loc="left")
        axis.set_yticks(range(4), ["replica 0", "replica 1", "replica 2", "straggler"])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set(ylim=(3.5, -0.5), xlim=(0, UNTIL))
    labels = "computes a gradient that is used", "... that is stale, and dropped"
    for color, label in zip(COLORS, labels, strict=False):
        axis.barh(0, 0, color=color, label=label)
    axis.barh(0, 0, color="white", edgecolor="0.6", label="waits for a token")
    axis.set_xlabel("seconds")
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(IMAGES / "stragglers.png", dpi=130)


def draw_robust():
    """Seven gradients that agree, one that does not, and what each rule makes of it."""
    rng = np.random.default_rng(4)
    honest = np.array([1.0, 0.6]) + 0.32 * rng.normal(size=(7, 2))
    liar = np.array([[-3.4, -1.2]])
    sent = jnp.asarray(np.concatenate([honest, liar]), jnp.float32)
    rules = {
        "all_reduce()": oxs.exchange.all_reduce(),
        'clipped("median")': oxs.exchange.clipped("median"),
        "median()": oxs.exchange.median(),
        "geometric_median()": oxs.exchange.geometric_median(),
        "krum(1)": oxs.exchange.krum(1),
    }

    def meet(x):
        return [rule.meet(x, (), "data").mean for rule in rules.values()]

    results = jax.vmap(meet, axis_name="data")(sent)
    figure, axis = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
    axis.plot(*honest.T, "o", color="0.45", ms=7, label="gradient of a replica")
    axis.plot(*liar.T, "X", color=COLORS[1], ms=11, label="gradient that is wrong")
    axis.plot(*honest.mean(axis=0), "k*", ms=15, label="mean of the honest ones")
    markers = zip(
        "sD^vP", ["black", *COLORS[::-1][:2], COLORS[0], "#AA3377"], strict=True
    )
    for (name, result), (marker, color) in zip(
        zip(rules, results, strict=True), markers, strict=True
    ):
        look = {"color": color, "ms": 8, "markeredgecolor": "white", "zorder": 3}
        axis.plot(*np.asarray(result[0]), marker, linestyle="", label=name, **look)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left", fontsize=9)
    axis.set_aspect("equal")
    figure.savefig(IMAGES / "robust.png", dpi=130)


def draw_links():
    """Utilisation against bandwidth, of each strategy, with what has been published."""
    pair = ((0, 1),)
    whole = oxs.audit.Collective("all-reduce", 2 * 10**10, 1, pair, False, True)
    part = whole._replace(bytes=whole.bytes // 8)
    codes = [
        oxs.audit.Collective(kind, 41 * 10**7 * of, 1, pair, False, True)
        for kind, of in (("all-to-all", 2), ("all-gather", 1))
    ]
    backwards = {"quiet": (), "overlap": 2 / 3}
    strategies = {
        "every step": oxs.audit.Strategy([whole], **backwards),
        "H = 10": oxs.audit.Strategy([whole], 10, **backwards),
        "H = 100": oxs.audit.Strategy([whole], 100, **backwards),
        "H = 300": oxs.audit.Strategy([whole], 300, **backwards),
        "H = 96, in 8 parts, overlap": oxs.audit.Strategy([part], 12, quiet=()),
        "the same, 4 bits": oxs.audit.Strategy(codes, 12, quiet=()),
    }
    published = {"every step": 184, "H = 10": 49, "H = 100": 6.2, "H = 300": 2.0}
    gbits = np.geomspace(0.05, 1000, 200)
    plan = oxs.audit.plan(strategies, gbits=gbits, step_seconds=1.01)
    for goal in (0.8, 0.99):
        print(oxs.audit.plan(strategies, gbits=(), step_seconds=1.01, goal=goal))
    figure, axis = plt.subplots(figsize=(7.6, 5.2), layout="constrained")
    colors = [*COLORS, "#AA3377", "#66CCEE"]
    for (name, found), color in zip(plan.utilisation.items(), colors, strict=True):
        axis.semilogx(gbits, found, color=color, label=name)
        if name in published:
            axis.plot(published[name], 0.8, "o", color=color, ms=7)
    axis.plot([], [], "o", color="0.45", label="published: 80 % from here on")
    axis.set(xlabel="Gbit/s of the link", ylabel="share of the time that computes")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(IMAGES / "links.png", dpi=130)


if __name__ == "__main__":
    draw_links()
    draw_trajectories()
    draw_stragglers()
    draw_robust()
