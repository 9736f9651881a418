"""The versions of Python, Celery, kombu and redis-py that the tests run with: ``python -m nox``.

Each leg is an environment of its own. The oldest Python has the oldest of all, each Python the newest of all, and what
lies between has one leg each. ``--session "tests(newest-3.12)"`` runs one leg, ``--python 3.12`` those of one Python.
What follows ``--`` goes to pytest instead of `FAST`, as ``-- tests`` for all tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import nox

#: Without the slow tests. Of those with workers, the ones where a worker's version matters most, on Redis and on
#: RabbitMQ.
FAST = (
    "tests/unit",
    "tests/integration",
    *(
        f"tests/acceptance/test_{name}.py"
        for name in ("promise", "ways_out", "redelivery", "shutdown", "unique_jobs", "line")
    ),
)

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True


def oldest() -> list[str]:
    """Each dependency of the package, pinned to its lower bound in `pyproject.toml`."""
    dependencies = nox.project.load_toml(Path(__file__).with_name("pyproject.toml"))["project"]["dependencies"]
    return [re.sub(r">=([^,]+).*", r"==\1", dependency) for dependency in dependencies]


#: Each leg's Python, and what holds the newest versions back.
LEGS: dict[str, tuple[str, list[str]]] = {
    "oldest-3.11": ("3.11", oldest()),
    "oldest-3.13": ("3.13", oldest()),
    "celery-5.6-redis-7-3.12": ("3.12", ["celery==5.6.*", "redis==7.*"]),
    "celery-5.6-redis-8-3.13": ("3.13", ["celery==5.6.*", "redis==8.*"]),
    "celery-5.7-redis-6.4-3.11": ("3.11", ["celery==5.7.*", "redis==6.4.*"]),
    "celery-5.7-redis-7-3.12": ("3.12", ["celery==5.7.*", "redis==7.*"]),
    "newest-3.11": ("3.11", []),
    "newest-3.12": ("3.12", []),
    "newest-3.13": ("3.13", []),
    "newest-3.14": ("3.14", []),
}


@nox.session(default=False)
def contracts(session: nox.Session) -> None:
    """The contracts of the ports with the newest releases of what they reach into, pre-releases included."""
    session.install("--editable", ".[dev]")
    session.install(
        "--upgrade", "--pre", "--upgrade-strategy", "eager", "celery", "kombu", "billiard", "redis", "hiredis"
    )
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", "tests/contracts", *session.posargs)


@nox.session
@nox.parametrize(("python", "pins"), list(LEGS.values()), ids=list(LEGS))
def tests(session: nox.Session, pins: Sequence[str]) -> None:
    """The tests with one leg's versions."""
    session.install("--editable", ".[dev]", *pins)
    session.run("python", "-m", "pytest", "-n", "4", "--dist", "loadfile", *(session.posargs or FAST))
