"""Seconds on links: by hand, against the gallery, and against published bandwidths."""

import math

import pytest

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
    ("kind", "groups", "seconds"),
    [
        ("all-reduce", FOUR, 1.5),
        ("all-reduce", ((0, 1), (2, 3)), 1.0),
        ("reduce-scatter", FOUR, 0.75),
        ("all-to-all", FOUR, 0.75),
        ("ragged-all-to-all", FOUR, 0.75),
        ("all-gather", FOUR, 3.0),
        ("collective-broadcast", FOUR, 1.0),
        ("collective-permute", PAIRS, 1.0),
        ("send", (), 1.0),
    ],
)
def test_each_kind_takes_what_a_ring_sends(kind, groups, seconds):
    found = once(row(kind, groups=groups), latency=0.25)
    assert found == pytest.approx(
        (seconds + 0.25, seconds + 0.25, 10 / (10.25 + seconds))
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
once(row(), near=-1)  # ValueError: near must be
once(row(), latency=-1e-3)  # ValueError: latency must be a number in
once(row(), overlap=1.5)  # ValueError: overlap must be .*\[0, 1\]
once(row(groups=()))  # ValueError: does not say between which devices
audit.plan({}, gbits=[1], step_seconds=1.0, goal=1.0)  # ValueError: goal must be
""")
