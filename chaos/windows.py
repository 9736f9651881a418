"""The windows: every span of seconds that the checker grants, each in one place and with its reason.

Each may hide a bug, so none is longer than many runs with other seeds have shown that it must be. How long a fault or a
wait takes is said where it is made: such a time hides nothing.
"""

from __future__ import annotations

import math

from celery_redislock.server.held import INTERVAL
from chaos.stage import VISIBILITY
from chaos.tasks import LEASE

#: What a process does at once takes so long on a busy machine: from the grant to the body's first line, from the end of
#: a standstill to the look at its locks, from a fault to the line that tells of it.
AT_ONCE = 0.5
#: From the end of a body to the ack of its message: the child stores the result and releases the key, which takes two
#: time limits of 0.5 s where the lock server is silent, and the main process must hear of it.
ACK = 1.5
#: After so long every holder has asked the lock server again.
RENEWAL = LEASE * INTERVAL
#: A lock that was renewed in time, and on a busy machine a little late, lives for so long after its last renewal.
LAPSE = LEASE - RENEWAL - AT_ONCE
#: The keeper makes up for a release that was not answered a second after the lock server answers again.
MADE_UP_FOR = 1.0
#: A message may lie in the queue for so long before kombu takes it.
IN_QUEUE = 5.0
#: A body takes up to eight seconds, and may have to wait for a child of its worker before that.
IN_WORKER = 10.0
#: The coroner looks every 0.02 s, and may be late to write down what it sees.
DEATH_NOTED = 0.03
#: What has not died has died after the end of all time.
NEVER = math.inf
#: Redis counts the visibility timeout from when kombu has taken a message, in whole seconds, and the worker notes the
#: receipt a moment later.
RESTORED = VISIBILITY - 1.0
