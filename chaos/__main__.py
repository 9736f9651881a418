"""``python -m chaos``: random faults under load on real servers and workers, and what came of it."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from celery_redislock.protocol.names import GIVEN, GONE, NOTE
from chaos.callers import Callers
from chaos.check import Verdict, check
from chaos.complaints import complaints_in
from chaos.coroner import Coroner
from chaos.crowd import gather
from chaos.drills import Drills
from chaos.faults import CALM, WARM, Strike, plan, start
from chaos.load import Load, wait_for_the_end
from chaos.report import offences, table
from chaos.stage import Stage, open_stage
from chaos.tasks import LEASE, define_tasks, write_down_publishing
from chaos.windows import AT_ONCE
from tests.lab.app import make_app
from tests.lab.ledger import Ledger
from tests.lab.lock_servers import SERVE
from tests.lab.servers import MAY_BE_LEFT

BROKERS = ("redis", "rabbitmq")
#: Parts of the names of keys that hold no lock: such a key says that an attempt, or a claim, is over; or it has the
#: calls of a ticket that ended without a run; or it is a line, in which a dead room stands until the line ends.
NO_LOCKS = (NOTE.encode(), GONE.encode(), GIVEN.encode(), b"}:line")


def main() -> int:
    """Run on each broker, one after the other; return 1 where a promise was broken."""
    options = _options()
    if options.recheck:
        return _report(str(options.recheck), check(Ledger(options.recheck)))
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl+C: no process is left behind
    brokers = BROKERS if options.broker == "both" else (options.broker,)
    print(f"seed {options.seed}: {options.seconds:g} s of faults on {' and '.join(brokers)}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    broken = 0
    try:
        for broker in brokers:
            seconds = options.seconds / len(brokers)
            verdict = run(broker, folder / broker, options.seed, seconds, options.crowd, options.locks)
            broken += _report(f"{broker}, seed {options.seed}", verdict)
    except BaseException as error:
        print(f"ended by {error!r}; what there is so far is in {folder}", flush=True)
        if isinstance(error, KeyboardInterrupt):
            return 130
        raise
    if broken:
        print(f"broken promises; ledger and logs are in {folder}", flush=True)
        return 1
    shutil.rmtree(folder)
    return 0


def _report(title: str, verdict: Verdict) -> int:
    """Print a verdict; return 1 where a promise was broken."""
    print(table(title, verdict), offences(verdict), sep="\n", flush=True)
    return int(bool(verdict.offences))


def run(broker: str, folder: Path, seed: int, seconds: float, crowd: int, locks: str) -> Verdict:
    """One run on one broker; at its end so many messages wait for one key."""
    folder.mkdir()
    print(f"\n{broker}: starting servers and workers in {folder}", flush=True)
    with open_stage(broker, folder, locks=locks) as stage:
        _strike(stage, seed, seconds)
        if crowd:
            print(f"  {crowd} messages for one key", flush=True)
            gather(stage, crowd)
        _look_for_keys(stage)
    for log in [*folder.glob("post*/*.log"), *folder.glob("drill*/worker*.log")]:
        for text in complaints_in(log):
            stage.ledger.write({"event": "complaint", "text": text})
    return check(Ledger(folder / "ledger"))


def _strike(stage: Stage, seed: int, seconds: float) -> None:
    """Load and faults, until the time is over and all has come to its end."""
    app = make_app(stage.direct)
    define_tasks(app, stage.ledger)
    publish_in_silence = write_down_publishing(stage.ledger)
    coroner = Coroner(stage.ledger)
    coroner.start()
    load = Load(app, stage.ledger, f"{seed} load")
    load.start()
    callers = Callers(app, stage.ledger, f"{seed} callers")
    callers.start()
    end = time.monotonic() + seconds
    for strike in plan(f"{seed} faults", len(stage.posts)):
        if time.monotonic() + strike.pause > end:
            break
        time.sleep(strike.pause)
        print(f"  {seconds - end + time.monotonic():6.1f} s  {strike.name}", flush=True)
        start(stage, strike)
    stage.wait()
    stage.mend()
    print(f"  {seconds:6.1f} s  calm: {CALM:g} s of load without faults", flush=True)
    drills = Drills(stage)
    time.sleep(CALM)
    drills.wait()
    for sender in (load, callers):
        sender.enough.set()
    for sender in (load, callers):
        sender.join()
    for post in range(len(stage.posts)):  # healthy workers run what is left
        start(stage, Strike(0, WARM, post, 0))
    stage.wait()
    stage.mend()
    print(f"  {seconds:6.1f} s  all is mended; waiting for what is under way", flush=True)
    wait_for_the_end(load, stage.ledger)
    stage.ledger.write({"event": "over", "at": time.monotonic()})  # until now has waited who still waits
    for sender in (load, callers):
        sender.write_down_states()
    coroner.enough.set()
    coroner.join()
    publish_in_silence()
    app.close()


def _look_for_keys(stage: Stage) -> None:
    time.sleep(LEASE + AT_ONCE)
    clients: list[Any] = [stage.locks.client, stage.drill_locks.client]
    for client, key in [(one, key) for one in clients for key in one.keys("redislock:*")]:
        if client.exists(key.replace(b":pending", b":queued")) and key.endswith(b":pending"):
            continue  # these calls are kept for the message that has the place, which is looked at itself
        if not any(part in key for part in NO_LOCKS) and not MAY_BE_LEFT(key):
            holder = client.get(key) or b""
            stage.ledger.write({"event": "key", "key": key.decode(), "holder": holder.decode("utf-8", "replace")})


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of faults, in all (default: 60)")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: a random one")
    parser.add_argument("--broker", choices=[*BROKERS, "both"], default="both")
    parser.add_argument("--locks", choices=SERVE, default="one", help="the kind of the lock server (default: one)")
    parser.add_argument("--crowd", type=int, default=0, metavar="N", help="at the end, so many messages for one key")
    parser.add_argument("--recheck", type=Path, metavar="LEDGER", help="run nothing; check the ledger of a failed run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
