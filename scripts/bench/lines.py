"""The job of logs.py: prints lines as fast as it can, or the time of day repeatedly."""

import os
import sys
import time

LINE = b"0123456789" * 9 + b"012345678\n"
# Lines per write, as from a program whose output is buffered.
BLOCK = 640


def main(what: str, count: int, pause: float, note: str) -> None:
    """Print `lines` without a pause, or `times`; record the start in the file note_HOST."""
    with open(f"{note}_{os.uname().nodename}", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(str(time.time()))
    if what == "lines":
        while count:
            block = min(count, BLOCK)
            sys.stdout.buffer.write(LINE * block)
            sys.stdout.buffer.flush()
            count -= block
    for _ in range(count):
        os.write(1, f"{time.time()}\n".encode())
        time.sleep(pause)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
