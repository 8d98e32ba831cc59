"""AES-256-GCM of the OpenSSL that this Python is linked with, without a package.

Python carries OpenSSL for `ssl` and `hashlib`, and offers none of its ciphers. ctypes finds them
through the extension module `_hashlib`: in the library that is loaded already, without a search
along any path. A record takes four calls, of a quarter of a microsecond each, so this is for large
records: 128 KiB take 11 µs here and 60 µs with HMAC-SHA256.

`find_gcm` gives None where the functions are not to be found (Windows, static linking), or where
they do not compute what the standard says.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

__all__ = ["TAG", "Gcm", "find_gcm"]

TAG: Final = 16  # bytes
_KEY, _NONCE = 32, 12  # bytes
_GET_TAG, _SET_TAG = 0x10, 0x11  # EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG
_POINTER: Final = ctypes.c_void_p
_BYTES: Final = ctypes.c_char_p
_INT: Final = ctypes.c_int
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "EVP_aes_256_gcm": (_POINTER, []),
    "EVP_CIPHER_CTX_new": (_POINTER, []),
    "EVP_CIPHER_CTX_free": (None, [_POINTER]),
    "EVP_CIPHER_CTX_ctrl": (_INT, [_POINTER, _INT, _INT, _POINTER]),
    "EVP_EncryptInit_ex": (_INT, [_POINTER, _POINTER, _POINTER, _BYTES, _BYTES]),
    "EVP_EncryptUpdate": (_INT, [_POINTER, _POINTER, _POINTER, _POINTER, _INT]),
    "EVP_EncryptFinal_ex": (_INT, [_POINTER, _POINTER, _POINTER]),
    "EVP_DecryptInit_ex": (_INT, [_POINTER, _POINTER, _POINTER, _BYTES, _BYTES]),
    "EVP_DecryptUpdate": (_INT, [_POINTER, _POINTER, _POINTER, _POINTER, _INT]),
    "EVP_DecryptFinal_ex": (_INT, [_POINTER, _POINTER, _POINTER]),
    "ERR_clear_error": (None, []),
}


class Gcm:
    """AES-256-GCM with one key, for one direction: each object encrypts, or decrypts."""

    def __init__(self, library: Any, key: bytes, *, encrypts: bool) -> None:
        self._context: int = 0  # of OpenSSL; ours until `__del__`
        self._library = library
        if len(key) != _KEY:
            raise ValueError("a key of a wrong size")
        self._free = library.EVP_CIPHER_CTX_free  # `__del__` may run when modules are gone
        self._context = context = library.EVP_CIPHER_CTX_new()
        begin = library.EVP_EncryptInit_ex if encrypts else library.EVP_DecryptInit_ex
        if not context or begin(context, library.EVP_aes_256_gcm(), None, key, None) != 1:
            raise MemoryError("OpenSSL makes no cipher")
        self._begin = begin
        self._count = ctypes.c_int()  # bytes that a call has written
        self._counted = ctypes.addressof(self._count)

    def __del__(self) -> None:
        if self._context:
            self._free(self._context)

    def encrypt(self, nonce: bytes, record: memoryview) -> None:
        """Encrypt in place all of a record but its last 16 bytes, where the tag goes."""
        library, context, size = self._library, self._context, record.nbytes - TAG
        if len(nonce) != _NONCE or size < 1:
            raise ValueError("a nonce or a record of a wrong size")
        first = ctypes.c_char.from_buffer(record)  # keeps the memory where it is until we are done
        where = ctypes.addressof(first)
        if (
            self._begin(context, None, None, None, nonce) != 1
            or library.EVP_EncryptUpdate(context, where, self._counted, where, size) != 1
            or self._count.value != size
            or library.EVP_EncryptFinal_ex(context, where + size, self._counted) != 1
            or library.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, TAG, where + size) != 1
        ):
            raise RuntimeError("OpenSSL does not encrypt")

    def decrypt(self, nonce: bytes, record: memoryview, room: memoryview) -> bool:
        """Decrypt a record into `room`, of the size of its data; False if the tag is wrong.

        The content of `room` is undefined then. Both are memory that can be written to."""
        library, context, size = self._library, self._context, record.nbytes - TAG
        # Not assertions: OpenSSL would write beyond the room.
        if len(nonce) != _NONCE or size < 1 or room.nbytes != size:
            raise ValueError("a nonce, a record or a room of a wrong size")
        first, target = ctypes.c_char.from_buffer(record), ctypes.c_char.from_buffer(room)
        where, to = ctypes.addressof(first), ctypes.addressof(target)
        right = bool(
            self._begin(context, None, None, None, nonce) == 1
            and library.EVP_DecryptUpdate(context, to, self._counted, where, size) == 1
            and self._count.value == size
            and library.EVP_CIPHER_CTX_ctrl(context, _SET_TAG, TAG, where + size) == 1
            and library.EVP_DecryptFinal_ex(context, to + size, self._counted) == 1
        )
        if not right:
            library.ERR_clear_error()  # else `ssl` could take the error for one of its own
        return right


@functools.cache
def find_gcm() -> Any:
    """Return what `Gcm` takes as its library; None if this Python's OpenSSL cannot be used."""
    try:
        import _hashlib

        # It keeps the interpreter's lock: a record takes less time than getting the lock back may.
        library = ctypes.PyDLL(_hashlib.__file__)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        return library if _computes(library) else None
    except (ImportError, AttributeError, OSError, MemoryError, RuntimeError):
        return None


def _computes(library: Any) -> bool:
    """Whether the functions give what the standard says: test case 14 of the GCM specification."""
    record = memoryview(bytearray(16 + TAG))
    nonce, room = bytes(12), memoryview(bytearray(b"?" * 16))
    Gcm(library, bytes(32), encrypts=True).encrypt(nonce, record)
    if record.hex() != "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919":
        return False
    reader = Gcm(library, bytes(32), encrypts=False)
    if not reader.decrypt(nonce, record, room) or bytes(room) != bytes(16):
        return False
    record[0] ^= 1
    return not reader.decrypt(nonce, record, room)
