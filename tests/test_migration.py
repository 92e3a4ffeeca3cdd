"""Every name of the originals has its row on the migration page."""

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

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "migration.md"

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
    # What stands around an optimizer: all public names of TensorFlow's modules, the
    # arguments of what starts a session, saves and places, and RETURNN's options that
    # its updater and Horovod read.
    "tf.train": (
        "AdadeltaOptimizer AdagradDAOptimizer AdagradOptimizer AdamOptimizer BytesList "
        "Checkpoint CheckpointManager CheckpointSaverHook CheckpointSaverListener "
        "ChiefSessionCreator ClusterDef ClusterSpec Coordinator Example "
        "ExponentialMovingAverage Feature FeatureList FeatureLists Features FeedFnHook "
        "FinalOpsHook FloatList FtrlOptimizer GlobalStepWaiterHook "
        "GradientDescentOptimizer Int64List JobDef LoggingTensorHook LooperThread "
        "MomentumOptimizer MonitoredSession MonitoredTrainingSession "
        "NanLossDuringTrainingError NanTensorHook NewCheckpointReader Optimizer "
        "ProfilerHook ProximalAdagradOptimizer ProximalGradientDescentOptimizer "
        "QueueRunner RMSPropOptimizer Saver SaverDef Scaffold SecondOrStepTimer "
        "SequenceExample Server ServerDef SessionCreator SessionManager SessionRunArgs "
        "SessionRunContext SessionRunHook SessionRunValues SingularMonitoredSession "
        "StepCounterHook StopAtStepHook SummarySaverHook Supervisor "
        "SyncReplicasOptimizer VocabInfo WorkerSessionCreator add_queue_runner "
        "assert_global_step basic_train_loop batch batch_join checkpoint_exists "
        "cosine_decay cosine_decay_restarts create_global_step "
        "do_quantize_training_on_graphdef exponential_decay export_meta_graph "
        "generate_checkpoint_state_proto get_checkpoint_mtimes get_checkpoint_state "
        "get_global_step get_or_create_global_step global_step import_meta_graph "
        "init_from_checkpoint input_producer inverse_time_decay latest_checkpoint "
        "limit_epochs linear_cosine_decay list_variables load_checkpoint load_variable "
        "match_filenames_once maybe_batch maybe_batch_join maybe_shuffle_batch "
        "maybe_shuffle_batch_join natural_exp_decay noisy_linear_cosine_decay "
        "piecewise_constant polynomial_decay queue_runner range_input_producer "
        "remove_checkpoint replica_device_setter sdca_fprint sdca_optimizer "
        "sdca_shrink_l1 shuffle_batch shuffle_batch_join slice_input_producer "
        "start_queue_runners string_input_producer summary_iterator "
        "update_checkpoint_state warm_start write_graph "
        "master is_chief checkpoint_dir scaffold hooks chief_only_hooks "
        "save_checkpoint_secs save_checkpoint_steps save_summaries_steps "
        "save_summaries_secs config stop_grace_period_secs log_step_count_steps "
        "max_wait_secs summary_dir startup_delay_steps "
        "var_list reshape sharded max_to_keep keep_checkpoint_every_n_hours "
        "restore_sequentially saver_def builder defer_build allow_empty write_version "
        "pad_step_number save_relative_paths filename save restore last_checkpoints "
        "set_last_checkpoints set_last_checkpoints_with_time recover_last_checkpoints "
        "as_saver_def build from_proto to_proto "
        "cluster ps_tasks ps_device worker_device merge_devices ps_ops ps_strategy "
        "partitioner fixed_size_partitioner min_max_variable_partitioner "
        "variable_axis_size_partitioner"
    ),
    "tf.estimator": (
        "BaselineClassifier BaselineEstimator BaselineRegressor BestExporter "
        "BoostedTreesClassifier BoostedTreesEstimator BoostedTreesRegressor "
        "DNNClassifier DNNEstimator DNNLinearCombinedClassifier "
        "DNNLinearCombinedEstimator DNNLinearCombinedRegressor DNNRegressor Estimator "
        "EstimatorSpec EvalSpec Exporter FinalExporter LatestExporter LinearClassifier "
        "LinearEstimator LinearRegressor ModeKeys RunConfig TrainSpec "
        "WarmStartSettings add_metrics classifier_parse_example_spec export inputs "
        "regressor_parse_example_spec train_and_evaluate TPUEstimator TPUConfig "
        "model_fn input_fn train_op training_hooks train evaluate predict model_dir"
    ),
    "tf.distribute": (
        "CrossDeviceOps HierarchicalCopyAllReduce InputContext InputReplicationMode "
        "MirroredStrategy NcclAllReduce OneDeviceStrategy ReduceOp "
        "ReductionToOneDevice ReplicaContext Server Strategy StrategyExtended "
        "cluster_resolver get_loss_reduction get_replica_context get_strategy "
        "has_strategy in_cross_replica_context CentralStorageStrategy "
        "CollectiveCommunication CollectiveHints CommunicationImplementation "
        "CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy "
        "TPUStrategy scope run reduce experimental_distribute_dataset "
        "num_replicas_in_sync"
    ),
    "tf.contrib.opt": (
        "AdaMaxOptimizer PowerSignOptimizer AddSignOptimizer "
        "DropStaleGradientOptimizer DelayCompensatedGradientDescentOptimizer "
        "ExternalOptimizerInterface "
        "LazyAdamOptimizer NadamOptimizer MovingAverageOptimizer MomentumWOptimizer "
        "AdamWOptimizer DecoupledWeightDecayExtension "
        "extend_with_decoupled_weight_decay ScipyOptimizerInterface "
        "VariableClippingOptimizer MultitaskOptimizerWrapper "
        "clip_gradients_by_global_norm ElasticAverageOptimizer "
        "ElasticAverageCustomGetter ModelAverageOptimizer ModelAverageCustomGetter "
        "interval_steps block_momentum_rate use_nesterov block_learning_rate "
        "GGTOptimizer LARSOptimizer ShampooOptimizer AGNOptimizer AGNCustomGetter "
        "AdamGSOptimizer LazyAdamGSOptimizer RegAdagradOptimizer"
    ),
    "A RETURNN config": (
        "optimizer class learning_rate learning_rate_multiplier optimizer_epsilon "
        "momentum optimizer_use_locking adam nadam adadelta adagrad rmsprop "
        "dynamic_learning_rate gradient_clip gradient_clip_norm gradient_clip_avg_norm "
        "gradient_clip_global_norm global_norm_tag gradient_clip_global_norm_tag "
        "gradient_noise gradient_nan_inf_filter grad_norm_to_clip_to_zero "
        "maximize_grad_norm accum_grad_multiple_step decouple_constraints "
        "decouple_constraints_factor extra_updates debug_grad_summaries "
        "debug_add_check_numerics_ops deterministic_train use_horovod "
        "horovod_reduce_type horovod_avg_grad horovod_scale_lr horovod_param_sync_step "
        "horovod_param_sync_time_diff horovod_dataset_distribution"
    ),
}
# How the originals behaved where it differs, each with a row of its own.
BEHAVIOURS = {
    "Optimizer": ("a slot that is absent", "gradient `None`", "nothing to apply"),
    "SyncReplicasOptimizer": ("no global step", "two in one state"),
    "ElasticAverageOptimizer": ("no variable has a gradient",),
    "AMSGradOptimizer": ("rows", "a variable that it does not know", "`minimize`"),
}


