"""Exchange between the launchers of several nodes about ranks without progress, through the store that they share.

Each launcher writes a short message every second: whether its ranks are without progress, and where they are. The
launcher of rank 0 reads those of the others only while its own ranks are without progress. It then asks all of them
for stacks, decides, and writes the verdict, which the others read.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented there

Message: TypeAlias = dict[str, Any]
_log = logging.getLogger("composer_dist.launch")
_BEAT_S = 1.0
_SILENT_S = 6.0
_CLOSE_S = 2.0
_VERDICT, _ASKED = "verdict", "asked"


@dataclass(frozen=True, slots=True)
class Node:
    """Another node as its launcher's last message describes it.

    Attributes:
        ranks: Its ranks.
        message: The last message.
        is_silent: Whether its launcher has not written for some seconds.
    """

    ranks: Collection[int]
    message: Message
    is_silent: bool


class Nodes:
    """The messages of all launchers of an attempt, exchanged by a thread, as the store may not answer.

    Args:
        connect: Returns the store. Called in the thread, and again after an error.
        ranks: The global ranks of this node.
        world_size: The number of ranks of all nodes.
        attempt: Distinguishes the messages of attempts that share a store.
    """

    def __init__(self, connect: "Callable[[], Store]", ranks: Collection[int], world_size: int, attempt: str) -> None:
        self._connect, self._world_size = connect, world_size
        self._first, self._num_ranks = min(ranks), len(ranks)
        self._prefix = f"composer/watch/{attempt}"
        self._message: Message = {}
        self._outgoing: dict[str, str] = {}
        self._wants_stacks = False
        self._seen: dict[int, tuple[Message, float]] = {}
        """The last message of each other node, by its first rank, and the time at which it was new."""
        self._reached_s = time.monotonic()
        self._is_closed = False
        self._wake = threading.Event()
        self._requested = self._served = 0
        self.reads_all = False
        """Whether the messages of all nodes are read, and not only that of rank 0's."""
        self._reads_since_s = 0.0
        self.asked = 0
        """How often a launcher has asked all nodes for stacks."""
        self.answers: dict[int, Message] = {}
        """The answers to the last request, by the first rank of the node."""
        self.verdict: Message | None = None
        """The verdict of a launcher of any node."""
        self._thread = threading.Thread(target=self._serve, name="composer-nodes", daemon=True)
        self._thread.start()

    @property
    def has_rank_0(self) -> bool:
        """Return whether rank 0 is on this node, whose launcher then decides."""
        return self._first == 0

    @property
    def is_cut_off(self) -> bool:
        """Return whether the store has not answered for some seconds."""
        return time.monotonic() - self._reached_s > _SILENT_S

    def others(self) -> list[Node]:
        """Return the other nodes that have written a message."""
        now, cut = time.monotonic(), self.is_cut_off
        return [
            Node(
                range(first, first + message["num_ranks"]),
                message,
                cut or now - max(new_s, self._reads_since_s) > _SILENT_S,
            )
            for first, (message, new_s) in sorted(self._seen.items())
        ]

    def unheard(self) -> list[int]:
        """Return the ranks of other nodes that have not written a message."""
        heard = {rank for node in self.others() for rank in node.ranks}
        own = range(self._first, self._first + self._num_ranks)
        return [rank for rank in range(self._world_size) if rank not in heard and rank not in own]

    def tell(self, message: Message) -> None:
        """Replace this node's message."""
        self._message = message

    def read_all(self, is_on: bool) -> None:
        """Start or end reading the messages of all nodes, on the node of rank 0."""
        if is_on and not self.reads_all and self.has_rank_0:
            self._reads_since_s = time.monotonic()  # what was read before is old, but not because a node is silent
        self.reads_all = is_on

    def ask(self) -> bool:
        """Ask the other nodes for their views and stacks, which then come into `answers`; return whether it worked."""
        self.read_all(True)
        self._wants_stacks = True
        return self.refresh()

    def answer(self, number: int, answer: Message) -> None:
        """Send the answer to a request."""
        self._outgoing[f"stacks/{self._first}"] = json.dumps(answer | {"number": number})
        self._wake.set()

    def announce(self, verdict: Message) -> None:
        """Tell the verdict to the other nodes."""
        self.verdict = verdict
        self._outgoing[_VERDICT] = json.dumps(verdict)
        self._wake.set()

    def refresh(self, timeout_s: float = _CLOSE_S) -> bool:
        """Exchange the messages now, and return whether it was possible in time."""
        self._requested = number = self._requested + 1
        self._wake.set()
        deadline_s = time.monotonic() + timeout_s
        while self._served < number and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return self._served >= number

    def close(self) -> None:
        """End the thread after a last exchange, if the store answers in time."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        store: Store | None = None
        beat = 0
        while True:
            self._wake.clear()
            is_last, number, beat = self._is_closed, self._requested, beat + 1
            try:
                store = store or self._connect()
                self._exchange(store, beat)
                self._reached_s = time.monotonic()
                self._served = number
            except Exception as error:  # of any kind, as the store may be of any backend
                _log.debug("The store of the launchers does not answer: %s", error)
                store = None  # a client whose connection was lost does not connect again
            if is_last:
                return
            self._wake.wait(_BEAT_S)

    def _exchange(self, store: "Store", beat: int) -> None:
        while self._outgoing:
            key, text = next(iter(self._outgoing.items()))
            store.set(self._key(key), text)
            if self._outgoing.get(key) == text:
                del self._outgoing[key]
        common = {"beat": beat, "num_ranks": self._num_ranks, "has_seen": self.verdict is not None}
        if self._message:
            store.set(self._key(self._first), json.dumps(self._message | common))
        wants, self._wants_stacks = self._wants_stacks, False
        asked = store.add(self._key(_ASKED), int(wants))
        if asked != self.asked:
            self.asked, self.answers = asked, {}
        if self.verdict is None:
            self.verdict = self._read(store, _VERDICT)
        for first in self._to_read():
            message = self._read(store, first)
            if message is None:
                continue
            if first not in self._seen or self._seen[first][0]["beat"] != message["beat"]:
                self._seen[first] = (message, time.monotonic())
            if message.get("answered") == self.asked and first not in self.answers:
                answer = self._read(store, f"stacks/{first}")
                if answer is not None and answer["number"] == self.asked:
                    self.answers[first] = answer

    def _to_read(self) -> Iterable[int]:
        if not self.reads_all:
            return () if self.has_rank_0 else (0,)
        return sorted({*self._seen, *self.unheard()})

    def _read(self, store: "Store", name: str | int) -> Message | None:
        key = self._key(name)
        # Never waits for a key, as another call would have to wait for it.
        return json.loads(store.get(key)) if store.check([key]) else None

    def _key(self, name: str | int) -> str:
        return f"{self._prefix}/{name}"


def all_have_seen(nodes: Iterable[Node]) -> bool:
    """Return whether the launchers that still write have read the verdict."""
    return all(node.is_silent or node.message.get("has_seen") for node in nodes)


def is_stalled_everywhere(nodes: Iterable[Node], own: Mapping[str, bool]) -> bool:
    """Return whether no rank makes progress, on any node whose launcher still writes.

    Args:
        nodes: The other nodes.
        own: What this node's launcher says of it.
    """
    messages = [own, *(node.message for node in nodes if not node.is_silent)]
    return all(each.get("is_over") for each in messages) and any(each.get("is_training") for each in messages)
