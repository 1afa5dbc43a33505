"""The server has nothing that reveals one client's update."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dray.secure_aggregation import keys
from dray.secure_aggregation.client import MaskingClient
from dray.secure_aggregation.fixed_point import FixedPoint
from dray.secure_aggregation.messages import (
    ConsistencyCodes,
    DeliveredShares,
    MaskingPhase,
    MessageRefused,
    RevealedShares,
    Roster,
    Survivors,
)
from tests.unit.secure_aggregation.rounds import Round


def everything(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """Return all bytes reachable from an object. seen: objects already visited, which must stay
    alive because otherwise their ids could be reused."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    match value:
        case bytes():
            yield value
        case str():
            with contextlib.suppress(ValueError):
                yield base64.b64decode(value, altchars=b"-_", validate=True)
        case np.ndarray():
            yield value.tobytes()
        case dict():
            for pair in value.items():
                yield from everything(pair, seen)
        case list() | tuple() | set() | frozenset():
            for one in value:
                yield from everything(one, seen)
        case _ if hasattr(value, "__dict__"):
            yield from everything(vars(value), seen)


def common_seed(played: Round, one: str, other: str) -> bytes:
    """The seed of the mask of two clients."""
    client = played.clients[one]
    public = client._others[other].masking_key
    return client._masking.agree(public, keys.MASKS, client._transcript)


def test_all_that_the_server_has_tells_no_update_of_a_client() -> None:
    """The view is searched for the updates, for seeds of the masks that remain in them, and for the
    keys from which these seeds could be computed."""
    played = Round()
    gone, late = played.names[:2], played.names[2:3]
    masked_inputs: dict[str, bytes] = {}
    played.until(MaskingPhase.MASKED_INPUT)
    for name in played.names[2:]:
        masked_inputs[name] = played.clients[name].answer(played.messages[name])
        played.server.receive(name, MaskingPhase.MASKED_INPUT, masked_inputs[name])
    played.messages = played.server.advance()
    found = played.play({MaskingPhase.UNMASK: late})
    survivors = played.names[2:]
    np.testing.assert_allclose(found.mean, played.plain_mean(survivors), rtol=0, atol=1e-6)

    # Include everything that it was sent, although it does not keep all of it.
    sent = [*map(json.loads, played.sent), *masked_inputs.values()]
    has = b"|".join(everything([played.server, sent], {}))
    assert played.clients[survivors[0]]._seed in has, "the search finds what is there"
    assert common_seed(played, gone[0], survivors[0]) in has
    encoding = FixedPoint.of(played.settings, 10)
    for name in survivors:
        client = played.clients[name]
        plain = encoding.encode(played.updates[name], played.weights[name])
        assert plain.tobytes() not in has
        assert played.updates[name].tobytes() not in has
        assert client._masking.private not in has
        assert client._sealing.private not in has
        for other in survivors:
            assert other == name or common_seed(played, name, other) not in has
        # Its own mask and those with lost clients are known. What they leave is still random.
        rest = np.frombuffer(masked_inputs[name], encoding.dtype).copy()
        encoding.add_mask(rest, client._seed, -1)
        for other in gone:  # whose names come first
            encoding.add_mask(rest, common_seed(played, other, name), 1)
        difference = (rest - plain).astype(np.float64) / 2.0**64
        assert 0.2 < difference.mean() < 0.8
        assert difference.std() > 0.2, "of a uniform distribution it is 0.29"
    for name in gone:
        assert played.clients[name]._seed not in has, "a late update of it would stay hidden"


def revealed(answer: bytes) -> RevealedShares:
    return RevealedShares.from_bytes(answer, "client")


def test_a_client_never_reveals_both_secrets_of_another() -> None:
    played = Round()
    gone = played.names[:2]
    played.until(MaskingPhase.MASKED_INPUT)
    played.phase(lost=gone)
    played.phase()
    for name, message in played.messages.items():
        found = revealed(played.clients[name].answer(message))
        assert found.seeds.keys() == {*played.names} - {*gone}
        assert found.masking_keys.keys() == {*gone}
        with pytest.raises(MessageRefused, match="has already sent its messages in all phases"):
            played.clients[name].answer(message)


