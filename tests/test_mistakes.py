"""Each of a user's mistakes is right after all, or told with what to do."""

import builtins
import warnings

import jax
import pytest

from tests.mistakes import PAGE, TABLE, names, page


@pytest.fixture(autouse=True)
def promotion():
    """As users have it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def pieces(text):
    return [part.strip() for part in text.split("...")]


@pytest.mark.parametrize("row", TABLE, ids=[row.what for row in TABLE])
def test_it_is_right_or_told(row, tmp_path):
    found = names(tmp_path)
    kind, _, said = row.said.partition(": ")
    if row.said.startswith("Right"):
        exec(row.code, found)
        return
    error = getattr(builtins, kind)
    with warnings.catch_warnings(), pytest.raises(error) as raised:
        warnings.simplefilter("error", UserWarning)
        exec(row.code, found)
    # JAX adds lines of its own.
    message, place = str(raised.value).split("\n-----")[0], 0
    for part in pieces(said):
        place = message.find(part, place)
        assert place >= 0, message
    assert message.startswith(pieces(said)[0]) and len(message) <= 700, message


def test_there_are_forty_and_the_page_has_them():
    assert len({row.what for row in TABLE}) == len(TABLE) >= 40
    assert PAGE.read_text() == page()
