# SPDX-License-Identifier: Apache-2.0
"""The state of a center rule: its fields, and the metrics read from it."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.center.buffers import Outgoing
from optx_sync.exchange.measures import square_sum
from optx_sync.metrics import SharedInfo, told
from optx_sync.placement import fields, memory
from optx_sync.shapes import Array, Float, Int32
from optx_sync.trees import Tree, first_worker, is_masked, is_nothing


class CenterMetrics(NamedTuple):
    """Metrics of a center rule, `oxs.metrics`: a worker's own, nothing is sent.

    The shapes are for one worker; in a stacked state, what is a worker's own has the
    worker axis in front, [N].
    """

    rounds: Int32[Array, ""]  # so far, including those without this worker
    steps_since_round: Int32[Array, ""]  # 0 after the step in which the workers met
    # rounds that left this worker out; 0 without `drop_nonfinite`
    dropped: Int32[Array, ""]
    # |x - c| after the step, the norm over all leaves together; None where `metrics`
    # was not given the parameters
    distance: Float[Array, ""] | None
    # Of the last round, with `measure=True`; otherwise None. All but the distance are
    # equal on all workers.
    distance_before_round: Float[Array, ""] | None  # |x - c| before the exchange
    contribution_norm: Float[Array, ""] | None  # root of the mean square, undivided
    agreement: Float[Array, ""] | None  # the mean cosine of two contributions
    update_norm: Float[Array, ""] | None  # how far the center moved
    contributors: Float[Array, ""] | None  # workers that were not left out
    # With a robust exchange, the rounds in which its contribution lay far from the
    # others' (see `optx_sync.exchange.robust`); otherwise None.
    outliers: Int32[Array, ""] | None
    # With more than one fragment; otherwise None.
    last_fragment: Int32[Array, ""] | None  # the last one to meet; -1 before the first
    fragment_ages: Int32[Array, " parts"] | None  # steps since each one met


class How(NamedTuple):
    """How a center rule's state was made: what its fields mean depends on it."""

    sums: fields.Fact  # contributions are summed, and what exchanges remember, too
    takes: fields.Fact  # workers go a part of the way to the center
    on_host: fields.Fact  # center and outer state live in host memory
    # One worker with a center of its own, `axis_name=None`, which lies where the
    # parameters lie: on each of the replicas around or inside of it.
    alone: fields.Fact


def _has_parts(state: "CenterState") -> bool:
    return not isinstance(state.ages, tuple)


def _is_decoded(state: "CenterState") -> bool:
    """Whether workers hold the decoded center, and owners the exact pieces."""
    return fields.lies_in_pieces(state.center) and not is_nothing(state.taken)


def _kind_of_center(state: "CenterState") -> fields.Kind:
    kind = fields.TAKEN_CENTER
    if _is_decoded(state):
        kind = fields.SHARED
    elif state.how.takes or _has_parts(state):
        # Most parts are between two rounds, so workers keep their parameters.
        kind = fields.CENTER
    return kind.on_host if state.how.on_host else kind


def _kind_of_taken(state: "CenterState") -> fields.Kind:
    return fields.TAKEN_CENTER if _is_decoded(state) else fields.SHARED


def _kind_of_outer(state: "CenterState") -> fields.Kind:
    return fields.SHARED.on_host if state.how.on_host else fields.SHARED


def _kind_of_pending(state: "CenterState") -> fields.Kind:
    return (fields.ANEW if isinstance(state.pending, Outgoing) else fields.SHARED).told


def _kind_of_accumulated(state: "CenterState") -> fields.Kind:
    return fields.OWN_SUM if _has_parts(state) else fields.ANEW


def _kind_of_memory(state: "CenterState") -> fields.Kind:
    return fields.OF_SUMS if state.how.sums else fields.OWN


def _or_like_params(
    kind: fields.Kind | Callable[["CenterState"], fields.Kind],
) -> Callable[["CenterState"], fields.Kind]:
    """The kind of a field of workers, which for one alone is as its parameters are."""

    def of(state):
        found = kind if isinstance(kind, fields.Kind) else kind(state)
        return found.like_params if state.how.alone else found

    return of