def test_a_server_that_names_other_survivors_to_some_gets_no_shares_of_them() -> None:
    """The server would get a client's masking key from these, and its seed from the others."""
    played = Round()
    played.until(MaskingPhase.CONSISTENCY_CHECK)
    told_that_it_was_lost, others = played.names[1:6], [played.names[0], *played.names[6:]]
    all_told = played.names[1:]  # of the first, some have no code
    without = Survivors(clients=all_told).to_bytes()
    codes: dict[str, dict[str, bytes]] = {name: {} for name in played.names}
    for name, client in played.clients.items():
        told = without if name in told_that_it_was_lost else played.messages[name]
        answer = ConsistencyCodes.from_bytes(client.answer(told), name)
        for other, code in answer.codes.items():
            codes[other][name] = code
    for name, client in played.clients.items():
        with pytest.raises(MessageRefused, match="have confirmed the same survivors, but"):
            client.answer(ConsistencyCodes(codes=codes[name]).to_bytes())
        # Not even with the codes of all clients that were told the same: they are too few.
        side = told_that_it_was_lost if name in told_that_it_was_lost else others
        same = {one: code for one, code in codes[name].items() if one in side}
        with pytest.raises(MessageRefused, match="but 6 are required to keep updates hidden"):
            client.answer(ConsistencyCodes(codes=same).to_bytes())


def told(client: MaskingClient, message: bytes, reason: str) -> None:
    with pytest.raises(MessageRefused, match=rf"message from the server is refused: .*{reason}"):
        client.answer(message)


def test_a_client_refuses_messages_of_the_server_that_would_hide_it_less() -> None:
    played = Round()
    name = played.names[0]
    client = played.clients[name]
    played.until(MaskingPhase.SHARE_KEYS)
    entries = Roster.from_bytes(played.messages[name], "server").clients
    told(client, Roster(clients=entries[:2]).to_bytes(), "2 clients are in the roster, but")
    told(client, Roster(clients=entries[1:]).to_bytes(), f"does not contain the keys of {name}")
    told(client, Roster(clients=[*entries, entries[1]]).to_bytes(), "duplicate client or key")
    forged = entries[0].model_copy(update={"masking_key": bytes(32)})
    told(client, Roster(clients=[forged, *entries[1:]]).to_bytes(), f"the keys of {name}")
    played.phase()
    delivered = DeliveredShares.from_bytes(played.messages[name], "server")
    few = dict(list(delivered.shares.items())[:4])
    told(
        client,
        DeliveredShares(shares=few).to_bytes(),
        "the digests in the message do not match the shares",
    )
    digests = {one: (delivered.digests or {})[one] for one in few}
    few_of_both = DeliveredShares(shares=few, digests=digests).to_bytes()
    told(client, few_of_both, "5 clients have shared .* 6 are required")
    played.phase()
    told(client, Survivors(clients=played.names[:5]).to_bytes(), "5 clients have survived")
    told(
        client,
        Survivors(clients=played.names[1:]).to_bytes(),
        "must be listed exactly once among the survivors",
    )
    told(client, Survivors(clients=[*played.names, "x"]).to_bytes(), "has not shared its keys")
    played.phase()
    assert revealed(client.answer(played.messages[name])).masking_keys == {}


def test_clients_that_were_shown_different_rosters_have_no_keys_in_common() -> None:
    """A share that was sealed for one purpose is useless for the other, and no code fits."""
    played, name = Round(), "client 000"
    played.until(MaskingPhase.SHARE_KEYS)
    entries = Roster.from_bytes(played.messages[name], "server").clients
    other = Roster(clients=[*entries[:-1], entries[-1].model_copy(update={"name": "an impostor"})])
    played.messages = {**played.messages, name: other.to_bytes()}
    with pytest.raises(
        MessageRefused,
        match=f"{name} .*the message must contain exactly one share for each of the other clients",
    ):
        played.phase()
