"""CSV, Parquet and npz files as tables, and the message for each fault."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dray.spec import Data
from ray_workers.datasets import Table, open_table
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.marks import SOAK


def read_csv(
    text: str | bytes,
    tmp_path: Path,
    policy: DataPolicy,
    *,
    classifies: bool = True,
    **options: Any,
) -> Table:
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    data = Data(source=path.as_uri(), **{"target": "y", **options})
    return open_table(data, policy, classifies=classifies)


def test_numbers_are_numeric_and_text_is_categorical(tmp_path: Path, policy: DataPolicy) -> None:
    text = "size,colour,sold,y\n1,red,true,dog\n 2.5 ,blue,False,cat\n-3e1,red,true,dog\n"
    table = read_csv(text, tmp_path, policy)
    assert table.numeric_names == ("size", "sold")
    assert table.numeric.tolist() == [[1.0, 1.0], [2.5, 0.0], [-30.0, 1.0]]
    assert table.category_names == ("colour",)
    assert table.vocabularies == (("blue", "red"),)
    assert table.categories.tolist() == [[1], [0], [1]]
    assert table.classes == ("cat", "dog")
    assert table.target.tolist() == [1, 0, 1]
    assert (table.numeric.dtype, table.categories.dtype) == (np.float64, np.int32)


def test_classes_that_are_numbers_are_named_alike_and_ordered_by_size(
    tmp_path: Path, policy: DataPolicy
) -> None:
    table = read_csv("x,y\n1,10\n2,9\n3,9.0\n", tmp_path, policy)
    assert table.classes == ("9", "10")
    assert table.target.tolist() == [1, 0, 0]


def test_chosen_and_forced_columns(tmp_path: Path, policy: DataPolicy) -> None:
    text = ",zip,y,size\nr1,100,1,7\nr2,20,0,8\nr3,100,1,9\n"
    table = read_csv(text, tmp_path, policy, features=["size", "zip"], categorical=["zip"])
    assert table.numeric_names == ("size",)
    assert table.vocabularies == (("20", "100"),)
    assert table.categories.tolist() == [[1], [0], [1]]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-8-sig"])
@pytest.mark.parametrize(("given", "mark"), [(";", ";"), ("tab", "\t"), ("\t", "\t"), ("|", "|")])
def test_other_separators_and_encodings(
    encoding: str, given: str, mark: str, tmp_path: Path, policy: DataPolicy
) -> None:
    text = 'größe,y\n" 1",süß\n-2.5,herb\n'.replace(",", mark)
    options = {"delimiter": given, "encoding": encoding}
    table = read_csv(text.encode(encoding), tmp_path, policy, **options)
    assert table.numeric_names == ("größe",)
    assert table.numeric.tolist() == [[1.0], [-2.5]]
    assert table.classes == ("herb", "süß")


def test_a_decimal_comma(tmp_path: Path, policy: DataPolicy) -> None:
    """A version such as 1.5 is then a name."""
    text = "x;version;y\n1,5;1.5;a\n-2;1.6;b\n1e-1;1.5;b\n"
    table = read_csv(text, tmp_path, policy, delimiter=";", decimal=",")
    assert table.numeric.tolist() == [[1.5], [-2.0], [0.1]]
    assert table.vocabularies == (("1.5", "1.6"),)
    with pytest.raises(
        DataError, match=r"has the value '1,5', which is not a number; .* data\.decimal"
    ):
        read_csv(text, tmp_path, policy, delimiter=";", target="x", classifies=False)


def test_tabs_by_the_files_ending(tmp_path: Path, policy: DataPolicy) -> None:
    path = tmp_path / "table.tsv.gz"
    path.write_bytes(gzip.compress(b"x\ty\n1\ta\n2\tb\n"))
    data = Data(source=path.as_uri(), target="y")
    assert open_table(data, policy, classifies=True).numeric.tolist() == [[1.0], [2.0]]


def test_a_file_that_is_not_in_the_stated_encoding(tmp_path: Path, policy: DataPolicy) -> None:
    text = b"x,y\n1,a\n2,\x81\n"
    with pytest.raises(
        DataError, match=r"is not cp1252, the encoding in data.encoding: the byte at offs"
    ):
        read_csv(text, tmp_path, policy, encoding="cp1252")


def test_a_number_to_predict(tmp_path: Path, policy: DataPolicy) -> None:
    table = read_csv("x,y\n1,0.5\n2,-7\n", tmp_path, policy, classifies=False)
    assert table.classes is None
    assert table.target.dtype == np.float64
    assert table.target.tolist() == [0.5, -7.0]


def test_quoted_fields_and_a_byte_order_mark(tmp_path: Path, policy: DataPolicy) -> None:
    text = '\ufeffname,y\n"a, b\nc",1\n"see ""x""",2\n'
    assert read_csv(text, tmp_path, policy).vocabularies == (("a, b\nc", 'see "x"'),)


