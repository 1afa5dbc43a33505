"""Text as bytes and as tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dray.spec import Data
from ray_workers.datasets import Tokens, open_text
from ray_workers.datasets.formats import utf8
from ray_workers.recipes import splits
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 999},
        "unk_token": "[UNK]",
    },
}


def read(path: Path, policy: DataPolicy, tokenizer: Path | None = None) -> Tokens:
    data = Data(source=path.as_uri(), format="text")
    return open_text(data, policy, tokenizer.as_uri() if tokenizer else None)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_byte_is_a_token(tmp_path: Path, policy: DataPolicy) -> None:
    tokens = read(write(tmp_path / "a.txt", "ä b\n".encode()), policy)
    assert bytes(tokens.ids) == "ä b\n".encode()
    assert tokens.ids.dtype == np.uint8
    assert tokens.vocabulary_size == 256
    assert tokens.tokenizer_json is None


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path, policy: DataPolicy) -> None:
    write(tmp_path / "set" / "b" / "1.txt", b"two")
    write(tmp_path / "set" / "a.txt", b"one\n")
    write(tmp_path / "set" / "c.md", b"not this")
    assert bytes(read(tmp_path / "set", policy).ids) == b"one\ntwo\n"


def test_a_tokenizer_file_makes_the_tokens(tmp_path: Path, policy: DataPolicy) -> None:
    tokenizer = write(tmp_path / "tokenizer.json", json.dumps(TOKENIZER).encode())
    tokens = read(write(tmp_path / "a.txt", b"to be or not\nto see"), policy, tokenizer)
    assert tokens.ids.tolist() == [1, 2, 3, 999, 1, 0]
    assert tokens.ids.dtype == np.uint16
    assert tokens.vocabulary_size == 1000
    assert tokens.tokenizer_json == tokenizer.read_bytes()
    assert tokens.fingerprint != read(tmp_path / "a.txt", policy).fingerprint


def test_pieces_lose_and_split_nothing(
    tmp_path: Path, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utf8, "PIECE_BYTES", 7)
    content = "äöü longer than a piece\n\nx\nö".encode() * 20
    assert bytes(read(write(tmp_path / "a.txt", content), policy).ids) == content


@pytest.mark.parametrize("length", range(1, 25))
def test_files_of_a_folder_end_with_a_newline(
    length: int, tmp_path: Path, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utf8, "PIECE_BYTES", 7)
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "a.txt", b"a" * length)
    write(tmp_path / "set" / "b.txt", b"b" * length + b"\n")
    content = b"a" * length + b"\n" + b"b" * length + b"\n"
    assert bytes(read(tmp_path / "set", policy).ids) == content


@pytest.mark.parametrize("piece_bytes", [3, 1 << 20])
def test_the_first_byte_that_is_no_text_is_named(
    piece_bytes: int, tmp_path: Path, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utf8, "PIECE_BYTES", piece_bytes)
    path = write(tmp_path / "a.txt", "ää".encode() + b"ab\xc3(rest")
    with pytest.raises(DataError, match=r"a\.txt: is not UTF-8: the byte at offset 6 is invalid"):
        read(path, policy)
    with pytest.raises(DataError, match="offset 2 is"):
        read(write(tmp_path / "b.txt", b"ab\xe2\x82"), policy)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"{", "is not a readable tokenizer.json"), (b"", "is an empty file")],
)
def test_a_tokenizer_that_is_none(
    content: bytes, fault: str, tmp_path: Path, policy: DataPolicy
) -> None:
    tokenizer = write(tmp_path / "tokenizer.json", content)
    with pytest.raises(DataError) as raised:
        read(write(tmp_path / "a.txt", b"x"), policy, tokenizer)
    assert "tokenizer.json: " in str(raised.value)
    assert fault in str(raised.value)


def test_empty_text(tmp_path: Path, policy: DataPolicy) -> None:
    with pytest.raises(DataError, match=r"a\.txt: is an empty file"):
        read(write(tmp_path / "a.txt", b""), policy)
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError, match=r"is a folder without \.txt files"):
        read(tmp_path / "set", policy)


def test_a_byte_order_mark_is_dropped_from_each_file(tmp_path: Path, policy: DataPolicy) -> None:
    for name, text in (("a", "\ufeffone"), ("b", "\ufefftwo \ufeff"), ("c", "\ufeff")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    data = Data(source=tmp_path.as_uri(), format="text")
    ids = open_text(data, policy, None).ids
    assert bytes(ids).decode() == "one\ntwo \ufeff\n"


def test_utf_16_is_named(tmp_path: Path, policy: DataPolicy) -> None:
    (tmp_path / "a.txt").write_text("one", encoding="utf-16")
    with pytest.raises(
        DataError, match="the byte at offset 0 is invalid; the file's encoding is probably utf-16"
    ):
        open_text(Data(source=(tmp_path / "a.txt").as_uri()), policy, None)


def test_names_of_files_divide_a_text(tmp_path: Path, policy: DataPolicy) -> None:
    for name in ("wiki.test", "wiki.train", "wiki.valid"):
        (tmp_path / f"{name}.txt").write_text(name[5:] * 3)
    tokens = open_text(Data(source=tmp_path.as_uri(), format="text"), policy, None)
    assert bytes(tokens.ids) == b"traintraintrain\nvalidvalidvalid\n"
    assert (tokens.num_training, tokens.num_left_out) == (16, 1)
    training, validation = splits.at_token(16, 3, (len(tokens.ids) - 1) // 3)
    text = bytes(tokens.ids)
    assert b"".join(text[at * 3 : at * 3 + 4] for at in training)[-4:] == b"ain\n"
    assert text[validation[0] * 3 :].startswith(b"lidvalid")
    (tmp_path / "notes.txt").write_text("?")
    with pytest.raises(
        DataError, match=r"named like the parts of a split .* also other files, such as 'notes.txt'"
    ):
        open_text(Data(source=tmp_path.as_uri(), format="text"), policy, None)
