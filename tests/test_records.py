"""What `help` and the API pages say of records: what each of their fields is."""

import dataclasses
import inspect
import re

import optx_sync as oxs
from docs import names
from optx_sync.audit import hlo
from tests.test_signatures import ROOMS


def _fields_of(cls):
    fields = getattr(cls, "_fields", ())
    if dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls)]
    return [field for field in fields if field[0] != "_"]


def _public():
    """What the rooms hold, and what has a page in the API reference."""
    rooms = [oxs, hlo, oxs.audit, oxs.elastic, oxs.graphs]
    rooms += [getattr(oxs, name) for name in ROOMS]
    public = [getattr(room, name) for room in rooms for name in dir(room)]
    return public + [name.resolve() for name in names.all_names()]


def test_docstrings_are_read_in_three_minutes():
    """Of at most 500 words, the example included."""
    words = {
        one.__qualname__: len((one.__doc__ or "").split())
        for one in _public()
        if inspect.isclass(one) or inspect.isfunction(one)
    }
    assert {name: count for name, count in words.items() if count > 500} == {}
    assert len(words) > 150


def test_docstrings_of_public_records_name_each_field():
    """Neither `help` nor a page shows the comments beside the fields."""
    seen, missing = set(), {}
    for record in filter(inspect.isclass, _public()):
        inherited = {field for base in record.__mro__[1:] for field in _fields_of(base)}
        own = [field for field in _fields_of(record) if field not in inherited]
        if own and record.__module__.startswith("optx_sync"):
            seen.add(record)
            text = f"{inspect.getdoc(record)}\n"
            section = re.findall(r"^Attributes:\n((?: .*\n|\n)*)", text, re.MULTILINE)
            said = re.findall(r"^    (\w+): ", "".join(section), re.MULTILINE)
            missing[record] = [field for field in own if field not in said]
    assert {record: fields for record, fields in missing.items() if fields} == {}
    assert len(seen) > 45
