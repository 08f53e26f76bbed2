"""The signals of a replay: when each reaches a value, and who waits for which of them together.

Owns levels and waits. The moment at which a signal will be up is known as soon as it is raised, so a wait is settled by
the last of its words to be raised, and needs no event of its own. Queues that wait for the same words (all of a rank,
in the opening handshake) share one wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.plan.plan import Plan, SignalKind
from dovetail.sim.causes import START, Causes

Word = tuple[int, int]  #: (signal, value)


class Wait:
    """Words that must all be reached."""

    __slots__ = ("gate", "missing", "moment", "rings", "words")

    def __init__(self, words: Sequence[Word]) -> None:
        self.words = words
        self.missing = 0  #: words whose moment is not known yet
        self.moment = START  #: at which the last one is reached, once none is missing
        self.gate = False  #: is that one a gate?
        self.rings: list[int] = []  #: that stand at it


class Signals:
    """The signals of a plan, as far as they are known."""

    def __init__(self, plan: Plan, causes: Causes) -> None:
        self._causes = causes
        self._kinds = [s.kind for s in plan.signals]
        self._level: list[list[tuple[int, int]]] = [[] for _ in plan.signals]  # (value, moment), in order of time
        self._waits: list[list[tuple[int, Wait]]] = [[] for _ in plan.signals]  # (value, who misses it)
        #: of an imported signal: (value, the word that must be reached before it can have that value)
        self._needs: dict[int, list[tuple[int, Word]]] = {}
        for external in plan.external:
            if external.before and external.after:
                signal, value = external.before
                self._needs.setdefault(signal, []).append((value, external.after))

    def reach(self, signal: int, value: int, moment: int) -> list[Wait]:
        """The signal has the value from that moment on; returns the waits that are settled by it."""
        self._level[signal].append((value, moment))
        settled = []
        if waiting := self._waits[signal]:
            self._waits[signal] = [found for found in waiting if found[0] > value]
            for wanted, wait in waiting:
                if wanted <= value:
                    wait.missing -= 1
                    if not wait.missing:
                        self._settle(wait)
                        settled.append(wait)
        return settled

    def wait(self, words: Sequence[Word]) -> Wait:
        """A wait for these words, settled if all their moments are known."""
        made = Wait(words)
        for word in words:
            for root in self._roots(word) if self._kinds[word[0]] is SignalKind.IMPORTED else (word,):
                if self._moment_of(root) is None:
                    made.missing += 1
                    self._waits[root[0]].append((root[1], made))
        if not made.missing:
            self._settle(made)
        return made

    def moment(self, word: Word) -> int | None:
        """The moment at which a signal reaches a value, as far as that is known."""
        if self._kinds[word[0]] is not SignalKind.IMPORTED:
            return self._moment_of(word)
        found = START
        for root in self._roots(word):
            moment = self._moment_of(root)
            if moment is None:
                return None
            found = self._causes.later(found, moment)
        return found

    def _settle(self, wait: Wait) -> None:
        last_ns = -1
        for word in wait.words:
            moment = self.moment(word)
            assert moment is not None
            if (when_ns := self._causes.when_ns[moment]) > last_ns:
                last_ns, wait.moment, wait.gate = when_ns, moment, self._kinds[word[0]] is SignalKind.GATE

    def _moment_of(self, word: Word) -> int | None:
        for reached, moment in self._level[word[0]]:
            if reached >= word[1]:
                return moment
        return None

    def _roots(self, word: Word) -> Sequence[Word]:
        """What a word comes down to: an imported signal is up from the start, but for what it follows."""
        signal, value = word
        if self._kinds[signal] is not SignalKind.IMPORTED:
            return (word,)
        needs = [after for reached, after in self._needs.get(signal, ()) if reached <= value]
        return [root for after in needs for root in self._roots(after)]
