"""Documents of several sources, in proportions that hold all the time.

The next document comes from the source that is furthest behind its weight. So every beginning of
the documents has the shares of the weights, but for a document or so, and nothing is random. A
source that is used up ends, and the others go on in their proportions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from activation_extraction.common.log import log
from activation_extraction.common.visible import counted
from activation_extraction.text.documents import Document, DocumentStream, RowCounts


class Mixture:
    """The documents of one worker in several data sets, with the methods of a DocumentStream.

    streams: of each data set, all with the same worker and counts. names: for messages. weights:
    positive, in documents; rows without content do not count.
    """

    def __init__(
        self, streams: Sequence[DocumentStream], names: Sequence[str], weights: Sequence[float]
    ) -> None:
        self.worker = streams[0].worker
        self.counts: RowCounts = streams[0].counts
        self._streams = streams
        self._names = names
        self._weights = weights
        self._given = [0] * len(streams)

    def state(self) -> dict[str, Any]:
        return {"given": list(self._given), "streams": [each.state() for each in self._streams]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._given = list(state["given"])
        for stream, own in zip(self._streams, state["streams"], strict=True):
            stream.restore(own)

    def __iter__(self) -> Iterator[Document | None]:
        rows = {number: iter(stream) for number, stream in enumerate(self._streams)}
        while rows:
            number = min(rows, key=lambda n: (self._given[n] + 0.5) / self._weights[n])
            try:
                document = next(rows[number])
            except StopIteration:
                del rows[number]
                if rows:
                    log.warning(
                        "--mix: %s has no more than %s for this host; the others continue",
                        self._names[number],
                        counted(self._given[number], "document"),
                    )
                continue
            self._given[number] += document is not None
            yield document


Documents = DocumentStream | Mixture
