"""A run whose processes come and go is the run of the workers that there were."""

import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from optx_sync.workers.processes import Processes
from tests import missing_processes, scripts
from tests.elastic_run import (
    AXIS,
    BATCH,
    DILOCO,
    FEATURES,
    ONE,
    PERIOD,
    SIZE,
    TARGETS,
    live,
    start,
    step_of,
)

# Lives of a group: its workers, the rounds that it saved, and the steps that it made of
# the next one before some of it died.
LIVES = ((4, 2, 0), (2, 1, 2), (3, 2, 1), (1, 1, 0))
RULES = {
    "diloco": DILOCO,
    "elastic average": oxs.elastic_average(
        optax.sgd(0.1, 0.9), AXIS, communication_period=PERIOD, moving_rate=0.2, rho=0.0
    ),
    "gossip": oxs.gossip(optax.sgd(0.1, 0.9), AXIS, communication_period=PERIOD),
    "sync_replicas": oxs.sync_replicas(oxs.optimizers.adam(0.1), AXIS, 12),
    "cross_shard": oxs.cross_shard(oxs.optimizers.adam(0.1), AXIS),
}


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        np.testing.assert_array_equal(x, y)


def uninterrupted(tx, lives, mesh=None):
    """The same membership in one process that saves nothing and never ends."""
    state, position = None, 0
    for n, rounds, _ in lives:
        workers = oxs.Workers(n, AXIS, mesh=mesh)
        started = workers.start(start(tx))
        state = started if state is None else workers.resize(state)
        step = step_of(workers, tx)
        for _ in range(rounds * PERIOD):
            places = np.arange(position, position + n * BATCH)
            orders = [
                np.random.default_rng((0, epoch)).permutation(SIZE)
                for epoch in range(places[-1] // SIZE + 1)
            ]
            rows = np.concatenate(orders)[places]
            state = step(*state, FEATURES[rows], TARGETS[rows])
            position += n * BATCH
    return state, position


@pytest.mark.parametrize("rule", RULES)
def test_after_deaths_the_run_is_that_of_the_workers_left(rule, tmp_path):
    tx, mesh = RULES[rule], rule == "diloco" or None
    lives = LIVES if rule == "diloco" else LIVES[:2]
    state, directory = None, None
    for n, rounds, steps in lives:
        # A save that a death cut short is none.
        (tmp_path / "99999.orbax-checkpoint-tmp").mkdir(exist_ok=True)
        group = oxs.elastic.Group(tmp_path, oxs.Workers(n, AXIS, mesh=mesh))
        state = live(group, tx, rounds, steps)
        directory = group.manager.directory
        group.manager.close()  # what was done since the last save is dropped
    expected, position = uninterrupted(tx, lives, mesh)
    equal(state, expected)
    assert directory == tmp_path
    assert oxs.elastic.Group(tmp_path, AXIS).manager.latest_step() == position


def test_a_joiner_is_as_resize_makes_it(tmp_path, monkeypatch):
    with oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS)) as group:
        state = live(group, DILOCO, rounds=1)
        saved = group.position
    three = oxs.elastic.Group(tmp_path, oxs.Workers(3, AXIS))
    # Who goes on needs no start, which places each leaf in agreement of all processes,
    # and no initial values, which every process would compile.
    monkeypatch.setattr(oxs.Workers, "start", None)

    def traced():
        initial = start(DILOCO)
        with pytest.raises(jax.errors.ConcretizationTypeError):
            float(initial[0]["w"].sum() + jax.random.uniform(initial[2]))
        return initial

    restored = three.restore_or_start(traced)
    assert (three.position, three.notes) == (saved, {"rounds": 1})
    equal(restored, group.workers.resize(state, 3))
    draws = jax.vmap(jax.random.uniform)(restored[2])
    assert len(set(draws.tolist())) == 3
    with pytest.raises(ValueError, match=f"saved at position {saved} already"):
        three.save(restored)
    three.rows(SIZE, BATCH)
    three.save(restored)  # and now it is another


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_a_bit(save):
    flip(max(save.rglob("*"), key=lambda path: path.stat().st_size))


def damage_a_note(save):
    (path,) = save.glob("_CHECKPOINT_METADATA")
    path.write_text(path.read_text().replace('"second"', '"secone"'))


def damage_all(save):
    for path in filter(Path.is_file, save.rglob("*")):
        path.write_bytes(b"damaged")


