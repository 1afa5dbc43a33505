"""Clients that lie about shares: the round still ends, or names the liars. A client that has
followed the protocol is never named."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.secure_aggregation import keys
from dray.secure_aggregation.client import MaskingClient
from dray.secure_aggregation.messages import (
    KEY_BYTES,
    MaskingPhase,
    MaskingSettings,
    MessageRefused,
    TooFewClients,
    WrongShares,
)
from dray.secure_aggregation.reconstruction import MAX_SUBSETS, Reconstruction
from tests.marks import SOAK, soak
from tests.unit.secure_aggregation.liars import AS_HOLDER, AS_OWNER, Liar
from tests.unit.secure_aggregation.rounds import PHASES, Round

Make = Callable[[str, MaskingSettings], MaskingClient]


def lying(rng: random.Random, *lies: str, part: float = 1.0) -> Make:
    def make(name: str, given: MaskingSettings) -> MaskingClient:
        return Liar(name, given, lies, rng, part)

    return make


def round_of(num_clients: int, makers: dict[int, Make], **changes: object) -> Round:
    """A round in which these clients are liars."""
    played = Round(num_clients, num_values=4, **changes)
    for at, make in makers.items():
        name = played.names[at]
        client = played.clients[name] = make(name, played.settings)
        client.provide(played.updates[name], played.weights[name])
    return played


def play(played: Round, lost: dict[MaskingPhase, set[str]]) -> bool:
    """Whether the round has a result, which is then checked. Clients that refuse a message from the
    server, or whose message is refused, are lost."""
    server, gone = played.server, set[str]()
    has_sent: list[str] = []
    while (phase := server.phase) is not MaskingPhase.ENDED:
        gone |= lost.get(phase, set())
        for name, message in played.messages.items():
            if name in gone:
                continue
            try:
                server.receive(name, phase, played.clients[name].answer(message))
            except MessageRefused:
                gone.add(name)
        if phase is MaskingPhase.MASKED_INPUT:
            has_sent = sorted(server.answered)
        try:
            played.messages = server.advance()
        except (TooFewClients, WrongShares):
            return False
    found = server.aggregate()
    assert found.clients == tuple(has_sent)
    np.testing.assert_allclose(found.sums, played.plain_sum(has_sent), rtol=0, atol=1e-6)
    return True


@SOAK
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 12), st.sampled_from([0.51, 0.6, 0.8, 1.0]))
def test_no_honest_client_is_blamed_whoever_lies(seed: int, size: int, threshold: float) -> None:
    """Any number of liars, up to all clients but one, and any clients that disappear."""
    rng = random.Random(seed)
    liars = set(rng.sample(range(size), rng.randrange(1, size)))
    makers: dict[int, Make] = {}
    for at in liars:
        lies = rng.sample([*AS_OWNER, *AS_HOLDER], rng.randint(1, 3))
        part = rng.choice([0.2, 0.6, 1.0])
        makers[at] = lying(rng, *lies, part=part)
    played = round_of(size, makers, threshold=threshold)
    lost = {phase: {n for n in played.names if rng.random() < 0.05} for phase in PHASES}
    play(played, lost)
    assert played.server.liars.keys() <= {played.names[at] for at in liars}


@pytest.mark.parametrize(
    ("size", "num_liars"), [(10, 4), (40, 16), soak(200, 80)], ids=["10", "40", "200"]
)
@pytest.mark.parametrize("lie", ["shares", "own seed", "accusations", "silence", "digests"])
def test_a_round_ends_with_as_many_liars_as_may_be_lost(
    size: int, num_liars: int, lie: str
) -> None:
    """With a threshold of 0.6, four of ten clients can be lost. All proven liars are named."""
    rng = random.Random(0)
    liars = range(0, 2 * num_liars, 2)
    makers: dict[int, Make] = {at: lying(rng, lie) for at in liars}
    played = round_of(size, makers)
    assert play(played, {}), "the honest ones are enough"
    is_proven = lie in ("shares", "own seed", "digests")
    names = {played.names[at] for at in liars} if is_proven else set[str]()
    assert played.server.liars.keys() == names


@pytest.mark.parametrize("lie", ["commitment", "unfitting"])
def test_an_owner_whose_shares_do_not_give_its_secret_breaks_the_round_by_its_name(
    lie: str,
) -> None:
    rng = random.Random(1)
    liar = lying(rng, lie)
    played = round_of(10, {4: liar})
    assert not play(played, {MaskingPhase.UNMASK: {"client 004"}})
    assert played.server.liars.keys() == {"client 004"}
    assert played.server.lost_secrets == {"client 004"}


def test_a_secret_that_is_lost_is_that_of_a_client_that_has_vanished() -> None:
    """Unreadable shares name no liar: their owner has sealed them badly, or too many holders claim
    that they can't read them. An owner that remains reveals its seed itself."""
    rng = random.Random(2)
    owner = lying(rng, "garbage")
    assert play(round_of(10, {4: owner}), {})
    played = round_of(10, {4: owner})
    assert not play(played, {MaskingPhase.UNMASK: {"client 004"}})
    assert not played.server.liars
    assert played.server.lost_secrets == {"client 004"}
    deniers = lying(rng, "accusations")
    played = round_of(10, dict.fromkeys(range(5), deniers))
    assert not play(played, {MaskingPhase.UNMASK: {"client 009"}})
    assert not played.server.liars
    assert played.server.lost_secrets == {"client 009"}


