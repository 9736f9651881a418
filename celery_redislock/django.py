"""For Django: locked tasks with ``delay_on_commit``, and system checks of their options.

To have the checks in every command, put ``"celery_redislock.django"`` into ``INSTALLED_APPS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, cast, overload

from asgiref.sync import sync_to_async
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.core import checks

from .app import is_nobodys
from .celery_port import runs_system_checks
from .locked import the_app
from .task import decorator
from .task.check import check_tasks
from .task.locked_task import LockedTask

__all__ = ["LockedDjangoTask", "locked_task"]

if TYPE_CHECKING:
    from typing import Unpack

    from .task.decorator import IsBound, R, TaskOptions
    from .task.locked_task import P
    from .task.publish import R_co

    class LockedDjangoTask(LockedTask[P, R_co], Generic[P, R_co]):
        """As below. In celery-types these methods return a result; in Celery they return nothing."""

        def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None:
            """Call `delay` when the transaction commits."""

        def apply_async_on_commit(self, args: Any = None, kwargs: Any = None, **options: Any) -> None:
            """Call `apply_async` when the transaction commits."""

    class Decorator(Generic[IsBound]):
        """Turns a function into a `LockedDjangoTask`; with ``bind=True``, one whose first parameter is the task."""

        @overload
        def __call__(
            self: Decorator[Literal[True]], function: Callable[Concatenate[Any, P], R], /
        ) -> LockedDjangoTask[P, R]: ...

        @overload
        def __call__(self: Decorator[Literal[False]], function: Callable[P, R], /) -> LockedDjangoTask[P, R]: ...

        def __call__(self, function: Any, /) -> Any:
            """The task."""

else:

    class LockedDjangoTask(LockedTask, DjangoTask):
        """A `LockedTask` with the ``delay_on_commit`` and ``apply_async_on_commit`` of Celery's task class for Django.

        They take the key and send the message when the transaction commits; after a rollback they do neither.
        """

        abstract = True

        async def aapply_async(self, args=None, kwargs=None, **options):
            """Do what `apply_async` does, in a thread. An eager run has the database connection of Django's own."""
            if not self.app.conf.task_always_eager:
                return await super().aapply_async(args, kwargs, **options)
            return await sync_to_async(self.apply_async)(args, kwargs, **options)


def locked_task(
    app: Celery | None = None,
    *,
    bind: IsBound = False,  # type: ignore[assignment]  # as in `celery_redislock.locked_task`
    **options: Unpack[TaskOptions],
) -> Decorator[IsBound]:
    """Declare a `LockedDjangoTask`. Without an app it is a shared task. As `celery_redislock.locked_task` otherwise."""
    options.setdefault("base", LockedDjangoTask)
    return cast("Decorator[IsBound]", decorator.locked_task(app, bind=bind, **options))


@checks.register("celery_redislock")
def check_locked_tasks(app_configs: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """An error for each wrong option, a warning for each task whose options do nothing. Connects to no server.

    Celery ignores what the system checks report. In a worker the first wrong task must raise its error, so nothing is
    checked there.
    """
    if runs_system_checks():
        return []
    app = the_app()
    if is_nobodys(app):
        hint = "import it in the __init__.py of your project, as Celery's documentation says"
        return [checks.Warning("the project has no Celery app", hint, id="celery_redislock.W002")]
    kinds = {"error": (checks.Error, "celery_redislock.E001"), "warning": (checks.Warning, "celery_redislock.W001")}
    found = ((one, *kinds[one.level]) for one in check_tasks(app))
    return [kind(one.text.removeprefix(f"{one.task}: "), obj=one.task, id=code) for one, kind, code in found]
