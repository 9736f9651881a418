"""The windows: every span of seconds that the checker grants, each in one place and with its reason.

Each may hide a bug, so none is longer than its reason, or than runs with other seeds on a busy machine have shown that
it must be. How long a fault or a wait lasts is said where it is made: such a time hides no bug.
"""

from __future__ import annotations

import math

from celery_redislock.line.lines import OFFERED_FOR
from celery_redislock.line.listener import LOOK_EVERY, SILENCE
from celery_redislock.line.room import LEAVING
from celery_redislock.message.republish import OVERDUE
from chaos.stage import VISIBILITY
from chaos.tasks import LEASE

#: What a process does at once takes so long on a busy machine: from the grant to the body's first line, from the end of
#: a standstill to the look at its locks, from a fault to the line that tells of it.
AT_ONCE = 0.2
#: From the end of a body to the ack of its message: where the lock server is silent, the child's release is sent twice,
#: with a time limit of 0.5 s each and a pause of up to 0.1 s between them.
ACK = 2 * 0.5 + 0.1 + AT_ONCE
#: From a cut of the broker's connections until the runs of a worker know of it: its main process has to notice it.
CUT_TOLD = 0.5
#: Every holder asks the lock server again after a third of its lease.
RENEWAL = LEASE / 3
#: A lock that could be renewed lives for at least so long after its process has come to a standstill.
LAPSE = LEASE - RENEWAL - AT_ONCE
#: The keeper makes up for a release that was not answered within a second after the lock server answers again.
MADE_UP_FOR = 1.0
#: A message lies in the queue for so long before kombu takes it: there are nine children for fifteen messages and a
#: burst. Beside other tests one lay there for 2.3 s. On a busier machine, for as long as others published at about the
#: same time.
IN_QUEUE, NEARBY = 3.0, 5.0
#: A body takes up to eight seconds, and may have to wait for a child of its worker before that.
IN_WORKER = 10.0
#: The visibility timeout counts from when kombu has taken a message; the worker notes the receipt after that.
RESTORED = VISIBILITY - AT_ONCE
#: A worker that notes the receipt so late does not know that its message is due to be delivered again.
TOO_LATE = (1 - OVERDUE) * VISIBILITY
#: The coroner looks every 0.02 s, and may be late to write down what it sees.
DEATH_NOTED = 0.03
#: A wake-up takes milliseconds. Where it is lost, the key is kept for a second for a room that does not come, and the
#: others look later still: a key that idles for longer than this has waited for a look.
IDLE = OFFERED_FOR + AT_ONCE
#: By so many at most is one passed who waits, though its worker has no free slot: as soon as a run ends there, one
#: that waits takes its slot. Until then its bodies may take eight seconds, in which others run three a second.
MOST_PASSES = 24
#: A group gets no more than a turn ahead of its share, and may have been a turn behind it before. With several workers
#: a few turns may swap: two.
MOST_AHEAD = 2 + 2
#: A room may have lost wake-ups for so long after a fault: until it knows that its connection is dead. Rooms that died
#: have left the lines by then, leases have ended, and what had no worker has one.
RECOVERED = 2 * (SILENCE + LOOK_EVERY)
#: A child that ends, and another that begins in its place, may take so long on a busy machine.
REPLACED = 1.0
#: A slot that has become free goes to a message that waits for a free key: a round trip to the lock server, and a child
#: that begins. Where a wake-up is lost, the key is kept for another room before that.
STALLED = 2.0
#: A worker that is told to end leaves its lines and publishes again what waits in it, and another worker fetches that:
#: a Redis broker is asked for the next message about once a second.
HANDED_ON = LEAVING + 1.0 + AT_ONCE
#: While messages wait, a worker looks at their key when its lease ends, and the holder renews the lease. What does not
#: fit into the worker comes back now and then. Each command counts, also those that a script runs.
MOST_COMMANDS = 100.0
#: What waits needs 11 kB, with its message, which the broker's client keeps too, and with what the allocator keeps.
MOST_BYTES = 25_000
#: A worker without a free slot writes that down no more often, in seconds.
TOLD_AGAIN = 0.2
#: From the grant of a rate's permit to the first line of its body: the grant is a round trip, and a message that has
#: waited goes to a child after that.
BEGINS = 0.5
#: A run learns of a newer call within a second, at its next renewal, and stops at its next step.
STOPPED = 1.0 + ACK
#: The time of death of a process that has not died.
NEVER = math.inf