def test_marks_of_inches_are_not_open_quotation_marks(tmp_path: Path, policy: DataPolicy) -> None:
    table = read_csv('x,y\n5",a\n7,b\n9,"c\r\nd"\n5",a 3"', tmp_path, policy)
    assert table.classes == ("a", 'a 3"', "b", "c\r\nd")


@SOAK
def test_a_column_that_turns_into_text_late_is_text(tmp_path: Path, policy: DataPolicy) -> None:
    """The first block of the file would have passed for numbers."""
    rows = [
        f"{'odd' if number == 900_000 else number % 7},{number % 2}" for number in range(900_001)
    ]
    table = read_csv("x,y\n" + "\n".join(rows), tmp_path, policy)
    assert table.vocabularies == (("0", "1", "2", "3", "4", "5", "6", "odd"),)
    assert len(table.target) == 900_001


IDENTIFIERS = "x,y\n" + "".join(f"id{number},{number % 2}\n" for number in range(100))
COMMAS = "x,y\n" + "".join(f'"1,{number}",{number % 2}\n' for number in range(100))
MEASURES = "x,y\n" + "".join(f"{number % 3},{number * 0.37}\n" for number in range(300))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "table.csv: is an empty file"),
        ("\n\n", "table.csv: is empty: it has no header"),
        ("x,y\n", "table.csv: has column names but no row"),
        ("\nx,y\n\n", "table.csv: has column names but no row"),
        ('x,y\n1,a\n2,"b\n3,c\n', "table.csv, line 3: has a quotation mark that is never closed"),
        ('x,y\n1,a\n2,"b\n' + "3,c\n" * 300_000, "check for an unclosed quotation mark"),
        (
            '{"x": 1, "y": 2}\n{"x": 3, "y": 4}\n',
            "if it is JSON, save the table as CSV or Parquet instead",
        ),
        (
            '[{"x": 1, "y": 2}, {"x": 1, "y": 2}]',
            "if it is JSON, save the table as CSV or Parquet instead",
        ),
        ("# of 2026\nx,y\n1,a\n", "if this is a comment, remove the lines above the header"),
        (
            bz2.compress(b"x,y\n1,a\n"),
            "table.csv: is compressed with bzip2: decompress it, or use gzip",
        ),
        (lzma.compress(b"x,y\n1,a\n"), "table.csv: is compressed with xz"),
        (b"PK\x03\x04...", "table.csv: is compressed with zip"),
        ("x,y\n1,a\n2\n", "table.csv, line 3: has 1 fields, but the header has 2"),
        ('x,y\n"1\n",a\n\n2,b,c\n', "table.csv, line 5: has 3 fields, but the header has 2"),
        ("x,y\n1,a\n\n,b\n", "table.csv, line 4: the column 'x' has no value"),
        ("x,y\n1,a\nNaN,b\n", "table.csv, line 3: the column 'x' has no value"),
        (
            "x,y\n1,a\n-inf,b\n",
            "table.csv, line 3: the column 'x' has the value -inf, which is not a finite",
        ),
        (
            "x,y\n1,a\n1e39,b\n",
            "table.csv, line 3: the column 'x' has the value 1e39, which is not a finite",
        ),
        ("x,y\nred,a\n,b\n", "table.csv, line 3: the column 'x' has no value"),
        ("x,y\n1,a\n2,\n", "table.csv, line 3: the target 'y' has no value"),
        ("x,y\n1,a\n2,a\n", "table.csv: the target 'y' has only one class, 'a', but needs two"),
        ("x,Y\n1,a\n", "there is no column 'y', only 'x', 'Y'; did you mean 'Y'?"),
        ("x;y\n1;2\n", "only 'x;y'; with data.delimiter: \";\", the header would have 2 columns"),
        ("x|y\n1|2\n", 'data.delimiter: "|", the header would have 2 columns'),
        ("x\ty\n1\t2\n", "data.delimiter: tab, the header would have 2 columns"),
        ("x,y\n1,a\n".encode("utf-16"), "set data.encoding to the file's encoding, such as utf-16"),
        ("x,y\n1,a\n".encode("utf-16-le"), "set data.encoding, for example to utf-16-le"),
        (COMMAS, "'x' has a different string in every row, so a model can't learn from it; leave"),
        (COMMAS, 'to read this value as a number, set data.decimal: ","'),
        ("y\n1\n2\n", "table.csv: has no columns other than the target"),
        ("x,x,y\n1,2,3\n", "table.csv: has 2 columns with the name 'x'"),
        (",y\n1,2\n", "table.csv: column 1 has no name"),
        (b"x,y\n1,\xff\n", "table.csv: is not UTF-8: the byte at offset 6 is invalid"),
        (b"x,y\n1,\xff\n", "set data.encoding to the file's encoding, such as latin-1 or cp1252"),
        (IDENTIFIERS, "the column 'x' has a different string in every row"),
        (
            MEASURES,
            "the target 'y' has more than 100 different fractional values, so they are not classes",
        ),
        ('x,y\n"' + "z" * (5 << 20), "check for an unclosed quotation mark"),
    ],
)
def test_errors_name_the_fault_of_a_csv_file(
    text: str | bytes, fault: str, tmp_path: Path, policy: DataPolicy
) -> None:
    with pytest.raises(DataError) as raised:
        read_csv(text, tmp_path, policy)
    assert fault in str(raised.value)
    assert str(raised.value).startswith("file:///")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"features": ["z"]}, "data.features: there is no column 'z', only 'x', 'y'"),
        ({"features": ["y"]}, "data.features: 'y' is the target"),
        ({"categorical": ["xx"]}, "data.categorical: there is no feature 'xx', only 'x'"),
        ({"size_bytes": 7}, "has 12 bytes, but data.size_bytes is 7"),
        ({"sha256": "0" * 64}, f"but data.sha256 is {'0' * 64}"),
    ],
)
def test_options_that_do_not_fit_the_file(
    options: dict[str, Any], fault: str, tmp_path: Path, policy: DataPolicy
) -> None:
    with pytest.raises(DataError) as raised:
        read_csv("x,y\n1,a\n2,b\n", tmp_path, policy, **options)
    assert fault in str(raised.value)


