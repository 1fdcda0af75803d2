"""What a rank writes to stdout or stderr: a pipe of which the first and the last part are kept."""

import os
import sys

KEPT = 100_000  # bytes at the beginning, and as many at the end


class Stream:
    """The stream `name` ("stdout" or "stderr") of one rank. The rank writes to `writer`."""

    def __init__(self, name, rank, context):
        self.name = name
        self.rank = rank
        self.reader, self.writer = context.Pipe(duplex=False)
        self.open = True
        self.head = b""
        self.tail = b""
        self.left_out = 0
        os.set_blocking(self.reader.fileno(), False)

    def fileno(self):
        return self.reader.fileno()

    def read(self):
        """Read what is there, 1 MB at most: a rank that writes without end must not hold us up."""
        for _ in range(16):
            try:
                data = os.read(self.fileno(), 2**16)
            except BlockingIOError:
                return
            if not data:
                self.open = False
                return
            room = KEPT - len(self.head)
            self.head += data[:room]
            tail = self.tail + data[room:]
            self.tail = tail[-KEPT:]
            self.left_out += len(tail) - len(self.tail)

    def close(self):
        """Print what was kept, with the rank in front of each line, and close our ends."""
        self.read()
        self.reader.close()
        self.writer.close()
        if self.left_out:
            note = f"... {self.left_out:,} bytes were left out here ..."
            lines = [*_lines(self.head), note, *_lines(self.tail)]
        else:
            lines = _lines(self.head + self.tail)
        text = "".join(f"[rank {self.rank}] {line}\n" for line in lines)
        print(text, end="", file=getattr(sys, self.name))


def _lines(data):
    return data.decode(errors="replace").splitlines()