@pytest.mark.parametrize("damage", (damage_a_bit, damage_a_note, damage_all))
def test_a_save_that_is_not_what_was_saved_falls_back_to_the_one_before(
    damage, tmp_path, caplog
):
    start = jax.random.normal(jax.random.key(0), (2**14,))
    first = {"w": start, "key": jax.random.key(1)}
    group = oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS, mesh=True))
    state = group.restore_or_start(first)
    assert f"no save in {tmp_path}: the run begins afresh" in caplog.text
    for group.position, notes in ((1, "first"), (2, "second")):
        group.save(state, notes=notes)
    group.close()
    damage(tmp_path / "2")
    for n in (3, 2):
        group = oxs.elastic.Group(tmp_path, oxs.Workers(n, AXIS, mesh=True))
        restored = group.restore_or_start(first)
        assert (group.position, group.notes) == (1, "first")
        equal(restored["w"][:2], state["w"])
    group.position = 2  # which is free again
    group.save(restored)
    group.close()
    names = {"1", "2", "2.damaged"}
    assert {path.name for path in tmp_path.iterdir()} == names
    damage_all(tmp_path / "1")
    damage_all(tmp_path / "2")
    with pytest.raises(ValueError, match=r"No save .*/2 .*/1 .*Pass another"):
        oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS)).restore_or_start(first)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == names | {"starts.json"}


def test_a_save_that_lacks_a_name_says_what_is_wrong(tmp_path):
    """Orbax raises a KeyError of it, whose text is the bare name."""
    with oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS)) as group:
        state = group.restore_or_start(ONE)
        group.position = 1
        group.save(state)
    for metadata in (tmp_path / "1").rglob("_METADATA"):
        metadata.write_text(metadata.read_text().replace("key_type", "kez_type"))
    with pytest.raises(
        ValueError, match=r"/1 cannot be read: it lacks 'key_type': .*version\. Pass"
    ):
        oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS)).restore_or_start(ONE)


def test_a_save_that_another_process_cannot_read_is_taken_by_none(
    tmp_path, monkeypatch, caplog
):
    with oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS)) as group:
        state = group.restore_or_start(ONE)
        for group.position in (1, 2):
            group.save(state)
    others = iter((True, True, False))  # a start and its notes, but not its arrays
    monkeypatch.setattr(
        Processes, "agree", lambda _, fine, place: next(others, True) and fine
    )
    group = oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS))
    group.restore_or_start(ONE)
    assert group.position == 1 and "another process cannot read" in caplog.text


def test_each_example_comes_once_in_an_epoch(tmp_path):
    taken, position = [], 0
    for n, steps in ((3, 2), (2, 3), (5, 1), (1, 3)):
        group = oxs.elastic.Group(tmp_path, oxs.Workers(n, AXIS))
        group.position = position  # as a save would say
        for _ in range(steps):
            taken += group.rows(10, 1).tolist()
        position = group.position
    assert position == len(taken) == 20
    first, second = taken[:10], taken[10:]
    assert sorted(first) == sorted(second) == list(range(10)) != first != second
    assert group.rows(10, 4, seed=1).tolist() != group.rows(10, 4).tolist()
    for size, batch, message in ((0, 1, "number of examples"), (1, 0, "each worker")):
        with pytest.raises(ValueError, match=message):
            group.rows(size, batch)
    with pytest.raises(TypeError, match="seed must be an integer"):
        group.rows(1, 1, seed="a")
    assert group.position == 20 + 2 * 4  # A refused call takes no rows.


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="how many saves are kept"):
        oxs.elastic.Group(tmp_path, AXIS, keep=0)
    with oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS)) as group:
        state = group.restore_or_start((ONE, DILOCO.init(ONE)))
        group.position += 1
        group.save(state)
    with pytest.raises(ValueError, match=r"holds no 1\.0"):
        oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS)).restore_or_start(
            (ONE, optax.chain(DILOCO).init(ONE), ONE)
        )


def test_a_group_of_which_one_fails_waits_for_nobody(tmp_path, monkeypatch):
    closed = []
    group = oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS))
    monkeypatch.setattr(group, "close", lambda: closed.append(True))
    with pytest.raises(RuntimeError, match="broken"), group:
        raise RuntimeError("broken")
    assert not closed
    with group:
        pass
    assert closed


def begun(folder, **options):
    """A group that has started and is killed before it saves."""
    group = oxs.elastic.Group(folder, oxs.Workers(2, AXIS), **options)
    return group, group.restore_or_start(ONE)


def test_a_run_that_comes_no_further_ends(tmp_path, caplog):
    for position in (1, 2):  # from no save, and then from the first one
        for _ in range(3):
            begun(tmp_path)
        for _ in range(2):  # also who is started once more
            with pytest.raises(RuntimeError, match=r"started 3 times .* a new save"):
                begun(tmp_path)
        assert caplog.text.count("Start 3 of 3") == position
        group, state = begun(tmp_path, starts_without_save=4)
        group.position = position
        group.save(state)
        group.manager.wait_until_finished()
        # What counts starts is no save.
        assert group.manager.all_steps()[-1] == position
        assert oxs.elastic.Group(tmp_path, AXIS).manager.latest_step() == position
    # A file that was not written to its end counts nothing.
    begun(tmp_path)
    (tmp_path / "starts.json").write_text("[2,")
    for _ in range(3):
        begun(tmp_path)
    with pytest.raises(RuntimeError, match=r"position 2, .*delete .*/starts\.json"):
        begun(tmp_path)
    (tmp_path / "starts.json").unlink()
    begun(tmp_path)


