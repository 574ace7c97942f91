// BullMQ on Node, driven like adapter.py: a sorted set, and a marker on which the worker blocks.
const fs = require('node:fs');
const readline = require('node:readline');
const { performance } = require('node:perf_hooks');
const { Queue, Worker } = require('bullmq');

const BULK = 1000;
const [, , what, url, settings, file] = process.argv;
const address = new URL(url);
const connection = { host: address.hostname, port: Number(address.port), maxRetriesPerRequest: null };
const now = () => (performance.timeOrigin + performance.now()) / 1000;
const payload = (due) => ({ due, text: 'x'.repeat(62) });
const options = (due) => ({ delay: Math.max(1, Math.ceil((due - now()) * 1000)), removeOnComplete: true });

async function offer() {
  const queue = new Queue('benchmark', { connection });
  await queue.waitUntilReady();
  console.log('{"is_async": true}');
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { bulk, in_flight: inFlight, count, after, spread } = JSON.parse(line);
    const first = now() + after;
    const dues = Array.from({ length: count }, (_, place) => first + spread * ((0.6180339887 * place) % 1));
    const started = now();
    if (bulk) {
      for (let at = 0; at < count; at += BULK) {
        await queue.addBulk(dues.slice(at, at + BULK).map((due) => ({ name: 'handle', data: payload(due), opts: options(due) })));
      }
    } else {
      for (let at = 0; at < count; at += inFlight) {
        await Promise.all(dues.slice(at, at + inFlight).map((due) => queue.add('handle', payload(due), options(due))));
      }
    }
    console.log(JSON.stringify({ seconds: now() - started, first }));
  }
  process.exit(0);
}

function handle() {
  process.stdin.on('end', () => process.exit(0)).resume();
  const output = fs.openSync(file, 'a');
  let kept = [];
  setInterval(() => {
    if (!kept.length) return;
    fs.writeSync(output, Buffer.from(Float64Array.from(kept).buffer));
    kept = [];
  }, 30);
  const note = async (job) => {
    kept.push(now(), job.data.due);
  };
  new Worker('benchmark', note, { connection, ...(settings === 'best' ? { concurrency: 100 } : {}) });
}

if (what === 'offer') offer();
else handle();
