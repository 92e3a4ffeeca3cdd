"""Every name of the originals has its row on the pages for who comes from them."""

import inspect
import json
import pathlib
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optx_sync as oxs

ROOT = pathlib.Path(__file__).parent.parent
PAGES = "migrate-tensorflow reference/from-wrappers reference/from-optimizers"
TEXT = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES.split())

BASE = "use_locking name"
FORWARDED = "get_slot get_slot_names variables"
STEP = "compute_gradients apply_gradients minimize global_step"
ADAM = f"learning_rate beta1 beta2 epsilon {BASE}"
# Of the originals, TensorFlow 1.15 (Ftrl's beta: 2.x) and RETURNN: arguments of the
# constructor, public methods and their arguments, constants, names of variables.
ORIGINALS = {
    "Optimizer": (
        "minimize compute_gradients apply_gradients loss var_list grads_and_vars "
        "global_step gate_gradients GATE_NONE GATE_OP GATE_GRAPH aggregation_method "
        "colocate_gradients_with_ops grad_loss get_name learning_rate "
        f"tf.IndexedSlices tf.gather {FORWARDED} {BASE}"
    ),
    "SyncReplicasOptimizer": (
        "opt replicas_to_aggregate total_num_replicas variable_averages "
        "variables_to_average get_init_tokens_op num_tokens get_chief_queue_runner "
        "make_session_run_hook is_chief chief_init_op local_step_init_op "
        "ready_for_local_init_op sync_token_q sync_rep_local_step grad_accum "
        f"{STEP} {FORWARDED} {BASE}"
    ),
    "CrossShardOptimizer": (
        "opt reduction name group_assignment number_of_shards cross_replica_sum "
        f"{STEP} {FORWARDED}"
    ),
    "ElasticAverageOptimizer": (
        "opt num_worker ea_custom_getter communication_period moving_rate rho BETA "
        "synchronous local_step get_init_op task_index make_session_run_hook is_chief "
        f"swapping_saver var_list {STEP} {FORWARDED} {BASE}"
    ),
    "ElasticAverageCustomGetter": (
        "ElasticAverageCustomGetter worker_device __call__ global_center_variable "
        "local_center_variable"
    ),
    "AGNOptimizer": (
        "optimizer num_worker custom_getter communication_period local_step "
        "get_init_op task_index make_session_run_hook is_chief "
        f"{STEP} {FORWARDED} {BASE}"
    ),
    "AGNCustomGetter": (
        "AGNCustomGetter worker_device __call__ global_center_variable grad_variable"
    ),
    "GradientDescentOptimizer": f"learning_rate {BASE}",
    "MomentumOptimizer": f"learning_rate momentum use_nesterov {BASE}",
    "AdagradOptimizer": f"learning_rate initial_accumulator_value {BASE}",
    "AdagradDAOptimizer": (
        "learning_rate global_step initial_gradient_squared_accumulator_value "
        f"l1_regularization_strength l2_regularization_strength {BASE}"
    ),
    "AdadeltaOptimizer": f"learning_rate rho epsilon {BASE}",
    "AdamOptimizer": f"beta1_power beta2_power {ADAM}",
    "FtrlOptimizer": (
        "learning_rate learning_rate_power initial_accumulator_value "
        "l1_regularization_strength l2_regularization_strength accum_name linear_name "
        f"l2_shrinkage_regularization_strength beta {BASE}"
    ),
    "ProximalGradientDescentOptimizer": (
        f"learning_rate l1_regularization_strength l2_regularization_strength {BASE}"
    ),
    "ProximalAdagradOptimizer": (
        "learning_rate initial_accumulator_value l1_regularization_strength "
        f"l2_regularization_strength {BASE}"
    ),
    "RMSPropOptimizer": f"learning_rate decay momentum epsilon centered {BASE}",
    "NadamOptimizer": ADAM,
    "LazyAdamOptimizer": ADAM,
    "BaseCustomOptimizer": (
        f"_apply _gather _assign _assign_add _assign_sub learning_rate {BASE}"
    ),
    "CustomGradientDescentOptimizer": f"learning_rate {BASE}",
    "NormalizedSGD": f"learning_rate {BASE}",
    "NeuralOptimizer1": f"learning_rate beta1 decrease_factor {BASE}",
    "GradVarianceScaledOptimizer": ADAM,
    "CustomAdamOptimizer": ADAM,
    "AMSGradOptimizer": "learning_rate decay beta1 beta2 epsilon var_list",
    "KerasOptimizerWrapper": "get_factory optimizer name",
}
# What stands around an optimizer: how many of TensorFlow's and RETURNN's own names have
# a row, so that none goes unseen.
NAMES = {
    "tf.train": 154,
    "tf.estimator": 42,
    "tf.distribute": 32,
    "tf.contrib.opt": 27,
    "A RETURNN config": 37,
}
# Where else an original's names have their rows: what it inherits, or shares.
ELSEWHERE = {
    "SyncReplicasOptimizer": ("Optimizer",),
    "CrossShardOptimizer": ("Optimizer",),
    "ElasticAverageOptimizer": ("Optimizer",),
    "AGNOptimizer": ("ElasticAverageOptimizer", "Optimizer"),
    "AGNCustomGetter": ("ElasticAverageCustomGetter",),
    "BaseCustomOptimizer": ("Arguments",),
    "KerasOptimizerWrapper": ("Arguments",),
}
CATALOGUE = ("tf.train optimizers", "tf.contrib.opt optimizers", "RETURNN optimizers")
# How the originals behaved where it differs, each with a row of its own.
BEHAVIOURS = {
    "Optimizer": ("a slot that is absent", "gradient `None`", "nothing to apply"),
    "SyncReplicasOptimizer": ("no global step", "two in one state"),
    "ElasticAverageOptimizer": ("no variable has a gradient",),
    "AMSGradOptimizer": ("rows", "a variable that it does not know", "`minimize`"),
}


