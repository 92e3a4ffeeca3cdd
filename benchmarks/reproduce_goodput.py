"""Reproduction: the goodput of Decoupled DiLoCo where chips fail all the time.

python benchmarks/reproduce_goodput.py            # two minutes on two cores
python benchmarks/reproduce_goodput.py --quick
"""

from itertools import product

import numpy as np
from pictures import Line, Panel
from report import grid, percent, reproduce

import optx_sync as oxs
from optx_sync.runtime import quorum
from optx_sync.simulate import Kind

YEAR, MILLION = 365.25 * 24 * 3600.0, 1e6  # seconds of one
CHIPS = (1.2 * MILLION, 2.4 * MILLION)
# (million chips, learners, elastic): published, in percent.
PUBLISHED = {
    (2.4, 1, False): 18,
    (2.4, 1, True): 40,
    (2.4, 8, True): 80,
    (2.4, 16, True): 86,
    (1.2, 1, True): 58,
    (1.2, 8, True): 88,
}
STEP, PERIOD, PARTS, DELAY = 2.0, 24, 12, 2  # seconds of a step; steps; parts; steps
FULL = {"hours": 24, "seeds": 3, "learners": (1, 2, 4, 8, 16, 32)}
SHORT = {"hours": 0.5, "seeds": 1, "learners": (1, 4)}


def pauses(rng, chips, pause, until):
    """(fails at, is back at) of a learner of so many chips.

    A chip fails once a year. What fails in a pause is mended in the same pause.
    """
    found, second = [], rng.exponential(YEAR / chips)
    while second < until:
        found.append((second, second + pause))
        second += pause + rng.exponential(YEAR / chips)
    return found


def durations(found, until):
    """Seconds of each step of a learner that makes the step under way anew."""
    steps, second, left = [], 0.0, list(reversed(found))
    while second <= until:
        ends = second + STEP
        while left and left[-1][0] < ends:
            ends = left.pop()[1] + STEP
        steps.append(ends - second)
        second = ends
    return steps


def up(seed, chips, pause, hours):
    """The share of the time that a learner alone spends in whole steps."""
    until = 3600.0 * hours
    found = pauses(np.random.default_rng(seed), chips, pause, until)
    return len(durations(found, until)) * STEP / until


def clock_of(seed, chips, learners, pause, hours, **options):
    """The virtual clock of learners whose chips fail, and the number of their steps.

    A learner is back with all parts of the center, or with `rejoins=False` as it was.
    """
    rejoins = options.pop("rejoins", True)
    # The fewer learners, the longer: so many hours of a learner in all.
    until, rng = 3600.0 * hours / learners, np.random.default_rng(seed)
    found = [pauses(rng, chips / learners, pause, until) for _ in range(learners)]
    steps = [durations([] if rejoins else of_one, until) for of_one in found]
    dies = [(w, *times) for w, of_one in enumerate(found) for times in of_one]
    settings = {"meet": quorum(1, grace=1.0), "delay": DELAY} | options
    line = oxs.simulate.clock(
        lambda learner, step: steps[learner][step],
        num_workers=learners,
        until=until,
        communication_period=PERIOD,
        part_bytes=[0.0] * PARTS,
        failures=dies if rejoins else [],
        **settings,
    )
    # Seconds of steps that went on in a pause are no goodput.
    kept = sum(max(e.steps - settings["delay"], 0) for e in line.of(Kind.JOIN))
    whole = until * learners / STEP
    return len(line.workers) / whole, kept / PARTS / whole, line.participation


def fitted(goodput, chips, seed, hours, most=600.0):
    """The pause, in seconds, with which one learner has this goodput."""
    low, high = 0.0, most
    for _ in range(20):
        middle = (low + high) / 2
        above = up(seed, chips, middle, hours) > goodput
        low, high = (middle, high) if above else (low, middle)
    return (low + high) / 2


def study(page, settings):
    """Fit the pauses, let the clock run, and write down what was found."""
    hours, seeds = settings["hours"], range(settings["seeds"])
    most = CHIPS[1]
    both = {}  # (elastic pause, restart, share of chips in service), by constants
    both["one constant"] = (
        fitted(0.40, most, 0, hours),
        fitted(0.18, most, 0, hours),
        1.0,
    )
    # Two: goodput is in_service * up(pause), and up is 40 % and 80 % of it.
    low, high, share, pause = 0.85, 1.0, 1.0, 0.0
    for _ in range(12):
        share = (low + high) / 2
        pause = fitted(0.40 / share, most, 0, hours)
        eight = np.mean([up(s, most / 8, pause, hours) for s in seeds])
        low, high = (low, share) if share * eight > 0.80 else (share, high)
    both["two constants"] = pause, fitted(0.18 / share, most, 0, hours), share

    def of_case(case, seed):
        chips, learners, elastic = case[0] * MILLION, *case[1:]
        given = [
            (share, clock_of(seed, chips, learners, of[not elastic], hours)[0])
            for *of, share in both.values()
        ]
        return np.prod(given, axis=1)

    cases = list(PUBLISHED)
    found = grid("The published cases", of_case, (cases, seeds))
    rows = []
    for number, (case, said) in enumerate(PUBLISHED.items()):
        millions, learners, elastic = case
        how = "elastic" if elastic else "restarts whole"
        one, two = (percent(found[number, :, i]) for i in range(2))
        rows.append([f"{millions} M chips, M = {learners}, {how}", said, one, two])
    page.table("cases", rows)
    for name, (pause, restart, share) in both.items():
        out = (1 - share) * YEAR
        page.text("constants", name=name, pause=pause, restart=restart,
                  out=100 * (1 - share), chip_seconds=out / MILLION)  # fmt: skip

    pause, _, share = both["two constants"]

    def of_size(chips, learners, seed):
        given = seed, chips, learners, pause, hours
        whole, parts = clock_of(*given), clock_of(*given, rejoins=False)
        locked = clock_of(*given, rejoins=False, meet=quorum(learners), delay=0)
        of_time = share * np.array([whole[0], whole[1], parts[1], locked[0]])
        return np.array([*of_time, whole[2], parts[2]])

    sizes = settings["learners"]
    curves = grid("More learners", of_size, (CHIPS, sizes, seeds))
    rows = []
    for (i, chips), (j, learners) in product(enumerate(CHIPS), enumerate(sizes)):
        cells = (percent(curves[i, j, :, column]) for column in range(6))
        rows.append([f"{chips / MILLION:g} M", learners, *cells])
    page.table("sizes", rows)
    panels = []
    for i, chips in enumerate(CHIPS):
        of = [(m, said) for (c, m, elastic), said in PUBLISHED.items()
              if elastic and c * MILLION == chips]  # fmt: skip
        at = 100 * curves[i].transpose(2, 1, 0)
        names = "quorum of 1", "of it in the center", "", "lockstep"
        sizes_of, said = zip(*of, strict=True)
        lines = [Line("published", sizes_of, said, "s")]
        lines += [Line(names[k], sizes, at[k], "o-") for k in (0, 1, 3)]
        axes = "learners M", "% of all chips' time", lines
        panels.append(Panel(*axes, f"{chips / MILLION:g} M chips", "x", (0, 100)))
    page.picture(panels)
    page.data(
        settings=settings, constants=both, cases=found, curves=curves,
        published=[[*case, said] for case, said in PUBLISHED.items()],
    )  # fmt: skip


if __name__ == "__main__":
    values = {"step": STEP, "period": PERIOD, "parts": PARTS, "delay": DELAY}
    reproduce("reproduce_goodput", __doc__, study, FULL, SHORT, **values)
