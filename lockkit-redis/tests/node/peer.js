// node-redlock on the masters whose ports are the arguments. Reads commands from stdin, a line each, and answers each with
// a line: `acquire <key> <ttl in ms>` with `granted` or `refused`, `release` with `released` or `gone`.
"use strict";

const { default: Redlock } = require("redlock");
const Redis = require("ioredis");

const masters = process.argv.slice(2).map((port) => new Redis(Number(port), "127.0.0.1"));
const redlock = new Redlock(masters, { retryCount: 0 });
redlock.on("error", () => {});

let lock;

async function answer(line) {
  const [command, key, ttl] = line.split(" ");
  try {
    if (command === "acquire") {
      lock = await redlock.acquire([key], Number(ttl));
      return "granted";
    }
    await lock.release();
    return "released";
  } catch {
    return command === "acquire" ? "refused" : "gone";
  }
}

require("readline")
  .createInterface({ input: process.stdin })
  .on("line", async (line) => console.log(await answer(line)))
  .on("close", () => process.exit(0));