def test_wrong_codes_of_one_client_do_not_end_the_round() -> None:
    rng = random.Random(3)
    liar = lying(rng, "codes")
    assert play(round_of(10, {4: liar}), {})


def old(name: str, given: MaskingSettings) -> MaskingClient:
    return MaskingClient(name, given, version=1)


def test_a_round_with_an_old_client_is_of_its_version_and_bears_wrong_shares() -> None:
    """Subsets of the shares are tried against the commitment. It is impossible to know whether the
    owner of a wrong share or its holder lied, so neither of them is named a liar."""
    rng = random.Random(4)
    liar = lying(rng, "shares")
    played = round_of(10, {0: liar, 3: old, 5: liar})
    assert play(played, {MaskingPhase.MASKED_INPUT: {"client 009"}})
    server = played.server
    assert server.version == 1
    assert not server.liars
    assert {holder for _, holder in server.disputes} == {"client 000", "client 005"}
    assert b"digests" not in b"".join(played.sent)


def test_a_server_may_refuse_old_clients_by_name() -> None:
    played = round_of(10, {3: old})
    played.server = type(played.server)(played.settings, oldest_version=2)
    with pytest.raises(MessageRefused, match=r"client 003 .* version 1 .* pip install -U"):
        played.phase()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 9), st.integers(0, 6))
def test_subsets_find_the_secret_whenever_enough_shares_are_right(
    seed: int, least: int, num_more: int
) -> None:
    """All subsets of few shares are tried, so it is found if `least` shares are right."""
    rng = random.Random(seed)
    names = [f"{at:02}" for at in range(least + num_more)]
    secret = rng.randbytes(KEY_BYTES)
    shares = dict(zip(names, keys.split(secret, least, len(names)), strict=True))
    wrong = rng.sample(names, rng.randint(0, len(names)))
    for name in wrong:
        shares[name] = b"\0" + rng.randbytes(KEY_BYTES)
    rebuilt = Reconstruction({name: at for at, name in enumerate(names, 1)}, least)
    if len(names) - len(wrong) >= least and comb(len(names), least) <= MAX_SUBSETS:
        assert rebuilt.secret("x", shares, lambda s: s == secret, has_digests=False) == secret
        in_doubt = {holder for _, holder in rebuilt.disputes}
        assert in_doubt <= {*wrong}
    elif len(names) - len(wrong) < least:
        with pytest.raises(WrongShares, match="secret of client x can't be reconstructed"):
            rebuilt.secret("x", shares, lambda found: found == secret, has_digests=False)
    assert not rebuilt.liars


def test_the_number_of_subsets_is_bounded_in_a_round() -> None:
    names = [f"{at:03}" for at in range(100)]
    rebuilt = Reconstruction({name: at for at, name in enumerate(names, 1)}, 60)
    tried: list[bytes] = []

    def fits(secret: bytes) -> bool:
        tried.append(secret)
        return False

    shares = dict(zip(names, keys.split(bytes(32), 60, 100), strict=True))
    for _ in range(3):
        with pytest.raises(WrongShares):
            rebuilt.secret("x", shares, fits, has_digests=False)
    assert len(tried) == MAX_SUBSETS + 3