def test_a_group_that_ends_by_itself_is_not_counted(tmp_path):
    """As a program that is run again for its center, after the run's end."""
    for _ in range(5):
        with oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS)) as group:
            group.restore_or_start(ONE)
    for _ in range(5):
        begun(tmp_path, starts_without_save=None)
    with pytest.raises(ValueError, match="how many starts"):
        begun(tmp_path, starts_without_save=0)


def test_a_process_learns_from_process_0_that_the_run_comes_no_further(
    tmp_path, monkeypatch
):
    group = oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(Processes, "agree", lambda *_: False)
    with pytest.raises(RuntimeError, match="started 3 times"):
        group.restore_or_start(ONE)
    assert not (tmp_path / "starts.json").exists()  # Process 0 writes.


def test_a_folder_that_cannot_be_written_is_read_all_the_same(
    tmp_path, monkeypatch, caplog
):
    group = oxs.elastic.Group(tmp_path, oxs.Workers(2, AXIS))
    (tmp_path / "starts.json").mkdir()
    for _ in range(5):
        group.restore_or_start(ONE)
    group.close()
    assert "starts are not counted" in caplog.text


def test_who_does_not_come_is_named_after_the_time_limit(tmp_path):
    """Three processes: one has died, one stays away, and one is told so, by names."""
    children = scripts.launch(
        missing_processes.__name__,
        tmp_path,
        missing_processes.PROCESSES,
        lambda number, port: (tmp_path, number, port),
    )
    try:
        code = children[0].wait(120)
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert code == 0, "\n".join(log.read_text() for log in tmp_path.glob("*.log"))
    host = re.escape(socket.gethostname())
    known = rf"process 1 on {host}, process 2 on {host}\."
    places = (
        rf"the save at position 2 within 0\.5 s\. Missing: {known}",
        rf"the start from the last save within .* {known}",
        r"the reading of .*/1/default .* process 1, process 2\.",
        r"the begin of the group in .* process 1, process 2\.",
    )
    told = (tmp_path / "told").read_text().splitlines()
    for place, message in zip(places, told, strict=True):
        assert re.match(f"Not all 3 processes came to {place}", message)


def test_the_missing_that_the_service_does_not_name_are_counted():
    told = Processes(60)._missing
    said = "reached the barrier: 1/23.\n... Some timed out task names:\n{}\n\nRPC: 7\n"
    for form in ("{}\n", "/job:jax_worker/replica:0/task:{}\n"):
        listed = "".join(form.format(task) for task in range(21, 1, -1))
        message = told("the save", said.format(listed))
        assert "Missing: process 2, process 3, " in message
        assert ", process 21, 2 more. Their" in message
    assert "Missing: in other words. Their" in told("the save", "in other words")
    with pytest.raises(ValueError, match="timeout must be a number in"):
        Processes(0)


def launch(folder, processes, rounds, steps):
    def arguments(number, port):
        return folder, processes, number, port, rounds, steps

    return scripts.launch("tests.elastic_run", folder, processes, arguments)


def test_a_process_is_killed_and_the_others_go_on(tmp_path):
    """Three processes; one killed in a round, and the next group is two processes."""
    children = launch(tmp_path, 3, rounds=2, steps=1)
    marks = [tmp_path / f"in_a_round_{number}" for number in range(3)]
    try:
        end = time.monotonic() + 120
        while not all(mark.exists() for mark in marks):
            codes = [child.poll() for child in children]
            logs = "\n".join(log.read_text() for log in tmp_path.glob("*.log"))
            assert codes == [None] * 3 and time.monotonic() < end, logs
            time.sleep(0.05)
    finally:
        # Who starts the next group ends what is left of this one.
        for child in reversed(children):
            child.send_signal(signal.SIGKILL)
            child.wait()
    for number, child in enumerate(launch(tmp_path, 2, rounds=1, steps=0)):
        assert child.wait(120) == 0, (tmp_path / f"2_{number}.log").read_text()
    lives = ((3, 2, 1), (2, 1, 0))
    state: Any = uninterrupted(DILOCO, lives, mesh=True)[0]
    center = np.load(tmp_path / "center.npy")
    # Gloo and the collective of one process add three numbers in orders of their own.
    np.testing.assert_allclose(center, state[1].center["w"], rtol=1e-6)
