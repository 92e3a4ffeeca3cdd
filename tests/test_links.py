"""Seconds on links: by hand, against the gallery, and against published bandwidths."""

import math

import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs
from optx_sync import audit
from optx_sync.audit import Collective, Strategy
from tests.refusals import all_refused

FOUR, PAIRS = ((0, 1, 2, 3),), ((0, 1), (1, 2), (2, 3), (3, 0))
GBIT = 10**9 // 8  # bytes that take a second at 1 Gbit/s


def row(kind="all-reduce", bytes=GBIT, groups=FOUR, conditional=False, overlapped=None):
    return Collective(kind, bytes, 1, groups, conditional, overlapped)


def once(*rows, gbits=1.0, step_seconds=10.0, **more):
    return audit.time(rows, gbits=gbits, step_seconds=step_seconds, **more)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds", "messages"),
    [
        ("all-reduce", FOUR, 1.5, 6),
        ("all-reduce", ((0, 1), (2, 3)), 1.0, 2),
        ("reduce-scatter", FOUR, 0.75, 3),
        ("all-to-all", FOUR, 0.75, 3),
        ("ragged-all-to-all", FOUR, 0.75, 3),
        ("all-gather", FOUR, 3.0, 3),
        ("collective-broadcast", FOUR, 1.0, 1),
        ("collective-permute", PAIRS, 1.0, 1),
        ("send", (), 1.0, 1),
    ],
)
def test_each_kind_takes_what_a_ring_sends(kind, groups, seconds, messages):
    found, late = once(row(kind, groups=groups), latency=0.25), 0.25 * messages
    assert found == pytest.approx(
        (seconds + late, seconds + late, 10 / (10 + late + seconds))
    )
    assert once(row(kind, groups=groups), gbits=4.0).sent == pytest.approx(seconds / 4)


def test_what_is_near_costs_nothing():
    inside, between = row(groups=((0, 1), (2, 3))), row(groups=((0, 2), (1, 3)))
    assert once(inside, between, near=2).sent == 1.0
    assert once(inside, near=2) == (0.0, 0.0, 1.0)
    # A ring over two hosts waits for the pairs that lie between them.
    assert once(row("collective-permute", groups=PAIRS), near=2).sent == 1.0


def test_a_step_hides_what_is_overlapped_up_to_its_share():
    hidden, waited = row(overlapped=True), row(overlapped=False)
    assert once(hidden, hidden).exposed == 0.0
    assert once(hidden, hidden, overlap=0.2).exposed == pytest.approx(1.0)
    assert once(hidden, waited) == (3.0, 1.5, 10 / 11.5)
    # In a conditional a collective hides behind what stands beside it alone.
    assert once(hidden._replace(conditional=True)).exposed == 1.5


def test_conditionals_and_programs_that_meet_count_once_in_a_period():
    always, meets = row(), row(conditional=True)
    assert once(always, meets, period=5) == (6 * 1.5, 6 * 1.5, 50 / 59)
    of_two = audit.time([always], quiet=[], period=5, gbits=1, step_seconds=10)
    assert of_two == (1.5, 1.5, 50 / 51.5)
    # Each step hides its own, not those of others.
    late = row(overlapped=True, bytes=10 * GBIT)
    assert once(late, period=5).exposed == pytest.approx(5 * 5.0)


def test_a_round_computes_once_in_a_period():
    meets = row(conditional=True)
    coded = Strategy([meets], period=5, round_seconds=4.0)
    found = audit.time(coded, gbits=1, step_seconds=10)
    assert found == (1.5, 1.5, 50 / (50 + 1.5 + 4))
    plan = audit.plan({"coded": coded}, gbits=[1], step_seconds=10)
    assert plan.utilisation["coded"] == (found.utilisation,)


