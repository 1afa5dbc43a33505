"""Keys shared by two clients, secret sharing (Shamir 1979), encrypted shares, and masks."""

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
"""Each key encrypts only one message, so all messages can use the same nonce."""
COUNTER_AND_NONCE = bytes(16)
"""Each ChaCha20 key generates only one mask, so all masks can use the same counter and nonce."""
PIECE_BYTES = 1 << 16
ZEROS = memoryview(bytes(PIECE_BYTES))
MASKS = b"masks"
"""The purpose of a key from which two clients generate their shared mask."""
PRIME = 2**256 + 297
"""The smallest prime that is greater than any secret."""


class KeyPair:
    """An X25519 key pair (RFC 7748)."""

    def __init__(self, private: bytes | None = None) -> None:
        """private: the private key; by default, it is generated with the system's random source."""
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
        """Return the key that only the owners of the two key pairs can compute. Raises ValueError
        if `public` is a point that results in the same key for every key pair."""
        if (secret := self._secrets.get(public)) is None:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(public))
            self._secrets[public] = secret
        return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=joined(*purpose)).derive(secret)


def joined(*parts: bytes) -> bytes:
    """Join the parts into a byte string. Different lists of parts result in different strings."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def transcript_of(settings: MaskingSettings, roster: bytes) -> bytes:
    """Return a digest of the settings and the roster. Keys depend on this digest, so clients that
    received different rosters have no common keys."""
    return hashlib.sha256(joined(settings.to_bytes(), roster)).digest()


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt `text` with AES-GCM. The key must not be used for anything else."""
    return AESGCM(key).encrypt(NONCE, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """Decrypt `sealed`. Return None if `sealed` was encrypted with a different key or has been
    modified."""
    try:
        return AESGCM(key).decrypt(NONCE, sealed, None)
    except InvalidTag:
        return None


def commitment_of(seed: bytes) -> bytes:
    """Return a digest of a seed of 32 random bytes. The digest reveals nothing about the seed, and
    matches no other seed."""
    return hashlib.sha256(b"dray seed" + seed).digest()


def digest_of(share: bytes) -> bytes:
    """Return the digest of a share. A share is as random as a key, so its digest does not reveal
    it."""
    return hashlib.sha256(b"dray share" + share).digest()


def keystream(seed: bytes, num_bytes: int) -> Iterator[bytes]:
    """Yield the ChaCha20 output for a key that is used only once, in pieces that fit into a CPU
    cache. Every piece except the last is PIECE_BYTES long."""
    encryptor = Cipher(algorithms.ChaCha20(seed, COUNTER_AND_NONCE), mode=None).encryptor()
    for start in range(0, num_bytes, PIECE_BYTES):
        yield encryptor.update(ZEROS[: num_bytes - start])


def split(secret: bytes, threshold: int, num_shares: int) -> list[bytes]:
    """Return the shares at positions 1, 2 ... `num_shares`. Any `threshold` shares determine the
    secret, and fewer shares reveal nothing about it."""
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    shares = []
    for at in range(1, num_shares + 1):
        value = 0
        for coefficient in coefficients:  # Horner's rule, with the secret last
            value = (value * at + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """Reconstruct the secret from `threshold` shares, given by position. Return None if the shares
    can't all belong to the same secret."""
    secret = int.from_bytes(value_at(0, shares), "big")
    return secret.to_bytes(KEY_BYTES, "big") if secret < 2 ** (8 * KEY_BYTES) else None


def value_at(index: int, shares: Mapping[int, bytes]) -> bytes:
    """Return the value of the polynomial through these shares, at a position without a share."""
    factors = _factors(index, tuple(shares))
    values = (int.from_bytes(share, "big") for share in shares.values())
    value = sum(f * v for f, v in zip(factors, values, strict=True)) % PRIME
    return value.to_bytes(SHARE_BYTES, "big")


@lru_cache(maxsize=16)  # the same clients reveal shares of many secrets
def _factors(index: int, indices: tuple[int, ...]) -> list[int]:
    """Return the Lagrange coefficient of each share for interpolating the value at `index`."""
    factors = []
    for own in indices:
        numerator = denominator = 1
        for other in indices:
            if other != own:
                numerator = numerator * (other - index) % PRIME
                denominator = denominator * (other - own) % PRIME
        factors.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return factors