_KINDS = {
    "local_step": fields.COUNTER,
    "steps_since_round": fields.COUNTER,
    "global_step": fields.COUNTER,
    "ages": fields.COUNTER,
    "center": _kind_of_center,
    "taken": _kind_of_taken,
    "outer": _kind_of_outer,
    "pending": _kind_of_pending,
    "accumulated": _kind_of_accumulated,
    "broken": fields.ANEW,
    "exchange": _kind_of_memory,
    "info": fields.INFO,
    "inner": fields.OWN,
}


@fields.declare(
    how=fields.FACT, **{name: _or_like_params(kind) for name, kind in _KINDS.items()}
)
class CenterState(NamedTuple):
    """State of `center_variable`."""

    local_step: Int32[Array, ""]  # steps of a worker
    steps_since_round: Int32[Array, ""]
    global_step: Int32[Array, ""]  # rounds
    ages: Any  # int32[P], steps since each fragment met; () with a single fragment
    # Like the parameters, float32 for half precision; `InPieces` with `shard_center`.
    center: Tree
    # The center before the last round, or () where no formula reads it; with coded
    # pieces, the whole center as the workers have decoded it.
    taken: Tree
    # State of the rule's outer transformation, or (); a tuple, one for each fragment.
    outer: optax.OptState
    pending: Any  # with `delay`, what is on its way: `Pending` or `Outgoing`; or ()
    accumulated: Tree  # what the worker summed up since the last round, or ()
    broken: Any  # bool[], whether it met a NaN or infinity since the last round, or ()
    exchange: Tree  # what the exchange remembers, for each fragment, or ()
    info: SharedInfo
    inner: optax.OptState
    how: How

    def center_params(self, params: Tree, of_all: bool | None = None) -> Tree:
        """The center in the structure and dtypes of `params`: `oxs.center_params`.

        `of_all` says whether they are all workers', where the caller knows.
        """
        center: Tree = memory.on_device(self.center)
        if fields.lies_in_pieces(center):
            center = whole_center(center, params, of_all)
        else:
            for _ in range(jnp.ndim(self.local_step)):  # All workers hold the same one.
                center = jax.tree.map(first_worker, center)
        return jax.tree.map(
            lambda c, p: p if is_masked(c) else jnp.array(c, p.dtype, copy=True),
            center,
            params,
            is_leaf=is_masked,
        )

    def is_older_than_training(self) -> bool:
        """Whether steps were made, and any part of the center has never met."""
        parts = self.ages.shape[-1] if _has_parts(self) else 1
        rounds, steps = (
            int(jnp.ravel(x)[0]) for x in (self.global_step, self.local_step)
        )
        return steps > 0 and rounds < parts

    def metrics(self, params: Tree | None) -> CenterMetrics:
        """A worker's counters, and with `params` its distance from the center."""
        distance = None
        if params is not None:
            stacked = jnp.ndim(self.info.dropped)  # worker axes in front

            def apart(c, p):
                if is_masked(c):
                    return c
                # A center that is one for all workers lacks the worker axes.
                c = jnp.expand_dims(c, range(p.ndim - c.ndim))
                return p.astype(c.dtype) - c

            center: Tree = memory.on_device(self.center)
            if fields.lies_in_pieces(center):
                center = _whole_of_levels(center, params, stacked)
            distance = norm_of(
                jax.tree.map(apart, center, params, is_leaf=is_masked), stacked
            )
        names = "contribution_norm", "agreement", "update_norm", "contributors"
        found = {name: getattr(self.info.measured, name, ()) for name in names}
        found |= {
            "distance_before_round": self.info.distance,
            "outliers": self.info.outliers,
        }
        last = ages = None
        if _has_parts(self):
            ages = self.ages
            last = jnp.where(
                self.global_step > 0, (self.global_step - 1) % ages.shape[-1], -1
            )
        return CenterMetrics(
            self.global_step,
            self.steps_since_round,
            self.info.dropped,
            distance,
            last_fragment=last,
            fragment_ages=ages,
            **{name: told(x) for name, x in found.items()},
        )

    def lost_by_resize(self, fewer: bool) -> list[str]:
        """What a change of the number of workers loses in the middle of a round."""
        if self.how.alone:
            return []  # Other workers are none of its own.
        steps = int(jnp.ravel(self.steps_since_round)[0])
        if steps and fields.holds_center(self.inner):
            raise ValueError(
                "There is a center rule inside of this one, and workers are not at "
                f"its center: {steps} step(s) since the last round. Resize right after "
                "a round of the outer rule."
            )
        lost = []
        state: Any = self  # the decorator has given its class a table of fields
        learned = fields.kind_of(state, "center").lands == "everyone"
        if _has_parts(self):
            if fewer:
                lost += ["what leaving workers have learned since their parts met"]
        elif steps and (learned or jax.tree.leaves(self.accumulated)):
            what = "have learned" if learned else "accumulated"
            lost += [f"what workers {what} in {steps} step(s) since their last round"]
        if isinstance(self.pending, Outgoing):
            lost += ["what workers contributed to the sum of the next step"]
        return lost