def test_a_category_of_too_many_names(tmp_path: Path, policy: DataPolicy) -> None:
    text = "x,y\n" + "".join(f"n{number // 2},{number % 2}\n" for number in range(200_004))
    with pytest.raises(DataError, match="'x' has more than 100,000 different names"):
        read_csv(text, tmp_path, policy)
    with pytest.raises(DataError, match=r"'y' has more than 10,000 different names; .*regression"):
        read_csv("x,y\n" + "".join(f"1,{number}\n" for number in range(20_000)), tmp_path, policy)


def test_a_row_is_named_though_another_column_is_no_text(
    tmp_path: Path, policy: DataPolicy
) -> None:
    text = b"x,note,y\n" + b"1,ok,a\n" * 9998 + b"1,\xff,a\n,ok,b\n"
    with pytest.raises(DataError, match=r"table\.csv, row 10000: the column 'x' has no value"):
        read_csv(text, tmp_path, policy, features=["x"])


def test_regression_does_not_predict_text(tmp_path: Path, policy: DataPolicy) -> None:
    with pytest.raises(
        DataError,
        match="line 3: the target 'y' has the value 'many', which is not a number; regression",
    ):
        read_csv("x,y\n1,2\n2,many\n", tmp_path, policy, classifies=False)


def test_a_compressed_csv_file(tmp_path: Path, policy: DataPolicy) -> None:
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress(b"x,y\n1,a\n2,b\n"))
    data = Data(source=path.as_uri(), target="y")
    assert open_table(data, policy, classifies=True).target.tolist() == [0, 1]
    path.write_bytes(gzip.compress(b"x,y\n1,a\n2,b\n")[:-6])
    with pytest.raises(DataError, match=r"table\.csv\.gz: can't be unpacked completely"):
        open_table(data, policy, classifies=True)


def parquet_file(columns: dict[str, Any], path: Path) -> Data:
    parquet.write_table(pa.table(columns), path)
    return Data(source=path.as_uri(), target="y")


