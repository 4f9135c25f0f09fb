"""After which batch all ranks stop, if one of them is asked to.

Ranks that train exchange no messages of their own for this. Each has a thread that looks into the store through which
the ranks once met; the training itself only counts its batches and looks at a flag. The ranks agree so:

1. Somebody's request is written into the store, and every thread comes upon it.
2. Each thread closes a gate in front of its rank's next batch, and then says which batch the rank has entered already.
   The rank counts a batch before it looks at the gate, so it never trains beyond what its thread has said.
3. The latest batch that any rank has entered is the last one for all. The gates open, and each rank stops behind it.

A rank that waits at its gate keeps nobody from finishing a batch that all have entered, and threads answer also while
their rank waits for others in a collective, so nobody waits in a circle.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from composer.trainer._store import open_store
from composer_dist import get_global_rank, get_world_size

__all__ = ["StopAgreement"]

_POLL_S: Final = 0.5  # how soon a request is noticed; each look is one short message to the store
_ANSWER_POLL_S: Final = 0.02  # the same, once there is a request
_PATIENCE_S: Final = 60.0  # threads answer within moments; who takes longer has died
_NEVER: Final = "never"  # what a rank says that has come to the end of its training
_fits: Final = itertools.count()  # of this process; all ranks have as many


class StopAgreement:
    """What this rank needs in order to stop together with all others.

    Args:
        ask: Returns what this rank has been asked for, such as the number of a signal, or `None` so far. A thread
            calls it.

    Attributes:
        request: What the rank that was asked first was asked for, as soon as this one knows of it.
    """

    def __init__(self, ask: Callable[[], int | None]) -> None:
        self.request: int | None = None
        self._ask = ask
        self._entered = 1  # the batch that this rank trains on, or is about to, counted from 1
        self._is_closed = False  # the gate
        self._last: int | None = None
        self._is_known = threading.Event()
        self._is_over = threading.Event()
        self._has_failed = False
        self._error: Exception | None = None
        self._key = f"composer/stop/{next(_fits)}"
        self._thread = threading.Thread(target=self._watch, name="composer-stop", daemon=True)

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks stop, or have come to their end, after one and the same batch."""
        return self._last is not None

    def begin(self) -> None:
        """Look out for requests from now on. Every rank must call this before its first batch."""
        self._thread.start()

    def stops_here(self) -> bool:
        """Say, between two batches, whether all ranks stop after the one that has ended.

        Raises:
            RuntimeError: If the other ranks do not answer.
        """
        ended = self._entered
        self._entered = ended + 1  # before the gate is looked at
        if not self._is_closed:
            return False
        if not self._is_known.wait(_PATIENCE_S):
            raise RuntimeError(
                f"The ranks were asked to stop, by signal {self.request}, and within {_PATIENCE_S:g} s not all "
                f"{get_world_size()} of them said where they are. One has probably died; its own output says why."
            ) from self._error
        return self._last is not None and ended >= self._last

    def end(self, *, has_failed: bool) -> None:
        """Look out no more, and return when no other rank needs an answer.

        Args:
            has_failed: Whether this rank leaves its training before the end, so that it can agree to nothing.
        """
        self._has_failed = has_failed
        self._is_over.set()
        self._thread.join(2 * _PATIENCE_S)

    def _watch(self) -> None:
        try:
            store = open_store(self._key)
            if self._is_asked(store):
                self._is_closed = True
                self._learn_last(store, str(self._entered))
            elif not self._has_failed:
                store.set("last" if get_global_rank() == 0 else _key_of(get_global_rank()), _NEVER)
        except _NoAnswerError as error:
            self._error = error
        except RuntimeError:  # the process that has the store is gone, and with it whoever would answer
            self._is_known.set()

    def _is_asked(self, store: Any) -> bool:
        """Wait until any rank is asked to stop, and say whether that was before the end of this one's training."""
        while not self._is_over.is_set():
            asked = self._ask()
            if asked is not None:
                store.compare_set("request", "", str(asked))  # the first one counts
            if store.check(["request"]):
                self.request = int(store.get("request"))
                return True
            self._is_over.wait(_POLL_S)
        return False

    def _learn_last(self, store: Any, entered: str) -> None:
        """Find out the last batch: rank 0 reads what each rank says, and the others what it makes of that."""
        if get_global_rank() == 0:
            said = [entered, *(self._read(store, _key_of(rank)) for rank in range(1, get_world_size()))]
            last = _NEVER if _NEVER in said else str(max(map(int, said)))
            store.set("last", last)
        else:
            store.set(_key_of(get_global_rank()), entered)
            last = self._read(store, "last")
        self._last = None if last == _NEVER else int(last)
        self._is_known.set()
        self._wait_for_readers(store)

    def _wait_for_readers(self, store: Any) -> None:
        """Keep rank 0, which may have the store, until everybody knows."""
        if self._last is not None and store.add("learned", 1) == get_world_size():
            store.set("all learned", "")
        if self._last is not None and get_global_rank() == 0:
            self._read(store, "all learned")

    def _read(self, store: Any, key: str) -> str:
        """Return what another rank writes, once it is there; nothing waits that must end with this process."""
        deadline = time.monotonic() + _PATIENCE_S
        while not store.check([key]):
            if self._has_failed or time.monotonic() > deadline:
                raise _NoAnswerError(f"{key!r} was not written")
            time.sleep(_ANSWER_POLL_S)
        return store.get(key).decode()


class _NoAnswerError(Exception):
    """Another rank has not written what it should have."""


def _key_of(rank: int) -> str:
    return f"entered/{rank}"
