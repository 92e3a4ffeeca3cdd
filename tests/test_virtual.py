"""A program under faults on a virtual cluster: what the history and the center say."""

import builtins

import jax
import jax.numpy as jnp
import optax
import pytest

import optx_sync as oxs

STEPS = 6


def trained(*faults, seed=0, workers=2, period=2, clock=None, **options):
    """Run 6 steps of 1 a worker, with faults: center, history and virtual seconds."""

    def train(worker):
        while worker.local_step < STEPS:
            cluster.sleep(1.0)
            worker.step({"w": -jnp.ones(())})
        worker.flush()

    program = train
    for kind, worker, step in faults:
        program = oxs.testing.fault(program, kind, worker=worker, step=step)
    with oxs.testing.virtual_cluster(seed) as cluster:
        center, history = oxs.runtime.run(
            program, {"w": jnp.zeros(())}, optax.sgd(1.0), oxs.rules.local_sgd(),
            num_workers=workers, communication_period=period, **options,
        )  # fmt: skip
    return float(center["w"]), history, cluster.seconds


def test_without_faults_all_steps_are_there_in_the_time_that_they_take():
    center, history, seconds = trained()
    assert center == STEPS and history.count("push") == 6
    assert STEPS < seconds < STEPS + 1


def test_one_that_dies_loses_its_steps_since_its_last_round_and_makes_them_again():
    center, history, seconds = trained(("dies", 1, 3))
    assert center == STEPS and history.count("lost", 1) == history.count("lost") == 1
    steps = [e.local_step for e in history.events if e.kind == "push" and e.worker]
    assert steps == [2, 4, 6]
    assert seconds > STEPS + 1  # The third step is made twice.


def test_one_that_freezes_comes_late():
    center, history, seconds = trained(("freezes", 1, 3))
    assert center == STEPS and STEPS + 60 < seconds < STEPS + 61
    assert not history.count("lost")


def test_one_that_freezes_is_replaced_after_the_timeout():
    center, history, seconds = trained(("freezes", 1, 3), worker_timeout=10.0)
    assert center == STEPS and 10 < seconds < 30
    assert history.count("lost", 1) == 1


def test_one_that_loses_an_answer_pushes_again_and_counts_once():
    center, history, _ = trained(("loses an answer", 1, 3))
    assert center == STEPS and history.count("retry", 1) == 1
    assert not history.count("lost")


def test_one_that_is_told_to_leave_hands_in_what_it_has():
    center, history, _ = trained(("is told to leave", 1, 2), period=4)
    steps = [e.local_step for e in history.events if e.kind == "push" and e.worker]
    assert center == STEPS and steps == [3, 6]
    assert history.count("join", 1) == 2 and not history.count("lost")


def test_several_faults_strike_each_in_its_place():
    faults = ("dies", 1, 3), ("freezes", 0, 5), ("dies", 1, 5), ("dies", 0, 1)
    center, history, seconds = trained(*faults)
    assert center == STEPS and seconds > 60
    assert history.count("lost", 1) == 2 and history.count("lost", 0) == 1


def test_a_seed_is_a_schedule():
    faults = ("dies", 1, 3), ("loses an answer", 0, 2)
    one, other, third = (trained(*faults, seed=seed, workers=3) for seed in (1, 1, 2))
    assert one[1].events == other[1].events and one[2] == other[2]
    assert one[1].events != third[1].events


def test_a_run_goes_on_from_checkpoints_in_this_and_in_a_later_cluster(tmp_path):
    at = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    assert trained(("dies", 1, 3), **at)[0] == STEPS
    with oxs.testing.virtual_cluster():
        for steps in (8, 10):

            def train(worker, steps=steps):
                while worker.local_step < steps:
                    worker.step({"w": -jnp.ones(())})

            center, _ = oxs.runtime.run(
                train, {"w": jnp.zeros(())}, optax.sgd(1.0), oxs.rules.local_sgd(),
                num_workers=2, communication_period=2, **at,
            )  # fmt: skip
            assert float(center["w"]) == steps