def test_parquet_keeps_its_types(tmp_path: Path, policy: DataPolicy) -> None:
    columns = {
        "count": pa.array([1, 2, 3], pa.int16()),
        "ok": pa.array([True, False, True]),
        "kind": pa.array(["b", "a", "b"]).dictionary_encode(),
        "y": pa.array([2.0, 1.0, 2.0]),
    }
    table = open_table(parquet_file(columns, tmp_path / "t.parquet"), policy, classifies=True)
    assert table.numeric_names == ("count", "ok")
    assert table.numeric.tolist() == [[1, 1], [2, 0], [3, 1]]
    assert table.vocabularies == (("a", "b"),)
    assert table.classes == ("1", "2")
    assert table.target.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"x": [1, None, 3], "y": [1, 2, 3]}, "row 2: the column 'x' has no value"),
        ({"x": [1.0, float("nan"), 3.0], "y": [1, 2, 3]}, "row 2: the column 'x' has no value"),
        ({"x": [[1], [2]], "y": [1, 2]}, "'x' has the type list<element: int64>, but only numb"),
        ({"x": [1, 2], "y": [None, 2]}, "row 1: the target 'y' has no value"),
        ({"x": [1, 2], "z": [1, 2]}, "there is no column 'y', only 'x', 'z'"),
    ],
)
def test_errors_name_the_fault_of_a_parquet_file(
    columns: dict[str, Any], fault: str, tmp_path: Path, policy: DataPolicy
) -> None:
    data = parquet_file(columns, tmp_path / "t.parquet")
    with pytest.raises(DataError) as raised:
        open_table(data, policy, classifies=True)
    assert fault in str(raised.value)


def test_a_parquet_file_cut_short(tmp_path: Path, policy: DataPolicy) -> None:
    path = tmp_path / "t.parquet"
    data = parquet_file({"x": list(range(1000)), "y": [0, 1] * 500}, path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="is not a Parquet file, or is incomplete"):
        open_table(data, policy, classifies=True)


def npz_file(path: Path, **arrays: Any) -> Data:
    np.savez(path, **arrays)
    return Data(source=path.as_uri())


def test_npz_as_a_table(tmp_path: Path, policy: DataPolicy) -> None:
    x = np.asfortranarray(np.arange(6, dtype=np.int64).reshape(3, 2))
    table = open_table(
        npz_file(tmp_path / "t.npz", x=x, y=np.array(["b", "a", "b"])), policy, classifies=True
    )
    assert table.numeric.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert table.numeric_names == ("x0", "x1")
    assert table.classes == ("a", "b")
    assert table.target.tolist() == [1, 0, 1]
    numbers = open_table(
        npz_file(tmp_path / "n.npz", x=np.ones(2), y=np.array([[0.5], [2.0]])),
        policy,
        classifies=False,
    )
    assert numbers.numeric.shape == (2, 1)
    assert numbers.target.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("arrays", "fault"),
    [
        ({"x": np.ones((3, 2)), "y": np.array([0, 1])}, "has 2 values, but 'x' has 3 samples"),
        ({"x": np.ones((2, 2, 2)), "y": np.array([0, 1])}, "array 'x': has the shape (2, 2, 2)"),
        ({"x": np.ones(2), "y": np.ones((2, 2))}, "array 'y': has the shape (2, 2)"),
        ({"x": np.ones(2), "y": np.array([{}, []], dtype=object)}, "'y': contains Python objects"),
        ({"x": np.array([1, np.nan]), "y": np.array([0, 1])}, "array 'x', sample 1: has a value"),
        ({"a": np.ones(2), "y": np.array([0, 1])}, "there is no array 'x', only 'a', 'y'"),
        ({"x": np.ones(2), "y": np.array([1, 1])}, "array 'y': has only one class, '1'"),
        ({"x": np.ones(0), "y": np.ones(0)}, "array 'y': is empty"),
        ({"x": np.array(["a", "b"]), "y": np.array([0, 1])}, "array 'x': has the shape (2,)"),
        ({"x": np.ones(2), "y": np.array([0, np.nan])}, "array 'y': has a value that is missing"),
        (
            {"x": np.ones(200), "y": np.arange(200) * 0.37},
            "array 'y': has more than 100 different fractional values",
        ),
        (
            {"x": np.ones(20_000), "y": np.arange(20_000)},
            "array 'y': has more than 10,000 different values",
        ),
    ],
)
def test_errors_name_the_fault_of_an_npz_file(
    arrays: dict[str, Any], fault: str, tmp_path: Path, policy: DataPolicy
) -> None:
    with pytest.raises(DataError) as raised:
        open_table(npz_file(tmp_path / "t.npz", **arrays), policy, classifies=True)
    assert fault in str(raised.value)


