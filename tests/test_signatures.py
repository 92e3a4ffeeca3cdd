"""What `help` shows of arguments: the names of types that a program has for them."""

import inspect
import re
import typing

import optax

import optx_sync as oxs

ROOMS = "by_hand exchange flax optimizers outer rules runtime simulate testing".split()


def test_signatures_name_what_is_public():
    seen = 0
    for room in [oxs, *(getattr(oxs, name) for name in ROOMS)]:
        for name in dir(room):
            thing = getattr(room, name)
            if not str(getattr(thing, "__module__", "")).startswith("optx_sync"):
                continue
            if not isinstance(thing, type) or not issubclass(thing, BaseException):
                seen += 1
                shown = str(inspect.signature(thing))
                assert not re.search(r"\._|\boptx_sync|ForwardRef", shown), shown
    assert seen > 100
    shown = str(inspect.signature(oxs.diloco))
    assert "communication_period: int | optax.Schedule = 500" in shown
    assert len(shown) < 800


def test_hints_are_those_of_the_source():
    hints = typing.get_type_hints(oxs.optimizers.adam)
    assert hints["learning_rate"] == optax.ScalarOrSchedule
