"""Keys of pairs of clients, secrets in shares (Shamir 1979), sealed shares, and masks."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from functools import lru_cache

from dray.secure_aggregation.messages import KEY_BYTES, SHARE_BYTES, missing_package

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError as error:
    raise missing_package(error) from error

from dray.secure_aggregation.messages import MaskingSettings

NONCE = bytes(12)
"""Each key seals one message, so all can have the same."""
COUNTER_AND_NONCE = bytes(16)
"""Each key of ChaCha20 makes one mask, so all can have the same."""
PIECE_BYTES = 1 << 16
ZEROS = memoryview(bytes(PIECE_BYTES))
MASKS = b"masks"
"""The purpose of the keys from which the masks of two clients are made."""
PRIME = 2**256 + 297
"""The least prime above all secrets."""


class KeyPair:
    """An X25519 key pair (RFC 7748)."""

    def __init__(self, private: bytes | None = None) -> None:
        """private: by default drawn by the system's random source."""
        self._private = (
            X25519PrivateKey.generate()
            if private is None
            else X25519PrivateKey.from_private_bytes(private)
        )
        self._secrets: dict[bytes, bytes] = {}

    @property
    def private(self) -> bytes:
        return self._private.private_bytes_raw()

    @property
    def public(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    def agree(self, public: bytes, *purpose: bytes) -> bytes:
        """The key that only the owners of the two pairs can compute. Raises ValueError if `public`
        is a point that gives every pair the same key."""
        if (secret := self._secrets.get(public)) is None:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(public))
            self._secrets[public] = secret
        return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=joined(*purpose)).derive(secret)


def joined(*parts: bytes) -> bytes:
    """Join the parts into a byte string that differs from that of any other parts."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def transcript_of(settings: MaskingSettings, roster: bytes) -> bytes:
    """A digest of the settings and the roster. Keys are bound to it, so clients that received
    different rosters have no keys in common."""
    return hashlib.sha256(joined(settings.to_bytes(), roster)).digest()


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt by AES-GCM, with a key that seals nothing else."""
    return AESGCM(key).encrypt(NONCE, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """Decrypt; None if the text was sealed by another key, or changed."""
    try:
        return AESGCM(key).decrypt(NONCE, sealed, None)
    except InvalidTag:
        return None


def commitment_of(seed: bytes) -> bytes:
    """A digest that reveals nothing of a seed of 32 random bytes, and matches no other seed."""
    return hashlib.sha256(b"dray seed" + seed).digest()


def digest_of(share: bytes) -> bytes:
    """Return the digest of a share. A share is as random as a key, so the digest hides it."""
    return hashlib.sha256(b"dray share" + share).digest()


def keystream(seed: bytes, num_bytes: int) -> Iterator[bytes]:
    """ChaCha20's output for a key that is used once, in pieces that fit into a processor's cache.
    Each piece has PIECE_BYTES, except the last one."""
    encryptor = Cipher(algorithms.ChaCha20(seed, COUNTER_AND_NONCE), mode=None).encryptor()
    for start in range(0, num_bytes, PIECE_BYTES):
        yield encryptor.update(ZEROS[: num_bytes - start])


def split(secret: bytes, threshold: int, num_shares: int) -> list[bytes]:
    """Shares at 1, 2 ... `num_shares`. Any `threshold` of them give the secret; fewer reveal
    nothing of it."""
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
    """Reconstruct the secret from `threshold` shares, by place. None if the shares evidently do not
    belong to one secret."""
    secret = int.from_bytes(value_at(0, shares), "big")
    return secret.to_bytes(KEY_BYTES, "big") if secret < 2 ** (8 * KEY_BYTES) else None


def value_at(place: int, shares: Mapping[int, bytes]) -> bytes:
    """The value, at a place without a share, of the polynomial through these shares."""
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
