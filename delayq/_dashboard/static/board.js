// Updates pages live. Pages work without this script too: they then reload by themselves.
"use strict";

const KEPT = 60;

function span(ms) {
  if (ms < 1000) return `${ms} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${Math.floor(seconds * 10) / 10} s`;
  const steps = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
  const [size, unit, small, smaller] = steps.find(([least]) => seconds >= least);
  const rest = Math.floor((seconds % size) / small);
  return `${Math.floor(seconds / size).toLocaleString("en")} ${unit}` + (rest ? ` ${rest} ${smaller}` : "");
}

function draw(line, values) {
  const most = Math.max(1, ...values);
  const step = 120 / (KEPT - 1);
  const from = KEPT - values.length;
  const points = values.map((value, at) => `${((from + at) * step).toFixed(1)},${(28 - (26 * value) / most).toFixed(1)}`);
  line.querySelector("polyline").setAttribute("points", points.join(" "));
}

function keep(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}

const live = document.querySelector("[data-live]");
if (live && window.EventSource) {
  const find = (id) => document.getElementById(id);
  const late = [], gone = [];
  let silent;
  const events = new EventSource(live.dataset.live);
  events.onmessage = (event) => {
    const figures = JSON.parse(event.data);
    for (const shown of live.querySelectorAll("[data-of]")) {
      shown.textContent = figures[shown.dataset.of].toLocaleString("en");
      if (shown.dataset.of === "dead") shown.classList.toggle("bad", figures.dead > 0);
    }
    find("paused").hidden = !figures.paused;
    find("live").hidden = false;
    // Connections are short, and each is followed by another: only a longer silence is a problem.
    clearTimeout(silent);
    silent = setTimeout(() => { find("live").hidden = true; }, 5000);
    find("trouble").textContent = "";
    const known = figures.late_ms !== null;
    find("late").textContent = figures.late_ms ? `${span(figures.late_ms)} ago` : known ? "nothing due" : "unknown";
    if (known) {
      keep(late, figures.late_ms);
      draw(find("late-line"), late);
    }
    if (figures.gone !== null) {
      find("gone").textContent = figures.gone.toLocaleString("en");
      keep(gone, figures.gone);
      draw(find("gone-line"), gone);
    }
  };
  events.addEventListener("trouble", (event) => {
    find("live").hidden = true;
    find("trouble").textContent = JSON.parse(event.data);
  });
  events.onerror = () => { if (events.readyState === EventSource.CLOSED) find("live").hidden = true; };
}

// The overview refreshes itself without disturbing the search field or the focus.
const fresh = document.querySelector("[data-refresh]");
if (fresh) {
  setInterval(async () => {
    if (document.hidden || fresh.contains(document.activeElement)) return;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const next = page.querySelector("[data-refresh]");
      if (next) fresh.replaceChildren(...next.childNodes);
    } catch { /* Try again next time. */ }
  }, 1000 * Number(fresh.dataset.refresh));
}
