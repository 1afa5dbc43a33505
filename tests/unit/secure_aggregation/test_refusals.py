"""The server refuses wrong messages, names the client, and continues without it."""

from __future__ import annotations

import numpy as np
import pytest

from dray.secure_aggregation.messages import (
    MAX_MESSAGE_BYTES,
    ConsistencyCodes,
    KeyAdvertisement,
    MaskingPhase,
    MessageRefused,
    RevealedShares,
    SharedKeys,
    WrongShares,
)
from tests.unit.secure_aggregation.rounds import Round

NAME = "client 004"


def refused(played: Round, message: bytes, reason: str, name: str = NAME) -> None:
    phase = played.server.phase
    with pytest.raises(MessageRefused, match=rf"message from client {name} is refused: .*{reason}"):
        played.server.receive(name, phase, message)


def good(played: Round) -> bytes:
    """Return the client's correct answer."""
    return played.clients[NAME].answer(played.messages[NAME])


def test_keys() -> None:
    played = Round()
    answer = KeyAdvertisement.from_bytes(good(played), NAME)
    short = answer.to_bytes().replace(b'"masking_key":"', b'"masking_key":"AA')
    refused(played, short, "KeyAdvertisement masking_key")
    refused(played, b'{"x": 1}', "KeyAdvertisement")
    refused(played, b"\xff" * 10, "KeyAdvertisement")
    refused(played, bytes(MAX_MESSAGE_BYTES + 1), f"the limit is {MAX_MESSAGE_BYTES}")
    zero = answer.model_copy(update={"masking_key": bytes(32)})
    refused(played, zero.to_bytes(), "not a usable public key")
    played.server.receive(NAME, MaskingPhase.ADVERTISE_KEYS, answer.to_bytes())
    refused(played, answer.to_bytes(), "contains a key that has already been sent", "client 005")


def test_shares() -> None:
    played = Round()
    played.until(MaskingPhase.SHARE_KEYS)
    answer = SharedKeys.from_bytes(good(played), NAME)
    fewer = {name: share for name, share in answer.shares.items() if name != "client 000"}
    for shares in (fewer, {**answer.shares, NAME: bytes(82)}, {**fewer, "x": bytes(82)}):
        other = answer.model_copy(update={"shares": shares})
        refused(
            played,
            other.to_bytes(),
            "the message must contain exactly one share for each of the other clients",
        )
    long = answer.model_copy(update={"shares": {**answer.shares, "client 000": bytes(83)}})
    refused(played, long.to_bytes(), "SharedKeys shares/client 000")
    refused(played, answer.to_bytes(), "the client was lost before", "client 77")


def test_masked_updates() -> None:
    played = Round()
    played.until(MaskingPhase.MASKED_INPUT)
    answer = good(played)
    refused(played, answer[:-1], "the message has 407 bytes, not 408")
    played.server.receive(NAME, MaskingPhase.MASKED_INPUT, answer)
    played.server.receive(NAME, MaskingPhase.MASKED_INPUT, answer)  # sent again: counts once
    refused(
        played, bytes(408), "the client has already sent a different message in phase masked_input"
    )
    with pytest.raises(
        MessageRefused, match="is for phase share_keys, but the round is in phase masked_input"
    ):
        played.server.receive(NAME, MaskingPhase.SHARE_KEYS, answer)
    found = played.play({MaskingPhase.MASKED_INPUT: [NAME]})
    np.testing.assert_allclose(found.mean, played.plain_mean(played.names), rtol=0, atol=1e-6)
    with pytest.raises(MessageRefused, match="the round is in phase ended"):
        played.server.receive(NAME, MaskingPhase.ENDED, answer)


def test_codes_and_revealed_shares() -> None:
    played = Round()
    played.until(MaskingPhase.MASKED_INPUT)
    played.phase(lost=["client 009"])
    answer = ConsistencyCodes.from_bytes(good(played), NAME)
    without = {name: code for name, code in answer.codes.items() if name != "client 000"}
    refused(
        played,
        ConsistencyCodes(codes=without).to_bytes(),
        "the message must contain exactly one code for each of the other survivors",
    )
    played.server.receive(NAME, played.server.phase, answer.to_bytes())
    played.phase(lost=[NAME])
    shares = RevealedShares.from_bytes(good(played), NAME)
    of_lost = shares.model_copy(update={"seeds": {"client 009": bytes(33)}})
    refused(played, of_lost.to_bytes(), "a share of a lost client's seed")
    of_survivor = shares.model_copy(update={"masking_keys": {"client 000": bytes(33)}})
    refused(played, of_survivor.to_bytes(), "a share of a survivor's masking key")


@pytest.mark.parametrize("secret", ["seeds", "masking_keys"])
def test_a_wrong_share_spoils_no_result_in_silence(secret: str) -> None:
    played = Round()
    played.until(MaskingPhase.MASKED_INPUT)
    played.phase(lost=["client 009"])
    played.phase()
    shares = RevealedShares.from_bytes(good(played), NAME)
    held = shares.seeds["client 006"] if secret == "seeds" else shares.masking_keys["client 009"]
    about = "client 006" if secret == "seeds" else "client 009"
    wrong = shares.model_copy(update={secret: {**getattr(shares, secret), about: bytes(33)}})
    assert held != bytes(33)
    played.server.receive(NAME, MaskingPhase.UNMASK, wrong.to_bytes())
    spoiled = r"secret of client client 00[69] .* 6 shares .* only 5 are"
    with pytest.raises(WrongShares, match=spoiled):
        played.phase(lost=[NAME, *played.names[6:]])
    lie = (
        f"the client returned a share of client {about}'s secret that differs from the share "
        "it had received"
    )
    assert played.server.liars == {NAME: lie}
