"""A credential provider whose vault may be closed for a while."""

from __future__ import annotations

import os
from pathlib import Path

import redis

#: The environment variable that names a file: while it is there, the vault is closed.
CLOSED = "LAB_VAULT_CLOSED"


class Vault(redis.CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        if Path(os.environ[CLOSED]).exists():
            raise LookupError("the vault is closed")
        return "default", "any"
