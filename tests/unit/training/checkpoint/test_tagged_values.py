"""Values that JSON can't represent are stored without pickles, and pickles are read with care."""

from __future__ import annotations

import enum
import json
import os
import pickle
import random
from collections import Counter, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from ray_workers.training.checkpoint.safetensors_layout import PickledValue, read_tensors, restore
from ray_workers.training.checkpoint.staging import Stager
from ray_workers.training.checkpoint.tagged_values import tagged, untagged

HALF_PAST = datetime(2026, 10, 25, 2, 30, fold=1)
HOLDABLE: list[Any] = [
    *(2**70, -(2**63), 10**5000, 1j, b"", b"\0\xff", bytearray(b"ab"), range(5, 1, -2)),
    *({1, (2, "x")}, frozenset(), deque([1, torch.ones(2)], maxlen=3), deque()),
    *({None: 1, (1, 2): torch.ones(2), 1.5: {2}, True: "y"}, {1: "a", "1": "b"}),
    *(Decimal("1.50"), Path("/a/b"), date(1, 1, 1), time(1, 2), timedelta(-1, 3, 7)),
    *(HALF_PAST, datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=-3)))),
    *(torch.float8_e5m2, torch.device("cuda:1"), torch.Size([2, 3]), torch.Size([])),
    *(torch.ones(2, 3).to(torch.complex64).conj(), torch.ones(()).to(torch.float8_e4m3fn)),
    *(torch.ones(2, 3, dtype=torch.uint16).T, torch.empty(0, 2, dtype=torch.complex128)),
    *(np.arange(6).reshape(2, 3).T, np.array("abc"), np.zeros((0, 3), np.float16), np.array(1.5)),
    *(
        np.array([1, 2, 3], ">i4")[::2],
        np.datetime64("2020-01-01"),
        np.float32("nan"),
        np.str_("x"),
    ),
    *(np.bool_(True), np.complex64(1j), np.float64(0.1)),
    *(random.Random(1).getstate(), np.random.RandomState(1).get_state(), torch.get_rng_state()),
    np.random.default_rng(1).bit_generator.state,
]


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 2


class Pair(NamedTuple):
    left: int
    right: int


def shown(value: Any) -> Any:
    """Return the value with its types, in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), shown(value.to(torch.complex128).numpy())
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, np.shape(value), repr(value)
    if isinstance(value, dict):
        return {key: shown(one) for key, one in value.items()}, list(map(repr, value))
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [shown(one) for one in value]
    return type(value), value


def through_the_files(value: Any) -> Any:
    snapshot = Stager().take({"x": tagged(value, "x")})
    snapshot.wait()
    tensors = read_tensors(bytes(snapshot.data[: snapshot.num_bytes]))
    found: Any = untagged(restore(json.loads(json.dumps(snapshot.tree)), tensors))
    return found["x"]


@pytest.mark.parametrize("value", HOLDABLE, ids=lambda one: type(one).__name__)
def test_a_value_comes_out_as_it_went_in(value: Any) -> None:
    for one in (value, [value], {"y": (value, {"z": value})}):
        assert shown(through_the_files(one)) == shown(one)


@pytest.mark.parametrize(
    "value",
    [
        *(
            Fraction(1, 2),
            Color.RED,
            Level.HIGH,
            Pair(1, 2),
            object(),
            os.system,
            Color,
            Exception(),
        ),
        *(torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.Generator()),
        *(np.array([object()]), np.zeros(2, [("a", "i4")]), np.random.default_rng(1)),
        *(datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), {Fraction(1): 2}, {Color.RED}),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_value_of_another_type_is_refused_by_its_path_and_type(value: Any) -> None:
    inner = next(iter(value)) if isinstance(value, dict | set) else value
    with pytest.raises(ValueError, match=rf"x/y/0\S* is a {type(inner).__name__}, which"):
        tagged({"y": [value]}, "x")


def pickled(value: Any) -> PickledValue:
    """Return a value as the first versions of the format contain it."""
    content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return PickledValue(torch.frombuffer(bytearray(content), dtype=torch.uint8))


NEW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)
OLD = [one for one in HOLDABLE if one is not NEW[1] and getattr(one, "dtype", None) not in NEW]


@pytest.mark.parametrize(
    "value",
    [*OLD, Counter("aab"), {1: b"x"}, Parameter(torch.ones(2).cfloat(), False)],
    ids=lambda one: type(one).__name__,
)
def test_pickles_of_earlier_versions_are_read(value: Any) -> None:
    value = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    assert shown(untagged([pickled(value)])) == shown([value])
    tree = {"pickled": [{"tensor": "x"}]}
    assert shown(untagged(restore(tree, {"x": pickled(value).pickle}))) == shown(value)


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        *((Runs(), "posix.system"), (eval, "builtins.eval"), ([{1: Runs()}], "posix.system")),
        *((Color.RED, r"\w+.Color"), (torch.load, "torch.serialization.load")),
    ],
)
def test_pickles_of_anything_else_are_not_read(value: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"contains a pickle of .*{name}, but only"):
        untagged({"a": pickled(value)})
