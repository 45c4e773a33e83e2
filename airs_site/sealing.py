"""The ciphers that secrets are kept with, derived from SECRET_KEY; named in AIRS_CIPHER.

The two apps do not import each other, and both keep secrets: models their keys, webhook endpoints
what signs. Each purpose has a key of its own, so that what one wrote the other cannot read.
"""

import base64
import hashlib

from cryptography.fernet import Fernet, MultiFernet
from django.conf import settings


def cipher(purpose: str) -> MultiFernet:
    """Return the cipher of a purpose (at most 11 ASCII characters).

    It writes with SECRET_KEY and reads what the keys in SECRET_KEY_FALLBACKS wrote as well.
    """
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return MultiFernet([Fernet(_key(key, purpose)) for key in keys])


def _key(secret_key: str | bytes, purpose: str) -> bytes:
    material = secret_key.encode() if isinstance(secret_key, str) else secret_key
    digest = hashlib.blake2b(material, digest_size=32, person=f"airs-{purpose}".encode()).digest()
    return base64.urlsafe_b64encode(digest)
