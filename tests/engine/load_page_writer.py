"""Publishes a rank's load in shared memory, for gateways on the same host (the layout of src/engine/mailbox.h).

    page = LoadPage("/run/user/1000/my-engine", "rank0")   # the path goes into the ready response as "rankgate_load_mailbox"
    page.publish(running=3, waiting=1, active_pages=40, total_pages=1000, step=17)   # after every scheduler step
    page.close()
"""
import mmap
import os
import secrets
import struct
import time


class LoadPage:
    def __init__(self, directory: str, name: str):
        os.makedirs(directory, mode=0o700, exist_ok=True)  # must stay 0700 and ours, or readers refuse it
        self.path = os.path.join(directory, name)
        if os.path.lexists(self.path):
            os.unlink(self.path)  # a fresh file: old readers keep the old page and see its writer gone
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, 4096)
        self.words = memoryview(mmap.mmap(fd, 4096)).cast("Q")  # aligned 8-byte stores
        os.close(fd)
        self.words[1] = 1  # version
        self.words[2] = secrets.randbits(64)  # epoch: a new one per writer
        self.words[3] = os.getpid()
        self.words[0] = struct.unpack("<Q", b"RGLOAD1\0")[0]  # last: now it is a page

    def publish(self, running: int, waiting: int, active_pages: int, total_pages: int, step: int = 0) -> None:
        sequence = self.words[4]
        self.words[4] = sequence + 1  # odd: being written, readers try again
        self.words[5], self.words[6], self.words[7], self.words[8] = running, waiting, active_pages, total_pages
        self.words[9], self.words[10] = step, time.monotonic_ns()
        self.words[4] = sequence + 2  # x86 keeps stores in order; elsewhere let native code do this

    def close(self) -> None:
        self.words[11] = 1
        os.unlink(self.path)
