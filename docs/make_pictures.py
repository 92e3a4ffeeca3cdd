"""Draw the pictures of the guides into docs/images: styled by benchmarks/pictures.py.

python docs/make_pictures.py

Those of "how replicas agree", "links" and "robust" are made with the library itself,
the others from JSON: of the table of all methods, and of examples (demo.json,
language_model.json and elastic.json beside the pictures).
"""

import functools
import heapq
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import optx_sync as oxs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # before what stands there is imported
from pictures import COLOURS, GREY, WIDTH, Line, Panel, figure_of, save  # noqa: E402

IMAGES = ROOT / "docs" / "images"
# Of the table of all methods, in the README.
EIGHT = ("data parallel", "backup workers", "local SGD", "DiLoCo", "DiLoCo, 4 bits")
EIGHT += "MuLoCo", "PowerSGD", "Decoupled DiLoCo"

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
    figure = Figure((WIDTH, 4.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    x, y = np.meshgrid(np.linspace(-3.6, 2.4, 120), np.linspace(-2.2, 3.1, 120))
    for axis, (name, rule) in zip(panels.flat, RULES.items(), strict=True):
        bowl = CURVATURE[0] * x**2 + CURVATURE[1] * y**2
        axis.contour(x, y, bowl, levels=9, colors=GREY, linewidths=0.6, alpha=0.3)
        workers, center = trajectories(rule)
        axis.grid(visible=False)
        for number, color in enumerate(COLOURS[:4]):
            path = np.vstack([START, workers[:, number]])
            axis.plot(*path.T, color=color, linewidth=0.8, label=f"worker {number}")
            axis.plot(*OPTIMA[number], "x", color=color, ms=6, mew=1.6)
        rounds = np.vstack([START, center[PERIOD - 1 :: PERIOD]])
        axis.plot(*rounds.T, "o-", color=GREY, ms=3.5, label="center, once a round")
        axis.plot(0, 0, "*", color=GREY, ms=9, mfc="none", label="optimum of all")
        axis.plot([], "x", color=GREY, ms=6, mew=1.6, label="optimum of a worker")
        axis.set_title(f"oxs.{name}", family="monospace")
        axis.set_aspect("equal")
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2)
    save(figure, IMAGES / "trajectories.png")


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
    figure = Figure((WIDTH, 3.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axis, required in zip(panels, (4, 3), strict=True):
        bars, updates = run_clock(required)
        for replica, start, end, accepted in bars:
            look = {"color": COLOURS[0 if accepted else 1], "height": 0.62}
            axis.barh(replica, end - start - 0.06, left=start + 0.03, **look)
        axis.vlines(updates, -0.5, 3.5, color=GREY, lw=1.6, label="update")
        title = f"replicas_to_aggregate={required} of 4: {len(updates)} updates"
        axis.set_title(title, loc="left")
        axis.grid(visible=False)
        axis.set_yticks(range(4), ["replica 0", "replica 1", "replica 2", "straggler"])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set(ylim=(3.5, -0.5), xlim=(0, UNTIL))
    labels = "computes a gradient that is used", "... that is stale, and dropped"
    for color, label in zip(COLOURS, labels, strict=False):
        axis.barh(0, 0, color=color, label=label)
    axis.barh(0, 0, color="none", edgecolor=GREY, label="waits for a token")
    axis.set_xlabel("seconds")
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2)
    save(figure, IMAGES / "stragglers.png")


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
    middle = honest.mean(axis=0)
    lines = [Line("_honest", *honest.T, "o")]
    lines += [
        Line(
            "seven gradients that agree", *honest[[honest[:, 0].argmax()]].T, "o", GREY
        )
    ]
    lines.append(Line("one is wrong, far off at (-3.4, -1.2)", [0.08], [0.2], "X"))
    for (name, result), marker in zip(
        zip(rules, results, strict=True), "sD^vP", strict=True
    ):
        lines.append(Line(name, *np.asarray(result[0])[:, None], marker))
    lines.append(Line("mean of the seven", *middle, "*", GREY))
    figure = figure_of(
        [Panel("", "", lines, at_points=True, xlim=(0, 1.7), ylim=(0.1, 1.3))]
    )
    save(figure, IMAGES / "robust.png")


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
    lines = []
    for n, (name, found) in enumerate(plan.utilisation.items()):
        lines.append(Line(name, gbits, found, "-"))
        if name in published:
            lines.append(Line(f"_{name}", [published[name]], [0.8], "o", COLOURS[n]))
    lines.append(Line("published: 80 % from here on", [1], [np.nan], "o", GREY))
    axes = "Gbit/s of the link", "share of the time that computes"
    save(figure_of([Panel(*axes, lines, log="x")]), IMAGES / "links.png")


def draw_methods():
    """Of the table of all methods the points, eight of them with their names."""
    table = json.loads((ROOT / "benchmarks" / "results" / "table.json").read_text())
    [panel] = table["drawn"]["table.png"]["panels"]
    for line in panel["lines"]:
        name = line["label"].removeprefix("_")
        line["label"] = name if name in EIGHT else f"_{name}"
        if name not in EIGHT:
            line["y"] = line["y"][:1]
    save(figure_of([panel]), IMAGES / "methods.png")


def draw_demo():
    """What the demo ended with: test accuracy, standard error, bytes."""
    lines = []
    for name, accuracy, _, _, sent in json.loads((IMAGES / "demo.json").read_text()):
        mean, error = (float(part.strip("% ")) for part in accuracy.split("±"))
        if sent := int(sent.replace(",", "")):
            ends = [[mean - error], [mean], [mean + error]]
            lines.append(Line(name, [sent], ends, "o"))
        else:  # nothing has no place on a logarithmic axis
            lines.append(Line(name, [5e7, 2e5], [mean] * 2, "--", GREY))
    axes = "bytes that each of 8 workers sent", "test accuracy, %"
    panel = Panel(*axes, lines, log="x", at_points=True, ylim=(95.9, 98.6))
    save(figure_of([panel]), IMAGES / "demo.png")


def draw_language_model():
    """What the language model ended with: loss, half its range, bytes a step."""
    rows = json.loads((IMAGES / "language_model.json").read_text())
    lines = [
        Line(name, [sent], [[loss - half], [loss], [loss + half]], "o")
        for name, loss, half, sent in rows
    ]
    axes = "bytes a pod sends to the other in a step, in the mean", "held-out loss"
    panel = Panel(*axes, lines, log="x", at_points=True)
    save(figure_of([panel]), IMAGES / "language_model.png")


def draw_elastic():
    """The loss of a run with deaths, and who trains."""
    run = json.loads((IMAGES / "elastic.json").read_text())
    figure = Figure((WIDTH, 3.2), layout="constrained")
    loss, number = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    loss.plot(run["seconds"], run["loss"], ".-", color=COLOURS[0], ms=5)
    number.step(*zip(*run["workers"], strict=True), where="post", color=COLOURS[0])
    for when, event in run["events"]:
        for axes in (loss, number):
            axes.axvline(when, color=COLOURS[1], ls="--", lw=1)
        above = {"transform": loss.get_xaxis_transform(), "va": "top"}
        loss.text(when + 1, 0.98, event, rotation=90, color=COLOURS[1], **above)
    loss.set(yscale="log", ylabel="test loss of the center")
    number.set(xlabel="seconds", ylabel="workers", ylim=(0, 4.5), yticks=(0, 2, 4))
    figure.align_ylabels()
    save(figure, IMAGES / "elastic.png")


if __name__ == "__main__":
    draw_links()
    draw_trajectories()
    draw_stragglers()
    draw_robust()
    draw_methods()
    draw_demo()
    draw_language_model()
    draw_elastic()
