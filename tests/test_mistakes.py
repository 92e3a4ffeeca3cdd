"""Each of a user's mistakes is right after all, or told with what to do."""

import builtins
import warnings

import jax
import pytest

from tests.mistakes import CODE, names, told


@pytest.fixture(autouse=True)
def promotion():
    """As users have it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("what", CODE)
def test_it_is_right_or_told(what, tmp_path):
    found, row = names(tmp_path), told()[what]
    kind, _, said = row.partition(": ")
    if row.startswith("Right"):
        exec(CODE[what], found)
        return
    error = getattr(builtins, kind)
    with warnings.catch_warnings(), pytest.raises(error) as raised:
        warnings.simplefilter("error", UserWarning)
        exec(CODE[what], found)
    # JAX adds lines of its own.
    message, place = str(raised.value).split("\n-----")[0], 0
    whole = "\n".join([message, *getattr(raised.value, "__notes__", [])])
    parts = [part.strip() for part in said.split("...")]
    for part in parts:
        place = whole.find(part, place)
        assert place >= 0, whole
    assert message.startswith(parts[0]) and len(message) <= 700, message


def test_there_are_forty_and_the_page_has_them():
    assert told().keys() == CODE.keys() and len(CODE) >= 40
