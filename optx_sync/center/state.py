# SPDX-License-Identifier: Apache-2.0
"""The state of a center rule: its fields, and the metrics read from it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optx_sync.core.shapes import Array, Float, Int32
from optx_sync.core.trees import Tree, first_worker, is_masked
from optx_sync.exchange.measures import square_sum
from optx_sync.state import fields
from optx_sync.state.metrics import SharedInfo, or_none


class CenterMetrics(NamedTuple):
    """Metrics of a center rule, `oxs.metrics`: a worker's own, nothing is sent.

    The shapes are for one worker; in a stacked state, what is a worker's own has the
    worker axis in front, [N]. With `overlap` a round counts from the step in which it
    is due, one step before the workers meet.

    From `distance_before_round` to `contributors` all is of the last round, and `None`
    without `measure=True`; but for the distance it is equal on all workers.

    Attributes:
        rounds: int32[], rounds so far, including those without this worker.
        steps_since_round: int32[], steps since the last round; 0 after the step in
            which the workers met.
        dropped: int32[], rounds that left this worker out; 0 without `drop_nonfinite`.
        distance: float32[], |x - c| after the step, the norm over all leaves together;
            `None` where `metrics` was not given the parameters.
        distance_before_round: float32[], |x - c| before the exchange, of the fragment
            that met.
        contribution_norm: float32[], the root of the mean square of the contributions'
            norms, before any division by N.
        agreement: float32[], the mean cosine of two contributions; `None` also where
            the exchange does not give the exact mean.
        update_norm: float32[], how far the center moved.
        contributors: float32[], workers that were not left out.
        outliers: int32[], with a robust exchange: rounds in which this worker's
            contribution lay far from the others' (see `optx_sync.exchange.robust`);
            otherwise `None`.
        last_fragment: int32[], the last fragment to meet, -1 before the first; `None`
            with a single fragment.
        fragment_ages: int32[P], steps since each fragment met; `None` with a single
            one.
    """

    rounds: Int32[Array, ""]
    steps_since_round: Int32[Array, ""]
    dropped: Int32[Array, ""]
    distance: Float[Array, ""] | None
    distance_before_round: Float[Array, ""] | None
    contribution_norm: Float[Array, ""] | None
    agreement: Float[Array, ""] | None
    update_norm: Float[Array, ""] | None
    contributors: Float[Array, ""] | None
    outliers: Int32[Array, ""] | None
    last_fragment: Int32[Array, ""] | None
    fragment_ages: Int32[Array, " parts"] | None


class Facts(NamedTuple):
    """How a center rule's state was made: what its fields mean depends on it."""

    sums: fields.Fact  # contributions are summed, and what exchanges remember, too
    takes: fields.Fact  # workers go a part of the way to the center
    # One worker with a center of its own, `axis_name=None`, which lies where the
    # parameters lie: on each of the replicas around or inside of it.
    alone: fields.Fact


# What is read of a `Measured`.
_MEASURED = "contribution_norm", "agreement", "update_norm", "contributors"

# How nothing is lost where the number of workers changes.
_AFTER_A_ROUND = "Resize after one, when oxs.metrics(state).steps_since_round is 0."
_UNDER_WAY = (
    "With fragments or overlap this is so after every step: accept the loss (leave "
    "strict out), or go on with as many workers."
)


def _has_parts(state: "CenterState") -> bool:
    return not isinstance(state.ages, tuple)


def _is_under_way(state: "CenterState") -> bool:
    """Whether some parameters are between two rounds after every step."""
    return _has_parts(state) or not isinstance(state.waits, tuple)


def _kinds_of(state: "CenterState") -> dict[str, fields.FieldKind]:
    """The kind of each field but `how`."""
    how, under_way = state.how, _is_under_way(state)
    keeps = how.takes or under_way  # workers keep their parameters
    return {
        "local_step": fields.COUNTER,
        "steps_since_round": fields.COUNTER,
        "global_step": fields.COUNTER,
        "ages": fields.COUNTER,
        "waits": fields.COUNTER,
        "weight": fields.OWN.not_a_slot,
        "center": fields.CENTER if keeps else fields.TAKEN_CENTER,
        "taken": fields.SHARED,
        "outer": fields.SHARED,
        "accumulated": fields.OWN_SUM if under_way else fields.ANEW,
        "broken": fields.ANEW,
        "exchange": fields.OF_SUMS if how.sums else fields.OWN,
        "info": fields.INFO,
        "inner": fields.OWN,
    }


def _kind_of(name: str, state: "CenterState") -> fields.FieldKind:
    """The kind of a field of workers, which for one alone is as its parameters are."""
    kind = _kinds_of(state)[name]
    return kind.like_params if state.how.alone else kind


