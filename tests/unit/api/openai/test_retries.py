"""Requests that OpenAI's client repeats by itself, because their answers were lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from api.openai.errors import status_of
from dray import views
from service.jobs.tuning_requests import TuningRequests
from tests.unit.api.openai.conftest import ANN, LINES, Shop, jsonl
from tests.unit.api.serving import DEADLINE_S

openai = pytest.importorskip(
    "openai", reason="the extra 'dev' is not installed: openai, whose client fine-tunes with dray"
)
httpx2 = pytest.importorskip("httpx2", reason="openai's client uses httpx2")


class LossyTransport(httpx2.HTTPTransport):  # type: ignore[misc]
    """A connection on which the fates of the next requests are known: `lost` (the server answers,
    and the answer is lost), `refused` (the request does not reach the server), or `answered`."""

    def __init__(self) -> None:
        super().__init__()
        self.fates: list[str] = []
        self.sent: list[Any] = []

    def handle_request(self, request: Any) -> Any:
        fate = self.fates.pop(0) if self.fates else "answered"
        self.sent.append(request)
        if fate == "refused":
            return httpx2.Response(503, request=request)
        answer = super().handle_request(request)
        if fate == "lost":
            answer.read()
            raise httpx2.ReadTimeout("the answer is lost", request=request)
        return answer


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> LossyTransport:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    return LossyTransport()


@pytest.fixture
def retrying(shop: Shop, line: LossyTransport) -> Iterator[Any]:
    """OpenAI's client, which repeats a request up to three times."""
    http = openai.DefaultHttpxClient(transport=line)
    with openai.OpenAI(
        base_url=f"{shop.server.url}/openai/v1",
        api_key=ANN,
        max_retries=3,
        timeout=DEADLINE_S,
        http_client=http,
    ) as client:
        yield client


def num_jobs(shop: Shop, name: str) -> int:
    listed = shop.http().get("/v1/jobs", params={"name": name, "limit": 500})
    return sum(one["name"] == name for one in listed.json()["items"])


def test_a_lost_answer_makes_one_job(
    shop: Shop, retrying: Any, line: LossyTransport, training: str
) -> None:
    line.fates = ["lost", "lost"]
    job = retrying.fine_tuning.jobs.create(
        model="llama-tiny", training_file=training, suffix="lost answers"
    )
    assert [one.headers["x-stainless-retry-count"] for one in line.sent] == ["0", "1", "2"]
    assert not any("idempotency-key" in one.headers for one in line.sent), "the client sends none"
    assert num_jobs(shop, "lost answers") == 1
    assert retrying.fine_tuning.jobs.retrieve(job.id).id == job.id
    again = retrying.fine_tuning.jobs.create(
        model="llama-tiny", training_file=training, suffix="lost answers"
    )
    assert again.id != job.id
    assert num_jobs(shop, "lost answers") == 2


@pytest.mark.parametrize("seed", range(4))
def test_each_call_makes_one_job_whatever_is_lost(
    shop: Shop, retrying: Any, line: LossyTransport, training: str, seed: int
) -> None:
    """Compared with a count: each call is one job. The first try reaches the server, because a
    request that the server has never seen can't be distinguished from a repetition."""
    draw = random.Random(seed)
    names = [f"run {seed}{letter}" for letter in "ab"]
    expected = dict.fromkeys(names, 0)
    ids = set()
    for _ in range(8):
        name = draw.choice(names)
        tries = draw.randrange(3)
        line.fates = ["lost"] * bool(tries) + draw.choices(["lost", "refused"], k=max(0, tries - 1))
        job = retrying.fine_tuning.jobs.create(
            model="llama-tiny", training_file=training, suffix=name
        )
        expected[name] += 1
        ids.add(job.id)
    assert len(ids) == 8
    assert {name: num_jobs(shop, name) for name in names} == expected


def test_a_request_with_a_key_is_repeated_with_the_key(
    shop: Shop, retrying: Any, training: str
) -> None:
    def create(name: str, key: str) -> str:
        return str(
            retrying.fine_tuning.jobs.create(
                model="llama-tiny",
                training_file=training,
                suffix=name,
                extra_headers={"Idempotency-Key": key},
            ).id
        )

    first = create("keyed", "k1")
    assert create("keyed", "k1") == first
    assert create("keyed", "k2") != first
    with pytest.raises(openai.BadRequestError) as refused:
        create("other", "k1")
    assert refused.value.body["code"] == "idempotency_key_reused"
    with pytest.raises(openai.BadRequestError) as refused:
        create("other", "x" * 256)
    assert refused.value.body["code"] == "bad_idempotency_key"
    assert num_jobs(shop, "keyed") == 2


def test_a_request_is_repeated_after_its_file_was_deleted(
    shop: Shop, retrying: Any, line: LossyTransport
) -> None:
    """With a key, and when the response was lost."""
    create = retrying.fine_tuning.jobs.create
    for name, headers in (("keyed file", {"Idempotency-Key": "k9"}), ("lost file", {})):
        file = retrying.files.create(file=jsonl(LINES), purpose="fine-tune").id
        asked = {"model": "llama-tiny", "training_file": file, "suffix": name}
        first = create(**asked, extra_headers=headers)
        retrying.fine_tuning.jobs.cancel(first.id)
        retrying.files.delete(file)
        if not headers:  # the client sends the number of the try
            headers = {"x-stainless-retry-count": "1"}
        again = create(**asked, extra_headers=headers)
        assert (again.id, again.status) == (first.id, "cancelled")
        assert num_jobs(shop, name) == 1
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            create(**asked, extra_headers={"Idempotency-Key": f"another {name}"})
        with pytest.raises(openai.BadRequestError) as refused:
            create(**{**asked, "seed": 3}, extra_headers={"Idempotency-Key": "k9"})
        assert refused.value.body["code"] == "idempotency_key_reused"


@pytest.mark.parametrize("count", ["", "0", "00", "-1", "1.5", "one", "1" * 5000, "\u0661"])
@pytest.mark.parametrize("timeout", ["nan", "inf", "1e400", "-5", "600", "9" * 9])
def test_strange_headers_are_no_errors(shop: Shop, training: str, count: str, timeout: str) -> None:
    headers = {
        "x-stainless-retry-count": count.encode(),
        "x-stainless-read-timeout": timeout.encode(),
    }
    body = {"model": "llama-tiny", "training_file": training, "suffix": "strange", "seed": -1}
    answer = shop.http().post("/openai/v1/fine_tuning/jobs", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")
    body["seed"] = 1
    assert shop.http().post("/openai/v1/fine_tuning/jobs", json=body, headers=headers).is_success


def test_users_repeat_only_their_own_requests(shop: Shop) -> None:
    """Another user's request with the same body has its own key."""
    own = shop.server.await_(_keys(shop, "ann"))
    assert shop.server.await_(_keys(shop, "ann")) == own
    assert shop.server.await_(_keys(shop, "bob")) != own


async def _keys(shop: Shop, owner: str) -> str:
    runtime = shop.server.context.runtime
    tuning = TuningRequests(runtime.database, runtime.jobs)
    found = await tuning.key(owner, "f" * 64, repeats_within=timedelta(minutes=10))
    return found.key


def test_a_request_that_is_processed_is_repeated_by_the_client() -> None:
    codes = {"idempotency_in_flight": 409, "idempotency_key_reused": 400, "conflict": 400}
    for code, status in codes.items():
        problem = views.Problem(type="t", title="t", status=409, detail="d", code=code)
        assert status_of(problem) == status
