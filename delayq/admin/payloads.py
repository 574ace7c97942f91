"""Payloads as people see them: an encrypted one is decrypted only by whoever has the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq.codecs import BytesCodec
from delayq.codecs.encrypted import EncryptedCodec, key_id_of
from delayq.errors import DecodeError

if TYPE_CHECKING:
    from delayq.codecs.encrypted import Keys

KEYS_VARIABLE = "DELAYQ_KEYS"
"""The environment variable in which the command line finds keys."""


class PayloadCipher:
    """Decrypts and encrypts payloads, as far as the keys are known.

    Attributes:
        has_keys: Whether there are keys.
    """

    def __init__(self, keys: Keys | None) -> None:
        """``keys`` are those of :class:`~delayq.codecs.EncryptedCodec`, whose errors this raises;
        None if there are none.
        """
        self._codec = None if keys is None else EncryptedCodec(keys, BytesCodec())
        self.has_keys: bool = keys is not None

    def decrypt(self, payload: bytes, queue: str) -> bytes:
        """Return a payload without its encryption, if it has one.

        Raises:
            DecodeError: It cannot be decrypted with these keys. ``codec`` is ``"EncryptedCodec"``.
        """
        if (id := key_id_of(payload)) is None:  # noqa: A001
            return payload
        if self._codec is None:
            fault = f"it is encrypted with key {id!r}, and no keys are given"
            raise DecodeError("EncryptedCodec", payload, fault)
        return self._codec.for_queue(queue).decode(payload)

    def encrypt(self, payload: bytes, queue: str) -> bytes:
        """Return a payload, encrypted with the first key, of which there must be one."""
        assert self._codec is not None
        return self._codec.for_queue(queue).encode(payload)
