"""Which options of the wrappers go together: every pair is tried, and listed here.

`python -m tests.combinations` writes the page, `tests/test_combinations.py` compares
it. A pair is started and one update of it traced: it works, or a message of ours says
that it does not.
"""

import itertools
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optx_sync as oxs

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "combinations.md"
PACKAGE = Path(oxs.__file__).parent
AXIS, N = "workers", 8
PARAMS = {"w": jnp.ones((4, 2)), "v": jnp.ones(6)}
INNER = oxs.optimizers.adagrad(0.1)  # which takes row-sparse gradients
exchange = oxs.exchange


class Option(NamedTuple):
    """Something that a user may ask of a wrapper."""

    keywords: Mapping[str, Any] = MappingProxyType({})  # of the wrapper
    given: Mapping[str, Any] = MappingProxyType({})  # extra arguments of `update`
    changes: Mapping[str, Any] = MappingProxyType({})  # what else is used: `refusal`

    def names(self) -> set[str]:
        """What two options cannot both set."""
        return {*self.keywords, *self.given, *self.changes}


def rows(grads: Any) -> Any:
    """Gradients of which one is row-sparse."""
    return grads | {"w": oxs.IndexedSlices(jnp.zeros(1, jnp.int32), grads["w"][:1])}


def exchanges() -> dict[str, Option]:
    """What `exchange=` may be."""
    found = {
        "quantized()": exchange.quantized(),
        "error_feedback(quantized())": exchange.error_feedback(exchange.quantized()),
        "top_k()": exchange.top_k(),
        "power_sgd()": exchange.power_sgd(),
        "median()": exchange.median(),
        'clipped("median")': exchange.clipped("median"),
    }
    return {f"`exchange={name}`": Option({"exchange": x}) for name, x in found.items()}


def instead(wrapper: Any, **keywords: Any) -> Option:
    """Another wrapper."""
    return Option(keywords, changes={"wrapper": wrapper})


EVERY = Option({"communication_period": lambda step: 1 + step})
DROP, MEASURE = Option({"drop_nonfinite": True}), Option({"measure": True})
WEIGHTS = {"`weight=`": Option(given={"weight": jnp.float32(1)})}
SPARSE = {"row-sparse gradients": Option(changes={"grads": rows})}
INSIDE = {
    "`cross_shard` inside": Option(changes={"inner": "replicas"}),
    "`local_sgd` inside": Option(changes={"inner": "center"}),
}
CENTER = {
    "`elastic_average`": instead(oxs.elastic_average, moving_rate=0.1, rho=0.5),
    "`agn`": instead(oxs.agn),
    "`axis_name=None`": Option(changes={"axis": None}),
    "a schedule of `communication_period`": EVERY,
    '`inner_state="average"`': Option({"inner_state": "average"}),
    '`inner_state="reset"`': Option({"inner_state": "reset"}),
    "`drop_nonfinite`": DROP,
    "`measure`": MEASURE,
    "`shard_state`": Option({"shard_state": True}),
    "`fragments`": Option({"fragments": 2}),
    "`overlap`": Option({"overlap": True}),
    **exchanges(),
    **WEIGHTS,
    **SPARSE,
    **INSIDE,
}
CROSS_SHARD = {
    '`reduction="sum"`': Option({"reduction": "sum"}),
    "`group_assignment`": Option({"group_assignment": [[0, 1, 2, 3], [4, 5, 6, 7]]}),
    '`grads="summed"`': Option({"grads": "summed"}),
    '`grads="averaged"`': Option({"grads": "averaged"}),
    "`shard_state=True`": Option({"shard_state": True}),
    '`shard_state="leaves"`': Option({"shard_state": "leaves"}),
    "`measure`": MEASURE,
    **exchanges(),
    **WEIGHTS,
    **SPARSE,
}
SYNC_REPLICAS = {
    "`variable_averages`": Option({"variable_averages": 0.9}),
    "`drop_nonfinite`": DROP,
    "`measure`": MEASURE,
    **exchanges(),
    **WEIGHTS,
    "`contributes=`": Option(given={"contributes": jnp.bool_(True)}),
    **SPARSE,
}
GOSSIP = {
    "`outer`": Option({"outer": optax.sgd(0.7)}),
    "`drop_nonfinite`": DROP,
    "a schedule of `communication_period`": EVERY,
    "`graph=graphs.ring()`": Option({"graph": oxs.graphs.ring()}),
    "`graph=graphs.exponential()`": Option({"graph": oxs.graphs.exponential()}),
    "`graph=graphs.random_pairs()`": Option({"graph": oxs.graphs.random_pairs()}),
    "`graph=graphs.grid(2)`": Option({"graph": oxs.graphs.grid(2)}),
    **WEIGHTS,
    **SPARSE,
    **INSIDE,
}
WRAPPERS: dict[str, tuple[Any, dict[str, Any], dict[str, Option]]] = {
    "Center rules": (oxs.diloco, {"communication_period": 2}, CENTER),
    "cross_shard": (oxs.cross_shard, {}, CROSS_SHARD),
    "sync_replicas": (oxs.sync_replicas, {"replicas_to_aggregate": N}, SYNC_REPLICAS),
    "gossip": (oxs.gossip, {}, GOSSIP),
}