def test_branches_that_exclude_each_other_count_by_their_mean():
    def at(*numbers, **more):
        names = ("due", "pairing", "inside")
        return row(conditional=True, **more)._replace(
            branch=tuple(zip(names, numbers, strict=False))
        )

    # In seconds: 1.5 in each round; 3, and 6 or 1.5, in turn.
    rows = [at(1), at(1, 0, bytes=2 * GBIT), at(1, 2, 0, bytes=4 * GBIT), at(1, 2, 1)]
    assert once(*rows).sent == pytest.approx(1.5 + (3 + (6 + 1.5) / 2) / 2)
    # One that is near takes no time, and its turn.
    near = at(1, 0, groups=((0, 1), (2, 3)))
    far = at(1, 1, groups=((0, 2), (1, 3)))
    assert once(near, far, near=2).sent == pytest.approx(0.5)
    lines = audit.table(rows).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[1:5]] == [
        *("yes", "yes, 1 in 2", "yes, 1 in 4", "yes, 1 in 4"),
    ]
    assert lines[5].split()[1] == str(round(GBIT * (1 + 1 + 1 + 0.25)))


@pytest.mark.parametrize(
    ("tx", "seconds"),
    [
        (oxs.noloco(optax.sgd(0.1), "workers"), 0.032),
        (oxs.gossip(optax.sgd(0.1), "workers", graph=oxs.graphs.exponential()), 0.032),
        (oxs.local_sgd(optax.sgd(0.1), "workers", fragments=2), 0.056),
    ],
    ids=["noloco", "exponential", "parts"],
)
def test_a_meeting_with_one_partner_is_quicker_than_one_with_all(tx, seconds):
    """4 MB among eight at 1 Gbit/s, whichever partner it is; of parts each meets."""
    workers = oxs.Workers(8, "workers", mesh=True)

    def begin():
        params = [jnp.zeros(500_000)] * 2
        return params, tx.init(params)

    step = workers.step(lambda p, s: oxs.apply_gradients(tx, p, s, p), state=2)
    cost = once(*audit.collectives(step, *workers.expect(begin)))
    assert cost.sent == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("period", "published"), [(1, 184), (10, 49), (100, 6.2), (300, 2.0)]
)
def test_the_bandwidths_of_the_scaling_laws(period, published):
    # 10e9 parameters in bfloat16, two datacenters, what is sent overlaps with the
    # backward pass, two thirds of a step. The step's seconds are fitted to the four.
    gradients = row(bytes=2 * 10**10, groups=((0, 1),), overlapped=True)
    strategy = Strategy([gradients], period, quiet=(), overlap=2 / 3)
    plan = audit.plan({"one": strategy}, gbits=[published], step_seconds=1.01)
    # Their bandwidths lie on a grid, each 1.2 times the one before.
    assert published / 1.2 < plan.needed["one"] < published * 1.2
    assert plan.needed["one"] == pytest.approx(published, rel=0.07)
    assert plan.utilisation["one"][0] == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize(
    ("bytes", "period", "milliseconds"),
    [(1_630_208, 1, 13.0), (1_630_208, 20, 0.652), (31_680, 1, 0.253)],
)
def test_the_times_of_the_gallery(bytes, period, milliseconds):
    meets = row(bytes=bytes, groups=((0, 1),), conditional=True)
    for gbits in (1.0, 100.0):
        found = audit.time([meets], gbits=gbits, step_seconds=1.0, period=period)
        seconds = found.sent / period
        assert 1e3 * gbits * seconds == pytest.approx(milliseconds, rel=4e-3)


def test_a_plan_finds_the_least_bandwidth_or_none():
    pair = row(groups=((0, 1),))
    found = audit.plan(
        {"all": Strategy([pair]), "none": Strategy([])},
        gbits=[1, 4],
        step_seconds=1.0,
        goal=0.9,
    )
    assert found.utilisation["all"] == (0.5, 0.8)
    assert found.needed["all"] == pytest.approx(9.0, rel=1e-5)
    assert found.needed["none"] == 0.0
    late = {"late": Strategy([pair])}
    slow = audit.plan(late, gbits=[1], step_seconds=1.0, latency=1.0)
    assert math.isinf(slow.needed["late"])
    assert "for 90%" in str(found).splitlines()[0] and len(str(found).split("\n")) == 3


test_numbers_out_of_range_are_refused = all_refused(globals())(r"""
once(row(), gbits=0.0)  # ValueError: gbits must be a number in \(0, inf\); got 0.0
once(row(), step_seconds=math.nan)  # ValueError: step_seconds must be
once(row(), period=0)  # ValueError: period must be
audit.time(Strategy([], 5, [], meetings=2), period=1, gbits=1, step_seconds=1.0)  # ValueError: period must be .*\[2, inf\)
once(row(), near=-1)  # ValueError: near must be
once(row(), latency=-1e-3)  # ValueError: latency must be a number in
audit.time(Strategy([], round_seconds=-1.0), gbits=1, step_seconds=1.0)  # ValueError: round_seconds must be
once(row(), overlap=1.5)  # ValueError: overlap must be .*\[0, 1\]
once(row(groups=()))  # ValueError: does not say between which devices
audit.plan({}, gbits=[1], step_seconds=1.0, goal=1.0)  # ValueError: goal must be
""")  # noqa: E501