def norm_of(tree: Tree, stacked: int = 0, like: Tree = None) -> jax.Array:
    """float32, the norm over all leaves, one for each place along the worker axes."""
    return jnp.sqrt(square_sum(tree, like, stacked))


def _whole_of_levels(center: Tree, params: Tree, stacked: int) -> Tree:
    """The whole center, with so many worker axes in front of the parameters.

    Without its own level, which is the first: each place inside has its own center.
    """
    if not stacked:
        return whole_center(center, params, None)
    whole = functools.partial(whole_center, of_all=True)
    for _ in range(stacked - 1):
        whole = jax.vmap(whole)

    def last(x):
        # (A number that is not cut lies along the inner levels alone.)
        return jnp.moveaxis(x, 0, stacked - 1) if x.ndim >= stacked else x

    return whole(*jax.tree.map(last, (center, params)))


def whole_center(center: Tree, params: Tree, of_all: bool | None) -> Tree:
    """The whole center, from the pieces of all workers or as `init` makes it.

    `params` are those of one worker, or of all workers with a worker axis in front.
    """
    if isinstance(center, fields.InParts):
        return center.whole()
    pairs = [
        (c, p)
        for c, p in zip(
            jax.tree.leaves(center.tree, is_leaf=is_masked),
            jax.tree.leaves(params, is_leaf=is_masked),
            strict=True,
        )
        if not is_masked(c)
    ]
    workers = max((c.shape[0] for c, _ in pairs if c.ndim > 1), default=0)

    def fits(shape, c):
        size = math.prod(shape)
        return c.size == size or (c.ndim > 1 and c.shape[1] == -(-size // workers))

    def may_have(axes):
        counts = {p.shape[:axes] for _, p in pairs if p.ndim >= axes}
        same = len(counts) <= 1 and (not axes or not workers or counts == {(workers,)})
        return same and all(
            p.ndim >= axes and fits(p.shape[axes:], c) for c, p in pairs
        )

    known = ((1, 0) if workers else (0, 1)) if of_all is None else (int(of_all),)
    found = [axes for axes in known if may_have(axes)]
    if not found:
        raise ValueError(fields.ONE_PIECE)
    if workers > 1 and len(found) > 1:
        raise ValueError(
            "The parameters' shapes do not tell whether they are one worker's or all"
            f" {workers} workers'. Pass oxs.by_hand.first(params) if they are all"
            f" workers', and oxs.by_hand.replicate(params, {workers}) if they are"
            " one's; or take the center by oxs.Workers."
        )

    def join(c, p):
        if is_masked(c):
            return c
        shape = p.shape[found[0] :]
        return c.reshape(-1)[: math.prod(shape)].reshape(shape)

    return jax.tree.map(join, center.tree, params, is_leaf=is_masked)
