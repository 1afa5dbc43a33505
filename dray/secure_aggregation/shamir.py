"""Shamir's secret sharing of 32 bytes over a prime field (Shamir 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import lru_cache

from dray.secure_aggregation.messages import KEY_BYTES, SHARE_BYTES

PRIME = 2**256 + 297
"""The least prime above all secrets."""


def split(secret: bytes, threshold: int, num_shares: int) -> list[bytes]:
    """Shares at 1, 2 ... `num_shares`. Any `threshold` of them give the secret, fewer tell nothing
    of it."""
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    shares = []
    for at in range(1, num_shares + 1):
        value = 0
        for coefficient in coefficients:  # Horner's rule, the secret last
            value = (value * at + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret, of as many shares as the threshold, by their places. None if these are no shares
    of one secret, as far as that can be seen."""
    secret = int.from_bytes(value_at(0, shares), "big")
    return secret.to_bytes(KEY_BYTES, "big") if secret < 2 ** (8 * KEY_BYTES) else None


def value_at(place: int, shares: Mapping[int, bytes]) -> bytes:
    """The value at a place that is none of theirs of the polynomial on which these shares are."""
    factors = _factors(place, tuple(shares))
    values = (int.from_bytes(share, "big") for share in shares.values())
    value = sum(f * v for f, v in zip(factors, values, strict=True)) % PRIME
    return value.to_bytes(SHARE_BYTES, "big")


@lru_cache(maxsize=16)  # the same clients reveal their shares of many secrets
def _factors(place: int, places: tuple[int, ...]) -> list[int]:
    """The factor of each share in the value at `place` (Lagrange)."""
    factors = []
    for own in places:
        numerator = denominator = 1
        for other in places:
            if other != own:
                numerator = numerator * (other - place) % PRIME
                denominator = denominator * (other - own) % PRIME
        factors.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return factors
