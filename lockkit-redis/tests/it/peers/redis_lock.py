"""Holds a `Lock` of redis-py's: redis_lock.py URL, then lines `acquire KEY`, `try KEY` and `release`."""

import sys

import redis

client = redis.Redis.from_url(sys.argv[1])
lock = None

for line in sys.stdin:
    what, *key = line.split()
    if what == "release":
        lock.release()
        print("released", flush=True)
        continue
    lock = client.lock(key[0], timeout=60, sleep=0.02)
    held = lock.acquire(blocking=what == "acquire")
    print("held" if held else "taken", flush=True)
