// Updates pages live. Pages work without this script too: they then reload by themselves.
"use strict";

// Times

const form = (options) => new Intl.DateTimeFormat(undefined, options);
const local = form({ dateStyle: "medium", timeStyle: "medium" });
const forms = {
  minute: form({ month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" }),
  clock: form({ hour: "2-digit", minute: "2-digit", hourCycle: "h23" }),
  weekday: form({ weekday: "short", day: "numeric" }),
  date: form({ month: "short", day: "numeric" }),
};
// A Monday, in seconds since 1970: see charts.py.
const MONDAY = 345600;

// Move the ticks of an axis to times that are round where the reader is.
function tick(axis) {
  const [start, end, step] = ["start", "end", "step"].map((name) => Number(axis.dataset[name]));
  const offset = -60 * new Date(1000 * start).getTimezoneOffset();
  let at = start + (((MONDAY - offset - start) % step) + step) % step;
  const last = axis.lastElementChild;
  const first = at;
  while (last && axis.childElementCount < Math.ceil((end - first) / step)) axis.append(last.cloneNode(true));
  for (const mark of [...axis.children]) {
    if (at >= end) mark.remove();
    // The offset may change on the way.
    const change = offset + 60 * new Date(1000 * at).getTimezoneOffset();
    const moment = step < 86400 ? at : at + change;
    mark.setAttribute("x", `${100 * (moment - start) / (end - start)}%`);
    const label = mark.querySelector("text");
    if (label) label.textContent = forms[axis.dataset.shows].format(new Date(1000 * moment));
    at += step;
  }
}

// The server writes all times in UTC. Show them in the reader's time zone, with UTC on hover.
function localise(root) {
  for (const axis of root.querySelectorAll("[data-step]")) tick(axis);
  for (const zone of root.querySelectorAll("[data-zone]")) zone.textContent = local.resolvedOptions().timeZone;
  for (const time of root.querySelectorAll("time[datetime]")) {
    const here = (forms[time.dataset.local] ?? local).format(new Date(time.dateTime));
    if ("local" in time.dataset) time.textContent = here;
    else time.title = `${here} (${time.title})`;
  }
}

// Live parts

const keyOf = (node) => node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || "" : "";
const alike = (old, next) => old.nodeName === next.nodeName && keyOf(old) === keyOf(next);

// Turn one element into another without replacing it, so that focus, ticks and scroll positions stay.
function become(old, next) {
  if (old.isEqualNode(next)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) {
    old.nodeValue = next.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // Whether details are open is up to the reader.
    if (name !== "open" && !next.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  contain(old, next);
}

function contain(parent, wanted) {
  // Several elements may have one key, such as two clients of one process. Each is used once.
  const keyed = new Map();
  for (const child of parent.children) {
    if (!keyed.has(keyOf(child))) keyed.set(keyOf(child), []);
    keyed.get(keyOf(child)).push(child);
  }
  let at = parent.firstChild;
  for (const next of [...wanted.childNodes]) {
    let old = keyOf(next) ? keyed.get(keyOf(next))?.shift() : at;
    while (old && !alike(old, next)) old = keyOf(next) ? null : old.nextSibling;
    if (!old) {
      parent.insertBefore(next, at);
      continue;
    }
    if (old === at) at = at.nextSibling;
    else if (parent.moveBefore) parent.moveBefore(old, at);
    else parent.insertBefore(old, at);
    become(old, next);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

// A change would end the selection of a reader who copies something.
function isSelectedIn(part) {
  const selection = getSelection();
  return !selection.isCollapsed && selection.containsNode(part, true);
}

function show(parts) {
  const focused = document.activeElement;
  for (const [name, text] of Object.entries(parts)) {
    const part = document.getElementById(name);
    if (!part || isSelectedIn(part)) continue;
    const template = document.createElement("template");
    template.innerHTML = text;
    localise(template.content);
    contain(part, template.content);
  }
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

const main = document.querySelector("[data-live]");
const badge = document.getElementById("live");
const trouble = document.getElementById("trouble");
const SILENCE = "This page is not up to date: the dashboard does not answer. It is asked again every 5 seconds. If that does not help, reload the page.";
let events, silent;

const isLive = (yes) => { if (badge) badge.hidden = !yes; };

function report(text) {
  trouble.textContent = text;
  trouble.hidden = !text;
}

function open() {
  events = new EventSource(main.dataset.live);
  events.onmessage = (event) => {
    show(JSON.parse(event.data));
    isLive(true);
    report("");
    wait();
  };
  events.addEventListener("trouble", (event) => {
    isLive(false);
    report(JSON.parse(event.data));
  });
  wait();
}

// Connections are short, and each is followed by another: only a longer silence is a problem.
function wait() {
  clearTimeout(silent);
  silent = setTimeout(doubt, 5000);
}

function doubt() {
  isLive(false);
  // What the server said is more precise.
  if (trouble.hidden) report(SILENCE);
  // A browser replaces a connection that was lost, but gives up after an answer such as 502 or 503.
  if (events.readyState === EventSource.CLOSED) open();
  else wait();
}

localise(document);
if (main && window.EventSource) {
  // A browser has few connections to a server: tabs that are not looked at need none.
  document.addEventListener("visibilitychange", () => {
    clearTimeout(silent);
    if (events) events.close();
    if (!document.hidden) open();
  });
  if (!document.hidden) open();
}
