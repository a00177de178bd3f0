"""Holds a lock of kazoo's: kazoo_lock.py HOSTS, then lines `acquire PATH`, `try PATH` and `release`."""

import sys

from kazoo.client import KazooClient

client = KazooClient(hosts=sys.argv[1], timeout=10)
client.start()
lock = None

for line in sys.stdin:
    what, *path = line.split()
    if what == "release":
        lock.release()
        print("released", flush=True)
        continue
    lock = client.Lock(path[0], "kazoo", extra_lock_patterns=["-lock-"])
    held = lock.acquire(blocking=what == "acquire")
    print("held" if held else "taken", flush=True)

client.stop()
