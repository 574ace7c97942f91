"""A codec that encrypts what another one writes: ``pip install 'delayq[encryption]'``.

A payload is a byte for the format, the length of the key's id, the id, a random nonce, and what
AES-256-GCM makes of the inner payload, with its tag at the end. All before the nonce, and the
queue's name, is authenticated: see ``docs/codecs.md``.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, overload

from delayq._checks import describe_value
from delayq._generics import T
from delayq.codecs.json import JsonCodec, result_codec
from delayq.codecs.protocol import check_codec, codec_of_queue
from delayq.errors import BadInput, BadName, ConfigurationError, DecodeError, EncodeError

if TYPE_CHECKING:
    from typing import Self, TypeAlias

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from delayq.codecs.protocol import Codec

    Keys: TypeAlias = "Mapping[str, bytes | str] | str"

# UTF-8 never has this byte, and no other codec of this package begins with it.
_FORMAT = 0xF8
_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 12, 16
_LONGEST_ID = 64
# An id that is longer is not quoted, because it may be a key: these have 43 characters and more.
_LONGEST_QUOTED = 20
_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{_LONGEST_ID}}}")


class _Key:
    """A key in its uses, of which none shows it: many tools record the locals of an error.

    Attributes:
        head: The beginning of all payloads under the key.
        cipher: Encrypts and decrypts.
        invalid_tag: The error of a payload that it does not decrypt.
    """

    def __init__(self, key_id: str, secret: bytes) -> None:
        """Raise ConfigurationError if ``delayq[encryption]`` is not installed."""
        try:
            from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra
            from cryptography.hazmat.primitives.ciphers.aead import (  # noqa: PLC0415 - an extra
                AESGCM,
            )
        except ImportError as error:
            raise ConfigurationError(
                "EncryptedCodec needs cryptography: pip install 'delayq[encryption]'"
            ) from error
        self.head = bytes((_FORMAT, len(key_id))) + key_id.encode()
        self.cipher: AESGCM = AESGCM(secret)
        self.invalid_tag: type[Exception] = InvalidTag
        self._print = blake2b(key=secret, digest_size=16, person=b"delayq print")

    def fingerprint(self, content: bytes) -> bytes:
        """Return bytes that tell nothing about the content to those who do not have the key."""
        digest = self._print.copy()
        digest.update(content)
        return digest.digest()


class EncryptedCodec(Generic[T]):
    """Encrypts what another codec writes, with AES-256-GCM.

    ::

        codec = EncryptedCodec({"2027": new_key, "2026": old_key})
        orders = client.reliable_queue("orders", codec=codec)

    The first key encrypts, and all of them decrypt: that is how keys are changed. The name of the
    queue is authenticated, so that a payload that was moved to another queue cannot be decrypted
    there. Ids, headers, groups, errors and reports of progress are not encrypted.

    Two payloads of one value differ. So the methods of ``pending`` that look for a value refuse
    this codec.
    """

    @overload
    def __init__(
        self: EncryptedCodec[Any],
        keys: Keys,
        inner: JsonCodec = ...,
        *,
        accept_plain: bool = ...,
    ) -> None: ...
    @overload
    def __init__(self, keys: Keys, inner: Codec[T], *, accept_plain: bool = ...) -> None: ...
    def __init__(
        self,
        keys: Keys,
        inner: Codec[Any] = JsonCodec(),  # noqa: B008 - it has no state
        *,
        accept_plain: bool = False,
    ) -> None:
        """Create a codec, which any number of queues may share.

        Args:
            keys: The keys by their ids, the one that encrypts first: 32 bytes each, or these in
                base64. Or one text, as in an environment variable: ``"2027=BASE64 2026=BASE64"``,
                with spaces, commas or line ends in between. Ids are stored with each message in
                clear text: 1 to 64 letters, digits, dots, hyphens and underscores of ASCII.
            inner: Turns values into the bytes to encrypt.
            accept_plain: Also read payloads that are not encrypted, while a queue still has
                messages from before it was. Whoever can write to the server can then forge
                messages.

        Raises:
            BadInput: There are no keys, or one has a bad id or another length, or ``inner`` is not
                a codec.
            ConfigurationError: ``delayq[encryption]`` is not installed.
        """
        check_codec(inner)
        self._keys = {name: _Key(name, secret) for name, secret in _checked_keys(keys).items()}
        self._first = next(iter(self._keys.values()))
        self._accept_plain = accept_plain
        self._queue: bytes | None = None
        self.inner: Codec[Any] = inner

    def for_queue(self, name: str) -> Self:
        """Return the codec for one queue. Queues call this themselves.

        Raises:
            BadName: The name is empty, or no str.
        """
        if not isinstance(name, str) or not name:
            raise BadName(f"a queue's name must be a non-empty str, not {describe_value(name)}")
        queue = name.encode(errors="surrogatepass")
        return self if queue == self._queue else self._copy(codec_of_queue(self.inner, name), queue)

    def around(self, inner: Codec[Any]) -> Self:
        """Return a codec with the same keys, for the same queue, around another codec."""
        return self._copy(inner, self._queue)

    def encode(self, value: T, /) -> bytes:
        """Encode and encrypt a value.

        Raises:
            EncodeError: The inner codec cannot encode it.
            ConfigurationError: The codec is of no queue: see :meth:`for_queue`.
        """
        queue, key = self._name(), self._first
        content = self.inner.encode(value)
        if not isinstance(content, bytes):
            raise EncodeError(
                f"{type(self.inner).__name__}.encode returned {type(content).__name__}, not bytes"
            )
        nonce = os.urandom(_NONCE_BYTES)
        return key.head + nonce + key.cipher.encrypt(nonce, content, key.head + queue)

    def decode(self, payload: bytes, /) -> T:
        """Decrypt and decode a payload.

        Raises:
            DecodeError: Its key is not known, it was changed or belongs to another queue, it is not
                encrypted, or the inner codec cannot decode it.
            ConfigurationError: The codec is of no queue: see :meth:`for_queue`.
        """
        content = self._decrypt(payload)
        try:
            value: T = self.inner.decode(content)
        except DecodeError as error:
            # An error may be shown, so it holds no more than the server does.
            error.payload = payload
            # It is pickled with these.
            error.args = (error.codec, payload)
            raise
        return value

    def fingerprint(self, payload: bytes, /) -> bytes:
        """Return bytes that are the same for all payloads of one value under one key, and tell
        nothing to those who do not have it; for one that is not encrypted, the payload itself.
        Raises DecodeError as :meth:`decode`.
        """
        content = self._decrypt(payload)
        key_id = key_id_of(payload)
        if key_id is None:
            # What is noted of a state must be the same before and after the queue is encrypted.
            return content
        return self._keys[key_id].fingerprint(content)

    @cached_property
    def results(self) -> Self:
        """The codec of what handlers return."""
        return self.around(result_codec(self.inner))

    def _copy(self, inner: Codec[Any], queue: bytes | None) -> Self:
        copy = object.__new__(type(self))
        # Without the results of this one.
        copy._keys, copy._first, copy._accept_plain = self._keys, self._first, self._accept_plain
        copy._queue, copy.inner = queue, inner
        return copy

    def _name(self) -> bytes:
        if self._queue is None:
            raise ConfigurationError(
                "this EncryptedCodec does not know its queue, whose name it authenticates: pass it"
                " to the queue, or call for_queue(name)"
            )
        return self._queue

    def _decrypt(self, payload: bytes) -> bytes:
        """Return the inner payload. Raises as :meth:`decode`."""
        queue, key_id = self._name(), key_id_of(payload)
        if key_id is None:
            if self._accept_plain:
                return payload
            fault = "it is not encrypted"
        elif (key := self._keys.get(key_id)) is None:
            fault = f"it is encrypted with key {key_id!r}, which is not among the keys"
        else:
            start = len(key.head) + _NONCE_BYTES
            nonce, sealed = payload[len(key.head) : start], payload[start:]
            try:
                return key.cipher.decrypt(nonce, sealed, key.head + queue)
            except key.invalid_tag:
                fault = (
                    f"it does not decrypt with key {key_id!r}: it was changed, or is from another"
                    " queue"
                )
        raise DecodeError("EncryptedCodec", payload, fault)

    def __repr__(self) -> str:
        return f"<EncryptedCodec around {type(self.inner).__name__}, keys {', '.join(self._keys)}>"


def key_id_of(payload: bytes) -> str | None:
    """Return the id of the key with which a payload is encrypted; None if it is not encrypted."""
    if len(payload) < 2 or payload[0] != _FORMAT:
        return None
    end = 2 + payload[1]
    key_id = payload[2:end].decode("latin-1")
    if len(payload) < end + _NONCE_BYTES + _TAG_BYTES or not _ID.fullmatch(key_id):
        return None
    return key_id


def _checked_keys(keys: Keys) -> dict[str, bytes]:
    """Return keys by their ids. No error quotes a key."""
    if isinstance(keys, str):
        keys = _parsed(keys)
    if not isinstance(keys, Mapping):
        raise BadInput(
            "keys must be a mapping of ids to keys, or a text such as 2027=BASE64, not a"
            f" {type(keys).__name__}"
        )
    if not keys:
        raise BadInput("keys must have at least one key")
    for key_id in keys:
        if not isinstance(key_id, str) or not _ID.fullmatch(key_id):
            # It is not quoted, because somebody may have taken the key for its id.
            raise BadInput(
                f"the id of a key must be a str of 1 to {_LONGEST_ID} letters, digits, dots,"
                " hyphens and underscores"
            )
    return {
        key_id: _secret(_label(number, key_id), secret)
        for number, (key_id, secret) in enumerate(keys.items(), 1)
    }


def _parsed(text: str) -> dict[str, bytes | str]:
    keys: dict[str, bytes | str] = {}
    for number, entry in enumerate(re.split(r"[\s,]+", text.strip(" \t\r\n,")), 1):
        key_id, _, secret = entry.partition("=")
        if not secret:
            # It may be the key without its id.
            raise BadInput(f"entry {number} of the keys must be ID=BASE64")
        if key_id in keys:
            raise BadInput(f"entry {number} of the keys has the id of an earlier one")
        keys[key_id] = secret
    return keys


def _label(number: int, key_id: str) -> str:
    """Return what an error calls a key."""
    return f"key {key_id!r}" if len(key_id) <= _LONGEST_QUOTED else f"entry {number} of the keys"


def _secret(label: str, secret: bytes | str) -> bytes:
    if isinstance(secret, str):
        try:
            standard = secret.replace("-", "+").replace("_", "/").rstrip("=")
            secret = base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
        except ValueError:
            raise BadInput(f"{label} is not base64") from None
    if not isinstance(secret, bytes):
        raise BadInput(f"{label} must be bytes or base64, not a {type(secret).__name__}")
    if len(secret) != _KEY_BYTES:
        raise BadInput(f"{label} must have {_KEY_BYTES} bytes, as AES-256 does, not {len(secret)}")
    return secret
