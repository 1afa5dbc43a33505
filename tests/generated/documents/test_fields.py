"""Each field of a job document is in a document that is launched, and something reads it."""

from __future__ import annotations

from dray.input import validation
from tests.generated.documents.bases import BASES, ELSEWHERE
from tests.generated.documents.fields import all_fields, set_fields
from tests.generated.documents.readers import ROOT, Program


def test_each_field_is_in_a_document_that_is_launched() -> None:
    given = {name for base in BASES for name in set_fields(validation.check(base))}
    lacking = all_fields() - given
    assert lacking <= ELSEWHERE.keys(), "add it to a document of bases.py"
    assert all((ROOT / place).is_file() for place in ELSEWHERE.values())


def test_each_field_is_read() -> None:
    converted = {"JobSpec.time_zone"}  # the check replaces it by offsets in the other fields
    unread = all_fields() - Program().read() - converted
    assert not unread, "nothing but the check of the document reads it"