def test_npz_targets_that_are_text_are_no_numbers(tmp_path: Path, policy: DataPolicy) -> None:
    data = npz_file(tmp_path / "t.npz", x=np.ones(2), y=np.array(["a", "b"]))
    with pytest.raises(DataError, match="array 'y': is text, but regression predicts numbers"):
        open_table(data, policy, classifies=False)


def test_a_file_that_is_no_npz(tmp_path: Path, policy: DataPolicy) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match=r"t\.npz: is not an npz file, or is incomplete"):
        open_table(Data(source=path.as_uri()), policy, classifies=True)


def test_a_column_that_divides_the_rows_is_no_feature(tmp_path: Path, policy: DataPolicy) -> None:
    text = "x,split,y\n" + "".join(
        f"{at},{('train', 'Test')[at % 3 > 1]},{at % 2}\n" for at in range(30)
    )
    with pytest.raises(
        DataError, match=r"'split' splits the rows .*data\.features, and include this"
    ):
        read_csv(text, tmp_path, policy)
    assert read_csv(text, tmp_path, policy, features=["x", "split"]).category_names == ("split",)


MEASURED = [f"{at * 0.37:.2f}" for at in range(200)]


@pytest.mark.parametrize(
    ("cell", "fragment"),
    [
        (
            "oops",
            "line 102: the column 'x' has the value 'oops', which is not a number, "
            "although 199 of its 200 values are",
        ),
        ('"1,163.74"', 'set data.numbers: {thousands: ","}; correct the file'),
        ("88%", 'set data.numbers: {units: ["%"]}; correct the file'),
        ("$100.50", 'data.numbers: {units: ["$"]}'),
        ("5%", 'data.numbers: {units: ["%"]}'),
        ('"-$1,100.50"', 'data.numbers: {thousands: ",", units: ["$"]}'),
        ('"12,5"', 'data.decimal: ","'),
        ('"1.163,74"', 'data.decimal: "," with data.numbers: {thousands: "."}'),
    ],
)
def test_a_bad_cell_among_numbers_is_named(
    cell: str, fragment: str, tmp_path: Path, policy: DataPolicy
) -> None:
    cells = [*MEASURED[:100], cell, *MEASURED[101:]]
    text = "x,y\n" + "".join(f"{one},{at % 2}\n" for at, one in enumerate(cells))
    with pytest.raises(DataError) as raised:
        read_csv(text, tmp_path, policy)
    assert fragment in str(raised.value)
    assert "table.csv, line 102: the column 'x'" in str(raised.value)
    assert read_csv(text, tmp_path, policy, categorical=["x"]).category_names == ("x",)


def test_codes_that_are_partly_numbers_are_categories(tmp_path: Path, policy: DataPolicy) -> None:
    text = "x,y\n" + "".join(f"{'3a' if at % 20 == 0 else at % 6},{at % 2}\n" for at in range(200))
    assert read_csv(text, tmp_path, policy).category_names == ("x",)


def test_numbers_with_separators_and_units(tmp_path: Path, policy: DataPolicy) -> None:
    text = 'x,p,y\n"$1,163.74",5%,"1,000"\n$100.50,-2.5 %,2000\n-$7,0%,"3,000,000"\n'
    numbers = {"thousands": ",", "units": ["$", "%"]}
    table = read_csv(text, tmp_path, policy, classifies=False, numbers=numbers)
    assert table.numeric.tolist() == [[1163.74, 5], [100.5, -2.5], [-7, 0]]
    assert table.target.tolist() == [1000, 2000, 3_000_000]
    german = "x;y\n1.163,74 \u20ac;a\n0,5 \u20ac;b\n"
    numbers = {"thousands": ".", "units": ["\u20ac"]}
    table = read_csv(german, tmp_path, policy, delimiter=";", decimal=",", numbers=numbers)
    assert table.numeric.tolist() == [[1163.74], [0.5]]
    spaced = "x,y\n1\u202f163.74,a\n12 345,b\n"
    table = read_csv(spaced, tmp_path, policy, numbers={"thousands": " "})
    assert table.numeric.tolist() == [[1163.74], [12345]]