def refusal(build: Any, keywords: dict[str, Any], options: list[Option]) -> str | None:
    """What is said to a wrapper with these options, `None` where it works.

    Raises:
        AssertionError: It fails, and not by a message of this package.
    """
    given: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for option in options:
        keywords = {**keywords, **option.keywords}
        given.update(option.given)
        changes.update(option.changes)
    build, axis = changes.get("wrapper", build), changes.get("axis", AXIS)
    inside = {
        "replicas": lambda: oxs.cross_shard(INNER, "inside"),
        "center": lambda: oxs.local_sgd(INNER, "inside", communication_period=1),
    }

    def update(own):
        tx = build(inner, axis, **keywords)
        grads = jax.tree.map(lambda x: x * own, PARAMS)
        grads = changes.get("grads", dict)(grads)
        tx.update(grads, tx.init(PARAMS), PARAMS, **given)

    try:
        inner = inside.get(changes.get("inner", ""), lambda: INNER)()
        jax.make_jaxpr(update, axis_env=[(AXIS, N), ("inside", 2)])(jnp.ones(()))
    except (ValueError, TypeError, NotImplementedError) as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        assert Path(place.filename).is_relative_to(PACKAGE), traceback.format_exc()
        return str(error).split("\n")[0]
    return None


def refused(title: str) -> Iterator[tuple[str, str, str]]:
    """(an option, another one, what is said), of each pair that does not work."""
    build, keywords, options = WRAPPERS[title]
    alone = {one: refusal(build, keywords, [x]) for one, x in options.items()}
    yield from ((one, "anything", said) for one, said in alone.items() if said)
    options = {one: x for one, x in options.items() if not alone[one]}
    for (one, first), (other, second) in itertools.combinations(options.items(), 2):
        if not first.names() & second.names():
            said = refusal(build, keywords, [first, second])
            if said is not None:
                yield one, other, said


def listed(names: list[str]) -> str:
    """Options of a cell, of which all exchanges have one name."""
    every = list(exchanges())
    if set(every) <= set(names):
        names = [name for name in names if name not in every] + ["each `exchange=`"]
    return ", ".join(names)


def section(title: str) -> str:
    """The table of a wrapper: a row for each message, with all who are told it."""
    others: dict[tuple[str, str], list[str]] = {}
    for one, other, said in refused(title):
        others.setdefault((one, said.split(". ")[0].rstrip(".")), []).append(other)
    rows: dict[tuple[str, str], list[str]] = {}
    for (one, said), found in others.items():
        rows.setdefault((listed(found), said), []).append(one)
    lines = [
        f"| {listed(ones)} | {found} | {said.replace('|', chr(92) + '|')}. |"
        for (found, said), ones in rows.items()
    ]
    name = title if title[0].isupper() else f"`{title}`"
    options = ", ".join(WRAPPERS[title][2])
    head = ["| option | with | what is said |", "|---|---|---|"] if lines else []
    return "\n".join([f"## {name}", "", f"Tried: {options}.", "", *head, *lines, ""])


def page() -> str:
    """The page."""
    return "\n".join([HEAD, *map(section, WRAPPERS)])


HEAD = """# What cannot be combined

Which options of the center rules (`diloco`, `local_sgd`, `elastic_average`, `agn`), of
`cross_shard`, `sync_replicas` and `gossip` refuse each other. Every pair is tried in a
test, which writes this page: what is not in a table works. "Each `exchange=`" is all
those under "Tried". Of a message the first sentence is shown; it goes on with what to
do. Other wrong calls: [messages](messages.md).
"""


if __name__ == "__main__":
    PAGE.write_text(page())