def test_a_plan_compiles_optimizers():
    params, workers = jnp.zeros(250_000), oxs.Workers(8, "workers", mesh=True)
    diloco = oxs.diloco(optax.sgd(0.1), "workers", communication_period=25)
    found = audit.plan(
        {
            "every step": oxs.cross_shard(optax.sgd(0.1), "workers"),
            "diloco": diloco,
            "written": Strategy([row(bytes=10**6, groups=(tuple(range(8)),))]),
        },
        gbits=[0.1],
        step_seconds=0.14,
        params=params,
        workers=workers,
    )
    assert found.utilisation["every step"] == found.utilisation["written"] == (0.5,)
    assert found.utilisation["diloco"] == pytest.approx((25 / 26,))
    asked = {"gbits": 0.1, "step_seconds": 1.0, "workers": workers}
    cost = audit.time(diloco, params=lambda: params, **asked)
    assert cost.sent == pytest.approx(0.14)


def by_period(period, **options):
    return oxs.local_sgd(
        optax.sgd(1.0), "workers", communication_period=period, **options
    )


@pytest.mark.parametrize(
    ("parts", "weights"),
    [
        ({"fragments": 2}, 0),
        ({"fragments": oxs.rules.strided(2), "overlap": True}, 2),
        ({"fragments": 6, "overlap": True}, 6),
    ],
    ids=["in turns", "strided", "one a step"],
)
def test_parts_send_in_a_period_what_the_whole_sends(parts, weights):
    """With overlap the worker's weight, float32, comes along with each of them."""
    asked: dict = {"gbits": 0.1, "step_seconds": 1.0, "params": [jnp.zeros(30_000)] * 6}
    asked["workers"] = oxs.Workers(8, "workers", mesh=True)
    whole, cut = (
        audit.time(by_period(6, **more), **asked).sent for more in ({}, parts)
    )
    assert cut == pytest.approx(whole * (1 + weights / 180_000))


@pytest.mark.parametrize(
    "exchange",
    [None, oxs.exchange.quantized(bits=4)],
)
def test_what_waits_for_no_gradient_hides_behind_the_step(exchange):
    """With `overlap` a meeting's message was there when the step began."""
    asked: dict = {"gbits": 0.1, "params": [jnp.zeros(30_000)] * 4}
    asked["workers"] = oxs.Workers(8, "workers", mesh=True)
    more = {"fragments": 4, "exchange": exchange}

    def exposed(overlap, seconds):
        tx = by_period(8, overlap=overlap, **more)
        cost = audit.time(tx, step_seconds=seconds, **asked)
        return cost.exposed / cost.sent

    assert (exposed(True, 1.0), exposed(False, 1.0)) == (0.0, 1.0)
    # A step that is too short for it hides its own length, of each of four parts.
    whole = audit.time(by_period(8, overlap=True, **more), step_seconds=1.0, **asked)
    short = whole.sent / 8
    assert exposed(True, short) == pytest.approx(0.5)


SIMULATED, PARAMS = oxs.Workers(8, "workers"), jnp.zeros(3)
test_what_no_plan_is_made_of_is_refused = all_refused(globals())(r"""
audit.plan({"a": by_period(5)}, gbits=[1], step_seconds=1.0)  # TypeError: strategies\['a'\] is an optimizer, .* Pass params=
audit.time(by_period(5), gbits=1.0, step_seconds=1.0)  # TypeError: rows is an optimizer
audit.time(row(), gbits=1.0, step_seconds=1.0)  # TypeError: must be rows .* or an optimizer; got Collective
audit.strategy(by_period(5), PARAMS, SIMULATED)  # ValueError: simulated on one device send nothing
audit.strategy(by_period(lambda n: 5), PARAMS, oxs.Workers(8, "workers", mesh=True))  # ValueError: is a schedule
""")  # noqa: E501