@fields.WithCenter.register
@fields.WithLosses.register
@fields.WithMetrics.register
class CenterState(NamedTuple):
    """State of `center_variable`.

    The shapes are for one worker, with P fragments.

    Attributes:
        local_step: int32[], steps of a worker so far.
        steps_since_round: int32[], steps since the last round.
        global_step: int32[], rounds so far; with `overlap` the one that waits counts,
            too.
        ages: int32[P], steps since each fragment met; () with a single fragment.
        waits: int32[], with `overlap`: the number of steps behind what workers
            contribute in the next step, 0 where that is nothing. Otherwise ().
        weight: float32[], with `overlap`: how much this worker's contribution in the
            next step counts. Otherwise ().
        center: c, a tree like the parameters; float32 for half precision, unless
            `accumulator_dtype` says otherwise.
        taken: The center before the last round, or () where no formula reads it.
        outer: State of the rule's outer transformation, or (); with more than one
            fragment a tuple, one for each. With `shard_state` an `InPieces`.
        accumulated: What the worker summed up since the last round, a tree like the
            center; or ().
        broken: bool[], with `drop_nonfinite`: whether this worker met a NaN or infinity
            since the last round. Otherwise ().
        exchange: What the exchange remembers; with more than one fragment a tuple, one
            for each. () if it remembers nothing.
        info: What is measured and counted for `oxs.metrics`; no step needs it.
        inner: State of the worker's own optimizer.
        how: How the state was made; it has no arrays.
    """

    local_step: Int32[Array, ""]
    steps_since_round: Int32[Array, ""]
    global_step: Int32[Array, ""]
    ages: Any
    waits: Any
    weight: Any
    center: Tree
    taken: Tree
    outer: optax.OptState
    accumulated: Tree
    broken: Any
    exchange: Tree
    info: SharedInfo
    inner: optax.OptState
    how: Facts

    def center_params(self, params: Tree) -> Tree:
        """The center in the structure and dtypes of `params`: `oxs.center_params`."""
        center: Tree = self.center
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
        rounds, steps = map(_of_first, (self.global_step, self.local_step))
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

            distance = norm_of(
                jax.tree.map(apart, self.center, params, is_leaf=is_masked), stacked
            )
        last = ages = None
        if _has_parts(self):
            ages = self.ages
            last = jnp.where(
                self.global_step > 0, (self.global_step - 1) % ages.shape[-1], -1
            )
        measured = self.info.measured
        return CenterMetrics(
            rounds=self.global_step,
            steps_since_round=self.steps_since_round,
            dropped=self.info.dropped,
            distance=distance,
            distance_before_round=or_none(self.info.distance),
            outliers=or_none(self.info.outliers),
            last_fragment=last,
            fragment_ages=ages,
            **{name: or_none(getattr(measured, name, ())) for name in _MEASURED},
        )

    def lost_by_resize(self, fewer: bool) -> list[tuple[str, str]]:
        """(what another number of workers loses inside of a round, how not to)."""
        if self.how.alone:
            return []  # Other workers are none of its own.
        steps = _of_first(self.steps_since_round)
        if steps and fields.holds_center(self.inner):
            raise ValueError(
                "There is a center rule inside of this one, and workers are not at "
                f"its center: {steps} step(s) since the last round. Resize right after "
                "a round of the outer rule."
            )
        lost = []
        state: Any = self  # whose class has a table of fields
        learned = fields.kind_of(state, "center").lands == "everyone"
        if _is_under_way(self):
            if fewer:
                what = "what leaving workers have learned since their parts met"
                lost.append((what, _UNDER_WAY))
        elif steps and (learned or jax.tree.leaves(self.accumulated)):
            what = "have learned" if learned else "accumulated"
            what = f"what workers {what} in {steps} step(s) since their last round"
            lost.append((what, _AFTER_A_ROUND))
        return lost


fields.declare(
    how=fields.COUNTER,
    **{
        name: functools.partial(_kind_of, name)
        for name in CenterState._fields
        if name != "how"
    },
)(CenterState)


@jax.jit
def _first(x: jax.Array) -> jax.Array:
    return jnp.ravel(x)[0]


def _of_first(counter: jax.Array) -> int:
    """The first worker's counter; `jax.transfer_guard` lets it be read."""
    return int(jax.device_get(_first(counter)))


def norm_of(tree: Tree, stacked: int = 0, like: Tree = None) -> jax.Array:
    """float32, the norm over all leaves, one for each place along the worker axes."""
    return jnp.sqrt(square_sum(tree, like, stacked))
