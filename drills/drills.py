"""The drills. Each makes one fault, and asks for its cause as someone who does not know it would: by a task's id.

A drill names the sentences of `why` that must be said, and those that would not be true.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from celery_redislock.cli.sentences import Say
from drills.desk import LONG, Desk
from tests.lab.app import make_app
from tests.lab.kinds import TIME_OUTS
from tests.lab.topologies import WATCHED, pair
from tests.lab.workers import kept

#: How many messages wait for the key of a run that hangs.
CROWD = 500
#: Not true of a message whose worker does not run it soon, or of a run that has ended.
SOON = (Say.NEXT, Say.CALLED)


def child_killed(desk: Desk) -> None:
    """The process of the run that holds the key is killed, as the system does if memory is short."""
    worker = desk.start_worker()
    holder = desk.hold()
    (waiter,) = desk.wait_in_line(1)
    pid = worker.busy_child()
    desk.strikes("SIGKILL to the pool process of the run that holds the key")
    worker.kill_child(pid)
    desk.why(waiter, Say.DONE)  # its turn came at once
    desk.why(holder, Say.CUT_SHORT, untrue=(Say.RUNS, Say.HOLDS, *SOON))


def worker_killed(desk: Desk) -> None:
    """A whole worker is killed, with the run that holds the key; a message waits in another worker."""
    worker = desk.start_worker()
    holder = desk.hold()
    desk.start_another_worker()
    (waiter,) = desk.wait_in_line(1, 2)
    desk.strikes("SIGKILL to the worker of the run that holds the key, and to its pool processes")
    worker.kill()
    desk.why(waiter, Say.WAITS, Say.HELD, Say.SILENT, untrue=SOON)
    desk.why(holder, Say.HOLDS_SOMEWHERE, Say.SILENT, untrue=(Say.RUNS, *SOON))


def host_paused(desk: Desk) -> None:
    """The host of the run that holds the key stands still, as when a virtual machine is moved."""
    worker = desk.start_worker()
    holder = desk.hold()
    desk.start_another_worker()
    (waiter,) = desk.wait_in_line(1, 2)
    desk.strikes("SIGSTOP to the worker of the run that holds the key, and to its pool processes")
    worker.pause()
    desk.why(waiter, Say.WAITS, Say.HELD, Say.SILENT, untrue=SOON)
    desk.why(holder, Say.HOLDS_SOMEWHERE, Say.SILENT, untrue=(Say.RUNS, *SOON))
    worker.resume()


def redis_restarted(desk: Desk) -> None:
    """The lock server ends, and comes back without its data."""
    desk.start_worker()
    holder = desk.hold()
    (waiter,) = desk.wait_in_line(1)
    desk.strikes("SIGKILL to the lock server; once `why` has said that, it starts again, empty")
    desk.locks.kill()
    desk.why(waiter, "could not reach the lock server", untrue=SOON)
    desk.wait_for_alert("LockServerAway")
    desk.locks.restart()
    desk.strikes(desk.seen.fault)
    desk.why(holder, Say.RUNS, Say.HOLDS_NOTHING, untrue=(Say.HOLDS,))
    desk.wait_for_alert("LockLost")


def wrong_password(desk: Desk) -> None:
    """Someone changes the lock server's password."""
    desk.start_worker()
    desk.hold()
    (waiter,) = desk.wait_in_line(1)
    desk.strikes("a new password on the lock server, which ends all connections")
    desk.locks.client.config_set("requirepass", "a new one")
    desk.locks.client.client_kill_filter(_type="normal", skipme=True)
    desk.app.close()
    desk.app = make_app(desk.config)  # the command line is a new process
    desk.why(waiter, "check the user and the password in redislock_url", untrue=SOON)
    desk.wait_for_alert("LockServerAway")


def stuck_holder(desk: Desk) -> None:
    """A run hangs, with its key, and 500 messages wait for it."""
    desk.start_worker()
    holder = desk.hold()
    *_, last = desk.wait_in_line(CROWD)
    desk.strikes(f"a body that does not end, while {CROWD} messages wait for its key")
    desk.why(last, Say.WAITS, Say.HELD, Say.RENEWED, Say.AHEAD, untrue=(*SOON, Say.SILENT))
    desk.why(holder, Say.RUNS, Say.HOLDS)
    desk.wait_for_alert("OldestWait")


def draining_worker(desk: Desk) -> None:
    """A worker is told to stop; its run goes on, and what waited in it goes to another worker."""
    worker = desk.start_worker()
    holder = desk.hold()
    (waiter,) = desk.wait_in_line(1)
    desk.start_worker()
    desk.strikes("SIGTERM to the worker that runs a long task and keeps a waiting message")
    worker.process.send_signal(signal.SIGTERM)
    desk.why(holder, Say.HOLDS_SOMEWHERE, Say.SILENT, Say.RENEWED, untrue=(Say.RUNS, *SOON))
    desk.why(waiter, Say.WAITS, Say.HELD, Say.SILENT, untrue=SOON)
    if kept(desk.app) != 1:
        desk.seen.untrue.append("the waiting message is not in the other worker")


def changed_key(desk: Desk) -> None:
    """Publisher and worker compute different keys for one call, as during a deploy that changes `lock_args`."""
    desk.start_worker(redislock_prefix="newer")
    desk.strikes("a job of a publisher that makes another key than the worker")
    job = str(desk.task("job").delay("k", "a job", LONG).id)
    desk.why(job, Say.RUNS, Say.OTHER_KEY, untrue=SOON)


def failover(desk: Desk) -> None:
    """The lock server's primary dies, and the Sentinels make its replica the primary."""
    with pair(desk.folder / "pair") as servers:
        at = ",".join(f"127.0.0.1:{port}" for port in servers.ports)
        desk.use_locks_at(f"sentinel://{at}/0", master_name=WATCHED, **TIME_OUTS)
        desk.start_worker()
        holder = desk.hold()
        (waiter,) = desk.wait_in_line(1)
        desk.strikes("SIGKILL to the primary of the lock server")
        servers.primary.kill()
        desk.why(waiter, "could not reach the lock server", untrue=SOON)
        servers.wait_for_failover()
        desk.strikes(desk.seen.fault)
        desk.why(holder, Say.RUNS, Say.HOLDS)


DRILLS: dict[str, Callable[[Desk], None]] = {
    drill.__name__: drill
    for drill in (
        child_killed,
        worker_killed,
        host_paused,
        redis_restarted,
        wrong_password,
        stuck_holder,
        draining_worker,
        changed_key,
        failover,
    )
}
