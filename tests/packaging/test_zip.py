"""The package in a zip, as zipapp has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import celery_redislock
from celery_redislock.protocol.scripts import ACQUIRE

PROGRAM = """
import celery_redislock
from celery_redislock.protocol.scripts import ACQUIRE

print(ACQUIRE.sha, celery_redislock.__file__)
"""


def test_the_scripts_are_read_from_a_zip_too(tmp_path: Path) -> None:
    package, zipped = Path(celery_redislock.__file__).parent, tmp_path / "app.zip"
    with ZipFile(zipped, "w") as archive:
        for file in package.rglob("*"):
            if file.suffix in {".py", ".lua"}:
                archive.write(file, file.relative_to(package.parent))
    from_zip = {**os.environ, "PYTHONPATH": str(zipped)}
    told = subprocess.check_output([sys.executable, "-c", PROGRAM], env=from_zip, cwd=tmp_path, text=True)
    sha, where = told.split()
    assert where.startswith(str(zipped))
    assert sha == ACQUIRE.sha
