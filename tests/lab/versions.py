"""Where the tests must know what the oldest supported Celery does not do."""

from __future__ import annotations

import celery

#: Such a Celery records no outcome of a task that exits, or that rejects its message for good.
BEFORE_5_7 = celery.VERSION[:2] < (5, 7)
