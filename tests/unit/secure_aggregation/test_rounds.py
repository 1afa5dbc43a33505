"""The result is the sum of the survivors' updates, whichever clients are lost, and whenever."""

from __future__ import annotations

import numpy as np
import pytest

from dray.secure_aggregation import keys
from dray.secure_aggregation.fixed_point import FixedPoint
from dray.secure_aggregation.messages import MaskingPhase, TooFewClients
from dray.secure_aggregation.server import MaskingServer
from tests.unit.secure_aggregation.rounds import PHASES, Round, settings


@pytest.mark.parametrize("phase", PHASES)
def test_three_of_ten_may_be_lost_in_any_phase(phase: MaskingPhase) -> None:
    played = Round()
    gone = played.names[1::4]
    assert len(gone) == 3
    found = played.play({phase: gone})
    has_sent = phase in (MaskingPhase.CONSISTENCY_CHECK, MaskingPhase.UNMASK)
    expected = [name for name in played.names if has_sent or name not in gone]
    assert found.clients == tuple(expected)
    assert found.weight == sum(played.weights[name] for name in expected)
    np.testing.assert_allclose(found.mean, played.plain_mean(expected), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.sums, played.plain_sum(expected), rtol=0, atol=1e-6)


def test_clients_that_are_lost_in_every_phase_together() -> None:
    played = Round(20)
    names = played.names
    found = played.play({phase: [names[at]] for at, phase in enumerate(PHASES)})
    assert found.clients == tuple(names[3:])
    np.testing.assert_allclose(found.mean, played.plain_mean(names[3:]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_a_round_with_too_few_clients_has_no_result_and_says_how_many_it_needs(
    phase: MaskingPhase,
) -> None:
    played = Round()
    num_gone = 8 if phase is MaskingPhase.ADVERTISE_KEYS else 5
    least = 3 if phase is MaskingPhase.ADVERTISE_KEYS else 6
    said = f"{10 - num_gone} clients have responded in phase {phase}, but {least} are required"
    with pytest.raises(TooFewClients, match=said):
        played.play({phase: played.names[:num_gone]})
    assert played.server.phase is phase, "more may still come"


def test_thirty_two_bits_are_as_exact_as_they_say() -> None:
    played = Round(bits=32, max_weight=100)
    encoding = FixedPoint.of(played.settings, 10)
    found = played.play({MaskingPhase.MASKED_INPUT: played.names[:3]})
    errors = np.abs(found.mean - played.plain_mean(played.names[3:]))
    assert 0.0 < errors.max() <= encoding.max_error < 1e-4
    assert played.settings.masked_bytes == 51 * 4


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("limit", [0.3, 1.0, 10.0, 999.0])
def test_the_largest_updates_do_not_overflow(bits: int, limit: float) -> None:
    encoding = FixedPoint.of(settings(bits=bits, limit=limit, max_weight=7, num_values=2), 9)
    extreme = np.array([1e30, -limit])
    total = encoding.zeros()
    for _ in range(9):
        total += encoding.encode(extreme, 7)
    found = encoding.decode(total, ())
    assert found.weight == 63
    np.testing.assert_allclose(found.mean, [limit, -limit], rtol=0, atol=encoding.max_error)


def test_too_few_bits_are_refused_before_a_round_begins() -> None:
    with pytest.raises(ValueError, match=r"32 bits are too few .* lower limit, or smaller weights"):
        FixedPoint.of(settings(bits=32, limit=1000.0, max_weight=10**6), 100)


@pytest.mark.parametrize(
    ("values", "weight", "reason"),
    [
        (np.zeros(49), 1, r"shape \(49,\), not \(50,\)"),
        (np.full(50, np.nan), 1, "not finite"),
        (np.full(50, np.inf), 1, "not finite"),
        (np.zeros(50), 0, "between 1 and 100"),
        (np.zeros(50), 101, "between 1 and 100"),
    ],
)
def test_an_update_that_can_not_be_sent_is_refused_by_its_client(
    values: np.ndarray, weight: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Round(3).clients["client 000"].provide(values, weight)


def test_the_parts_of_a_server_come_to_the_same_sum() -> None:
    whole, played = Round(), Round()
    parts = [MaskingServer(played.settings) for _ in range(3)]
    lost = {MaskingPhase.MASKED_INPUT: played.names[:2], MaskingPhase.UNMASK: played.names[2:4]}
    messages = dict.fromkeys(played.names, b"")
    while (phase := parts[0].phase) is not MaskingPhase.ENDED:
        for at, (name, message) in enumerate(messages.items()):
            if name in lost.get(phase, ()):
                continue
            answer = played.clients[name].answer(message)
            if phase is MaskingPhase.MASKED_INPUT:
                parts[at % 3].receive(name, phase, answer)
            else:
                for part in parts:
                    part.receive(name, phase, answer)
        if phase is MaskingPhase.MASKED_INPUT:
            answered = [part.answered for part in parts]
            for part in parts:
                part.received_elsewhere(frozenset().union(*answered) - part.answered)
        messages = dict(*{tuple(part.advance().items()) for part in parts})
    total = np.sum([part.partial_sum(at, 3) for at, part in enumerate(parts)], axis=0)
    found, expected = parts[1].decode(total), whole.play(lost)
    assert found.clients == expected.clients
    np.testing.assert_array_equal(found.sums, expected.sums)


def test_shares_give_a_secret_from_as_many_as_the_threshold_and_no_fewer() -> None:
    prime = keys.PRIME
    assert all(pow(base, prime - 1, prime) == 1 for base in (2, 3, 5, 7, 11)), "it is a prime"
    for secret in (bytes(32), b"\xff" * 32, bytes(range(32))):
        shares = dict(enumerate(keys.split(secret, 4, 7), 1))
        assert keys.combine({at: shares[at] for at in (2, 3, 5, 7)}) == secret
        assert keys.combine({at: shares[at] for at in (7, 1, 4, 2)}) == secret
        assert keys.combine({at: shares[at] for at in (2, 3, 5)}) != secret