def test_servers_that_wait_for_all_and_samples_run_there_too():
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}

    def train(worker):
        for _ in worker.samples():
            worker.step(jax.tree.map(lambda x: x - 1, params))

    program = oxs.testing.fault(train, "dies", worker=1, step=3)
    with oxs.testing.virtual_cluster():
        _, history = oxs.runtime.run(
            program, params, optax.sgd(1.0), oxs.rules.local_sgd(),
            num_workers=3, communication_period=1, num_servers=2,
            meet=oxs.runtime.quorum(2), samples=oxs.runtime.Samples(40, 2),
        )  # fmt: skip
    assert history.count("lost", 1) == 1 and not history.count("uncounted")


def test_fedbuff_runs_there_as_in_a_simulation():
    """`tests/test_simulate_asynchronous.py` has its equations."""

    def train(worker):
        while worker.local_step < 6:
            worker.step({"w": -jnp.ones(())})

    buffer = optax.MultiSteps(optax.sgd(1.0), 3).gradient_transformation()
    rule = oxs.rules.diloco(buffer)._replace(mean_over="pushed")
    standard = jax.numpy_dtype_promotion("standard")  # which MultiSteps needs
    with standard, oxs.testing.virtual_cluster():
        center, history = oxs.runtime.run(
            train, {"w": jnp.zeros(())}, optax.sgd(1.0), rule, num_workers=2,
            communication_period=1, weigh=lambda at: (1 + at.staleness / 3) ** -0.5,
        )  # fmt: skip
    ages = [event.staleness for event in history.events if event.kind == "push"]
    assert len(ages) == 12 and max(ages) > 0
    wanted = sum((1 + age / 3) ** -0.5 for age in ages) / 3
    assert float(center["w"]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "fault, why",
    [
        (("dies", 5, 1), "no worker 5 made a step"),
        (("freezes", 1, 7), "worker 1 made 6 steps"),
        (("loses an answer", 1, 6), "worker 1 pushed nothing after it"),
    ],
)
def test_a_fault_that_never_struck_is_told(fault, why):
    with pytest.raises(RuntimeError, match=f"{fault[0]}.* never struck: {why}"):
        trained(fault)


def test_an_error_of_the_program_is_not_covered_by_a_fault_that_had_no_time():
    def train(worker):
        raise KeyError("its own")

    program = oxs.testing.fault(train, "dies", worker=0, step=1)
    with pytest.raises(KeyError, match="its own"), oxs.testing.virtual_cluster():
        oxs.runtime.run(
            program, {"w": jnp.zeros(())}, optax.sgd(1.0), oxs.rules.local_sgd(),
            num_workers=2,
        )  # fmt: skip


def test_a_run_that_does_not_end_is_ended():
    def train(worker):
        while True:
            cluster.sleep(1.0)

    said = "After 50 seconds of the virtual clock the run has not ended"
    with oxs.testing.virtual_cluster(max_seconds=50) as cluster:
        with pytest.raises(RuntimeError, match=said):
            oxs.runtime.run(
                train, {"w": jnp.zeros(())}, optax.sgd(1.0), oxs.rules.local_sgd(),
                num_workers=2,
            )  # fmt: skip


def test_what_a_dead_worker_leaves_behind_runs_at_the_end_of_the_block():
    found = []

    def train(worker):
        try:
            while worker.local_step < 2:
                worker.step({"w": -jnp.ones(())})
        finally:
            found.append("finally")

    program = oxs.testing.fault(train, "dies", worker=0, step=1)
    with oxs.testing.virtual_cluster():
        oxs.runtime.run(
            program, {"w": jnp.zeros(())}, optax.sgd(1.0), oxs.rules.local_sgd(),
            num_workers=1, communication_period=1,
        )  # fmt: skip
        assert found == ["finally"]
    assert found == ["finally"] * 2


def test_the_platform_of_jax_stays():
    before = jax.config.values["jax_platforms"]
    try:
        jax.config.update("jax_platforms", None)
        trained()
        assert jax.config.values["jax_platforms"] is None
    finally:
        jax.config.update("jax_platforms", before)


def test_without_greenlet_it_is_said_what_to_install(monkeypatch):
    found = builtins.__import__

    def refuse(name, *rest):
        if name == "greenlet":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"optx-sync\[testing\]"):
        oxs.testing.virtual_cluster()
