"""Read text files as a single sequence of tokens. Tokens are bytes, or come from a tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.datasets.core.errors import broken, listed, reading, shortened
from ray_workers.datasets.core.types import Tokens
from ray_workers.datasets.formats import utf8
from ray_workers.datasets.formats.archives import gunzipped
from ray_workers.datasets.formats.folder_splits import SplitName, is_division, is_named, resolved
from ray_workers.datasets.formats.prepared import ArrayWriter, Workshop, prepare, read_small_file
from ray_workers.datasets.sources.source import SourceFile, location_of
from ray_workers.shared.node_needs import DataPolicy

SUFFIXES = (".txt",)
TEXT_VERSION = 4
"""Part of the cache key of every text. Change this version whenever the tokens change."""
MAX_TOKENIZER_BYTES = 256 << 20
MAX_VOCABULARY = 1 << 24
NUM_BYTES = 256
_NUMBER = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?$")
"""The end of the name of a numbered file, as on Hugging Face's hub: `train-00000-of-00002`."""

Encode = Callable[[str], npt.NDArray[Any]]


def open_text(data: spec.Data, policy: DataPolicy, tokenizer: str | None) -> Tokens:
    """Open a text. Raises DataError."""
    content: bytes | None = None
    encode: Encode = _bytes_of
    size = NUM_BYTES
    if tokenizer is not None:
        content = read_small_file(tokenizer, policy, MAX_TOKENIZER_BYTES)
        encode, size = _load_tokenizer(content, tokenizer)
    dtype = np.min_scalar_type(size - 1)
    how = {
        "kind": "text",
        "version": TEXT_VERSION,
        "tokenizer": None if content is None else hashlib.sha256(content).hexdigest(),
    }

    def build(shop: Workshop) -> Mapping[str, Any]:
        training, validation, num_left_out = files_of_splits(shop)
        with ArrayWriter(shop.output, "ids", (), dtype, shop.budget) as ids:
            for piece in _pieces(shop, training):
                ids.append(encode(piece))
            num_training = ids.num_rows
            for piece in _pieces(shop, validation):
                ids.append(encode(piece))
        if ids.num_rows == 0:
            raise broken(shop.location, "contains no text")
        return {"num_training": num_training if validation else None, "num_left_out": num_left_out}

    prepared = prepare(data, policy, how, build, suffixes=SUFFIXES)
    return Tokens(
        prepared.array("ids"),
        size,
        prepared.fingerprint,
        content,
        prepared.meta["num_training"],
        prepared.meta["num_left_out"],
    )


def files_of_splits(
    shop: Workshop,
) -> tuple[list[SourceFile], list[SourceFile], int]:
    """Return (training files, validation files, number of ignored files), based on names such as
    `train.txt`, `wiki.valid.txt` and `test/1.txt`. Raises DataError if only some files have such
    names."""
    names = {file.name: _part_of(file.name) for file in shop.files} if shop.is_folder else {}
    named = set(filter(is_named, names.values()))
    if not is_division(named):
        return list(shop.files), [], 0
    if not named.issuperset(names.values()):
        odd = next(name for name, part in names.items() if part not in named)
        raise broken(
            shop.location,
            f"has files named like the parts of a split ({listed(sorted(named))}), but also other "
            f"files, such as {shortened(odd)}: use split names for all files or top-level "
            "folders, or for none",
        )
    roles = resolved(named)
    training, validation, test = (
        [file for file in shop.files if roles[names[file.name]] is role] for role in SplitName
    )
    return training, validation, len(test)


def _part_of(name: str) -> str:
    """Return the top-level folder of a file, or the part between the last two dots of its name,
    without the file's number."""
    path = PurePosixPath(name.removesuffix(".gz"))
    return path.parts[0] if len(path.parts) > 1 else _NUMBER.sub("", path.stem).rpartition(".")[2]


def _pieces(shop: Workshop, files: Sequence[SourceFile]) -> Iterator[str]:
    """Yield the text of the files in pieces. If the source is a folder, a newline is appended to
    each file that doesn't end with one. Pieces end at newlines if there are any nearby, so that a
    tokenizer gets complete lines. The pieces are the same on every node."""
    for file in files:
        path = gunzipped(file, shop.scratch / "plain", shop.budget)
        rest, last = "", "\n"
        try:
            for number, piece in enumerate(utf8.pieces(path)):
                if number == 0:
                    piece = piece.removeprefix("\ufeff")
                last = piece[-1:] or last
                head, end, tail = (rest + piece).rpartition("\n")
                if end:
                    yield head + end
                rest = tail
                if len(rest) > utf8.PIECE_BYTES:
                    yield rest
                    rest = ""
        except utf8.NotTextError as error:
            likely = utf8.likely_encoding(path)
            raise broken(
                file.location,
                f"is not UTF-8: the byte at offset {error.offset:,} is invalid; the file's "
                f"encoding is probably {likely}: save it as UTF-8",
            ) from None
        missing = "\n" if shop.is_folder and last != "\n" else ""
        if rest or missing:
            yield rest + missing


def _bytes_of(text: str) -> npt.NDArray[Any]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _load_tokenizer(content: bytes, url: str) -> tuple[Encode, int]:
    """Return (encode, number of ids) of a `tokenizer.json`. Raises DataError."""
    from tokenizers import Tokenizer

    location = location_of(url)
    with reading(location, "is not a readable tokenizer.json"):
        tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise broken(location, "is a tokenizer without a vocabulary")
    size = max(ids) + 1
    if size > MAX_VOCABULARY:
        raise broken(
            location,
            f"has a token with the id {size - 1:,}, which is too large: a model's embedding has a "
            "row for each id up to the largest. Number the tokens consecutively from 0, with ids "
            f"below {MAX_VOCABULARY:,}",
        )

    def encode(text: str) -> npt.NDArray[Any]:
        with reading(location, "can't convert the text to tokens"):
            found = tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(found, dtype=np.uint32)

    return encode, size