def _names(cell):
    return re.findall(r"`([^`]+)`", cell)


def _rows():
    """Of each section: the first column's names -> what stands beside them."""
    sections = {}
    for part in re.split(r"^##+ ", TEXT, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = sections.setdefault(title.strip(), {})
        for original, write in re.findall(
            r"^\| (.+?) \| (.*) \|$", body, flags=re.MULTILINE
        ):
            for name in _names(original):
                assert name not in rows, (title, name)
                rows[name] = write
    return sections


ROWS = _rows()


def test_every_name_has_its_row():
    catalogue = {name for section in CATALOGUE for name in ROWS[section]}
    for original, names in ORIGINALS.items():
        sections = (original, *ELSEWHERE.get(original, ()))
        rows = {name for section in sections for name in ROWS.get(section, ())}
        assert original in catalogue or not set(names.split()) - rows, original
    assert catalogue <= ORIGINALS.keys()
    for section, number in NAMES.items():
        assert len(ROWS[section]) == number, section
    assert all(all(rows.values()) for rows in ROWS.values())


def test_every_behaviour_has_its_row():
    for original, behaviours in BEHAVIOURS.items():
        section = re.split(rf"^##+ {original}$", TEXT, flags=re.MULTILINE)
        for behaviour in behaviours:
            assert f"\n| {behaviour}" in re.split("\n##", section[1])[0], behaviour


def test_every_recorded_refusal_of_the_originals_has_its_row():
    rows = ROWS["What the originals refuse"]
    seen = set()
    for record in sorted((ROOT / "tests" / "golden").glob("errors_*.json")):
        for probe in json.loads(record.read_text())["probes"]:
            if not probe["accepted"]:
                found = {row for row in rows if row in probe["message"]}
                assert found, probe
                seen |= found
    assert seen == rows.keys()


def test_every_name_here_exists():
    names = set(re.findall(r"\boxs(?:\.[A-Za-z_][A-Za-z_0-9]*)+", TEXT))
    assert len(names) > 35
    for name in names | {"optx_sync.flax.SyncTrainState"}:
        pkgutil.resolve_name(name.replace("oxs.", "optx_sync.", 1))


def test_every_argument_of_the_catalogue_exists():
    section = re.split("^## Arguments$", TEXT, flags=re.MULTILINE)[1].split("\n##")[0]
    renamed = {}
    for original, here in re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE):
        nothing = "*nothing*" in here or "state." in here
        ours = [None] * 9 if nothing else _names(here)
        renamed |= dict(zip(_names(original), ours, strict=nothing is False))
    seen = 0
    for original, write in (row for name in CATALOGUE for row in ROWS[name].items()):
        call = re.match(r"`(\w+)\(", write)
        ours = inspect.signature(getattr(oxs.optimizers, call[1])).parameters
        given = {renamed.get(name, name) for name in ORIGINALS[original].split()}
        assert given - {None} == set(ours), original
        seen += 1
    assert seen > 15


def test_a_clip_between_the_two_calls():
    # The original clips gradients that the loss has scaled by 1 / N.
    grads = jnp.array([[3.0, 4.0], [0.3, 0.4], [-6.0, 8.0], [0.0, 1.0]])
    tx = optax.chain(
        optax.clip_by_global_norm(1.0 * 4), oxs.cross_shard(optax.sgd(1.0), "data")
    )

    def update(grad):
        return tx.update(grad, tx.init(jnp.zeros(2)))[0]

    updates = jax.vmap(update, axis_name="data")(grads)
    scaled = np.asarray(grads) / 4
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    wanted = -(scaled / np.maximum(norms, 1.0)).sum(0)
    np.testing.assert_allclose(updates, np.tile(wanted, (4, 1)), rtol=1e-6)
