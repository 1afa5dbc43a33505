"""Text files as one row of tokens: bytes, or what a tokenizer makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.contracts import DataPolicy
from ray_workers.training.datasets import utf8
from ray_workers.training.datasets.faults import broken
from ray_workers.training.datasets.kinds import Tokens
from ray_workers.training.datasets.prepared import ArrayWriter, Workshop, prepare, read_small_file
from ray_workers.training.datasets.unpacking import gunzipped

SUFFIXES = (".txt",)
MAX_TOKENIZER_BYTES = 256 << 20
NUM_BYTES = 256

Encode = Callable[[str], npt.NDArray[Any]]


def open_text(data: spec.Data, policy: DataPolicy, tokenizer: str | None) -> Tokens:
    """Raises DataError."""
    content: bytes | None = None
    encode: Encode = _bytes_of
    size = NUM_BYTES
    if tokenizer is not None:
        content = read_small_file(tokenizer, policy, MAX_TOKENIZER_BYTES)
        encode, size = _load_tokenizer(content, tokenizer)
    dtype = np.min_scalar_type(size - 1)
    how = {
        "kind": "text",
        "tokenizer": None if content is None else hashlib.sha256(content).hexdigest(),
    }

    def build(shop: Workshop) -> Mapping[str, Any]:
        with ArrayWriter(shop.output, "ids", (), dtype, shop.budget) as ids:
            for number, piece in enumerate(_pieces(shop)):
                if number == 0:
                    piece = piece.removeprefix("\ufeff")
                ids.append(encode(piece))
        if ids.num_rows == 0:
            raise broken(shop.place, "holds no text")
        return {}

    prepared = prepare(data, policy, how, build, suffixes=SUFFIXES)
    return Tokens(prepared.array("ids"), size, prepared.fingerprint, content)


def _pieces(shop: Workshop) -> Iterator[str]:
    """The text of all files, each ending with a line's end, cut at lines' ends where there are any
    near: a tokenizer sees whole lines, the same on every node."""
    for file in shop.files:
        path = gunzipped(file, shop.scratch / "plain", shop.budget)
        rest = ""
        try:
            for piece in utf8.pieces(path):
                head, end, tail = (rest + piece).rpartition("\n")
                if end:
                    yield head + end
                rest = tail
                if len(rest) > utf8.PIECE_BYTES:
                    yield rest
                    rest = ""
        except utf8.NotTextError as error:
            raise broken(
                file.place, f"is not UTF-8: the byte at offset {error.offset:,} is not text"
            ) from None
        if rest:
            yield f"{rest}\n" if shop.is_folder else rest


def _bytes_of(text: str) -> npt.NDArray[Any]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _load_tokenizer(content: bytes, url: str) -> tuple[Encode, int]:
    """(encode, ids there are) of a `tokenizer.json`. Raises DataError."""
    from tokenizers import Tokenizer

    place = url.split("?", 1)[0]
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exceptions
        raise broken(place, f"is no tokenizer.json that can be read: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise broken(place, "is a tokenizer without a vocabulary")

    def encode(text: str) -> npt.NDArray[Any]:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    return encode, max(ids) + 1
