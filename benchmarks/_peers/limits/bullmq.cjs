// BullMQ on Node, open edition, driven like adapter.py: limits of the whole queue, kept on the server.
const fs = require('node:fs');
const readline = require('node:readline');
const { performance } = require('node:perf_hooks');
const { Queue, Worker } = require('bullmq');

const BULK = 1000;
const [, , what, url, words, file] = process.argv;
const task = JSON.parse(words);
const address = new URL(url);
const connection = { host: address.hostname, port: Number(address.port), maxRetriesPerRequest: null };
const now = () => (performance.timeOrigin + performance.now()) / 1000;

async function offer() {
  const queue = new Queue('benchmark', { connection });
  await queue.waitUntilReady();
  if (task.concurrency !== null) await queue.setGlobalConcurrency(task.concurrency);
  if (task.rate !== null) await queue.setGlobalRateLimit(task.rate, 1000);
  console.log('{"ready": true}');
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { first, count, tenant } = JSON.parse(line);
    const ttl = task.window * 1000;
    const last = { delay: ttl, deduplication: { id: tenant, ttl, extend: true, replace: true } };
    const kept = { first: { deduplication: { id: tenant, ttl } }, last }[task.keep];
    const jobs = Array.from({ length: count }, (_, place) => ({
      name: 'handle',
      data: { number: first + place },
      opts: { removeOnComplete: true, ...kept },
    }));
    if (kept) for (const job of jobs.splice(0)) await queue.add(job.name, job.data, job.opts);
    for (let at = 0; at < jobs.length; at += BULK) await queue.addBulk(jobs.slice(at, at + BULK));
    console.log(JSON.stringify({ offered: now() }));
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
  }, 20);
  const note = async (job) => {
    const started = now();
    if (task.handler) await new Promise((done) => setTimeout(done, task.handler * 1000));
    kept.push(started, now(), job.data.number);
  };
  new Worker('benchmark', note, { connection, concurrency: task.slots });
}

if (what === 'offer') offer();
else handle();
