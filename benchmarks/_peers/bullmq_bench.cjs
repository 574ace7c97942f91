// The scenarios of bullmq-bench with BullMQ, run like bullmq_bench.py.
const { randomUUID } = require('node:crypto');
const { performance } = require('node:perf_hooks');
const { Queue, Worker } = require('bullmq');

const [, , url, text] = process.argv;
const scenario = JSON.parse(text);
const address = new URL(url);
const connection = { host: address.hostname, port: Number(address.port), maxRetriesPerRequest: null };
const seconds = () => performance.now() / 1000;

function sample() {
  const objects = {};
  for (let at = 0; at < scenario.width; at++) {
    let value = {};
    for (let level = 1; level < scenario.depth; level++) value = { [randomUUID()]: value };
    objects[randomUUID()] = value;
  }
  return objects;
}

async function add(queue, data, count, bulk) {
  for (let at = 0; at < count; at += bulk || 1) {
    if (bulk) await queue.addBulk(Array.from({ length: Math.min(bulk, count - at) }, () => ({ name: 'test', data })));
    else await queue.add('test', data);
  }
}

function work(result) {
  let count = 0;
  let warm;
  return new Promise((resolve) => {
    const handle = async () => {
      count += 1;
      if (count === scenario.warm_up) warm = seconds();
      else if (count === scenario.warm_up + scenario.jobs) resolve(seconds() - warm);
      return result;
    };
    new Worker('benchmark', handle, { connection, concurrency: scenario.concurrency });
  });
}

async function main() {
  const data = sample();
  const queue = new Queue('benchmark', { connection });
  await queue.waitUntilReady();
  if (scenario.concurrency) {
    await add(queue, data, scenario.warm_up + scenario.jobs, 100);
    console.log(await work(data));
  } else {
    await add(queue, data, scenario.warm_up, scenario.bulk);
    const started = seconds();
    await add(queue, data, scenario.jobs, scenario.bulk);
    console.log(seconds() - started);
  }
  process.exit(0);
}

main();