def _rows():
    """Of each section: the first column's names -> what the second one says."""
    sections = {}
    for part in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = sections.setdefault(title.strip(), {})
        for original, write in re.findall(
            r"^\| (.+?) \| (.*?) \| .*\|$", body, flags=re.MULTILINE
        ):
            for name in re.findall(r"`([^`]+)`", original):
                assert name not in rows, (title, name)
                rows[name] = write
    return sections


ROWS = _rows()


def test_every_name_has_its_row():
    for original, names in ORIGINALS.items():
        rows = ROWS[original]
        # Or a section: an optimizer of a module has its own.
        assert not set(names.split()) - rows.keys() - ROWS.keys(), original
        assert all(rows.values()), original
        if original.endswith(("Optimizer", "SGD", "1")) and original in rows:
            assert "oxs." in rows[original]


def test_every_behaviour_has_its_row():
    for original, behaviours in BEHAVIOURS.items():
        section = re.split(rf"^##+ {original}$", PAGE.read_text(), flags=re.MULTILINE)
        for behaviour in behaviours:
            assert f"\n| {behaviour}" in re.split("\n##", section[1])[0], behaviour


def test_every_recorded_refusal_of_the_originals_has_its_row():
    rows = ROWS["What the originals refuse"]
    seen = set()
    for record in sorted((PAGE.parents[1] / "tests" / "golden").glob("errors_*.json")):
        for probe in json.loads(record.read_text())["probes"]:
            if not probe["accepted"]:
                found = {row for row in rows if row in probe["message"]}
                assert found, probe
                seen |= found
    assert seen == rows.keys()


def test_every_name_here_exists():
    names = set(re.findall(r"\boxs(?:\.[A-Za-z_][A-Za-z_0-9]*)+", PAGE.read_text()))
    assert len(names) > 40
    for name in names | {"optx_sync.flax.SyncTrainState"}:
        pkgutil.resolve_name(name.replace("oxs.", "optx_sync.", 1))


def test_every_argument_of_the_catalogue_exists():
    seen = 0
    for original, rows in ROWS.items():
        call = re.match(r"`oxs\.optimizers\.(\w+)\(", rows.get(original, ""))
        if call is None or call[1] in ("from_rule", "keras"):
            continue
        seen += 1
        ours = set(inspect.signature(getattr(oxs.optimizers, call[1])).parameters)
        written = {
            write.strip("`")
            for name, write in rows.items()
            if name != original and re.fullmatch(r"`\w+`", write)
        }
        assert written == ours, original
    assert seen > 10


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
