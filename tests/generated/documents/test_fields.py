"""Each field of a job document is in a document that is launched, and something reads it."""

from __future__ import annotations

from dray.input import validation
from tests.generated.documents.bases import BASES, ELSEWHERE
from tests.generated.documents.fields import ROOT, all_fields, read_names, set_fields


def test_each_field_is_in_a_document_that_is_launched() -> None:
    given = {name for base in BASES for name in set_fields(validation.check(base))}
    lacking = all_fields().keys() - given
    assert lacking <= ELSEWHERE.keys(), "add it to a document of bases.py"
    assert all((ROOT / place).is_file() for place in ELSEWHERE.values())


def test_each_field_is_read() -> None:
    read = read_names()
    unread = {name for name, attribute in all_fields().items() if attribute not in read}
    assert not unread, "nothing but the check of the document reads it"
