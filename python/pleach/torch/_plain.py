"""Plain values as text that is equal where the values are, and back.

Pickles of equal values differ between processes: they depend on which objects are one.
"""

from __future__ import annotations

import collections
import json
from typing import Any

from ._errors import PleachUnsupported


def to_text(value: Any, subject: str) -> str:
    """The text of numbers, strings, None, and lists, tuples, dicts and Counters of them.

    Raises PleachUnsupported for other values; ``subject`` says whose they are.
    """
    return json.dumps(_tagged(value, (subject,)))


def from_text(text: str) -> Any:
    """The value of a text."""
    return _untagged(json.loads(text))


def _tagged(value: Any, place: tuple[Any, ...]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_tagged(one, place) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(one, place) for one in value]}
    if isinstance(value, dict):
        # The order in which keys came to a dict may differ between processes.
        pairs = sorted(value.items(), key=lambda pair: repr(pair[0]))
        tag = "counter" if isinstance(value, collections.Counter) else "dict"
        return {tag: [[_tagged(key, place), _tagged(one, (*place, key))] for key, one in pairs]}
    where = " in ".join(repr(key) for key in reversed(place[1:]))
    raise PleachUnsupported(
        f"{place[0]} has a {type(value).__name__}{' as ' + where if where else ''}, which a process that joins cannot be "
        "given; members keep numbers, strings, lists, tuples and dicts"
    )


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((tag, parts),) = value.items()
    if tag == "tuple":
        return tuple(_untagged(one) for one in parts)
    pairs = {_untagged(key): _untagged(one) for key, one in parts}
    return collections.Counter(pairs) if tag == "counter" else pairs
